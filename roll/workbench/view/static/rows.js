// All episodes of a run as one list: search over steps.

import { field, h, histogram, number, replace, select, signed, table } from "./dom.js";
import { get } from "./source.js";
import { go, hashOf } from "./routes.js";
import { filterBar, filtersOf } from "./filters.js";
import { kindSelect, nameOf, stepsOf, versions } from "./groups.js";

const ROWS_PER_PAGE = 50;
const COLUMNS = [
  ["step", "Step"], ["task_id", "Task"], ["reward", "Reward"], ["advantage", "Advantage"], ["num_response_tokens", "Tokens"],
  ["num_turns", "Turns"], ["status", "Status"], ["staleness", "Staleness"], ["mismatch_max", "Train/infer"],
];

export async function showRows(main, params, app) {
  const run = app.run(params);
  const kind = params.kind || (stepsOf(run, "train").length ? "train" : "validation");
  const offset = Number(params.offset || 0);
  const change = (more) => go("rows", { ...params, offset: "", ...more });
  const scope = params.step || "";
  const asked = { kind, step: scope, ...filtersOf(params), sort: params.sort, order: params.order, offset: offset || undefined, limit: ROWS_PER_PAGE };
  const found = await get(`/api/runs/${run.number}/rows`, asked);
  const head = ([name, title]) => {
    const on = params.sort === name;
    const falling = on && params.order === "desc";
    return h("th", { scope: "col", "aria-sort": on ? (falling ? "descending" : "ascending") : "none" },
      h("button", { type: "button", class: "plain", on: { click: () => change({ sort: name, order: on && !falling ? "desc" : "" }) } }, title, on ? (falling ? " \u2193" : " \u2191") : ""));
  };
  const link = (row) => hashOf("episode", { run: run.number || undefined, kind: kind === "train" ? undefined : kind, step: row.step, row: row.row });
  const rows = found.rows.map((row) =>
    h("tr", {},
      h("td", { class: "num" }, row.step),
      h("td", {}, h("a", { href: link(row) }, `${row.task_id} ${nameOf(row)}`)),
      h("td", { class: "num" }, number(row.reward)),
      h("td", { class: `num ${row.advantage < 0 ? "neg" : row.advantage > 0 ? "pos" : ""}` }, row.advantage === null ? "\u2013" : signed(row.advantage)),
      h("td", { class: "num" }, number(row.num_response_tokens)),
      h("td", { class: "num" }, number(row.num_turns)),
      h("td", {}, h("span", { class: `chip status-${row.status}` }, row.status)),
      h("td", { class: "num" }, row.staleness === null ? versions(row) : number(row.staleness)),
      h("td", { class: "num" }, number(row.mismatch_max)),
      h("td", { class: "excerpt" }, h("span", { dir: "auto" }, row.dropped || row.response_start))));
  const steps = stepsOf(run, kind);
  replace(
    main,
    h("h1", { class: "visually-hidden" }, "Search over all episodes"),
    h("div", { class: "bar" },
      app.runs.length > 1 ? field("Run", select(app.runs.map((one) => [one.number, one.name]), run.number, (value) => change({ run: value }))) : null,
      kindSelect(run, kind, change),
      field("Steps", select([["", "all"], ...steps.map((one) => [one, `step ${one}`])], scope, (step) => change({ step })))),
    filterBar(params, {}, change),
    histogram(found.histogram, "Rewards of what fits"),
    h("div", { class: "pages" },
      h("span", { "data-total": found.total }, found.total ? `${offset + 1} to ${Math.min(offset + ROWS_PER_PAGE, found.total)} of ${found.total.toLocaleString("en")} episodes` : "No episode fits."),
      h("button", { type: "button", disabled: offset === 0, on: { click: () => change({ offset: Math.max(offset - ROWS_PER_PAGE, 0) || "" }) } }, "Back"),
      h("button", { type: "button", disabled: offset + ROWS_PER_PAGE >= found.total, on: { click: () => change({ offset: offset + ROWS_PER_PAGE }) } }, "Further")),
    table("Episodes", [...COLUMNS.map(head), "Text"], rows),
  );
}
