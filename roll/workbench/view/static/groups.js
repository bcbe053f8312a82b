// A step's groups: the members side by side, with rewards, advantages, lengths, ends, weight versions.

import { field, h, histogram, number, replace, select, signed, table } from "./dom.js";
import { get } from "./source.js";
import { go, hashOf } from "./routes.js";
import { filterBar, filtersOf } from "./filters.js";

const PER_PAGE = 20;
const KIND_NAMES = { train: "trained on", dropped: "dropped or failed", validation: "validation" };
const ORDERS = [
  ["recorded", "as recorded"], ["reward_mean", "mean reward"], ["reward_std", "spread of rewards"], ["length_mean", "length"],
  ["mismatch_max", "train/infer difference"], ["advantage_max", "largest advantage"],
];

export function stepsOf(run, kind) {
  return run?.recorded?.[kind] || [];
}

export function kindSelect(run, kind, change) {
  const there = Object.keys(KIND_NAMES).filter((name) => stepsOf(run, name).length || name === kind);
  return field("Episodes", select(there.map((name) => [name, KIND_NAMES[name]]), kind, (value) => change({ kind: value, step: "", offset: "" })));
}

// Step and run; `[` and `]` go to the neighbours.
export function stepBar(app, params, step, kind, change) {
  const run = app.run(params);
  const steps = stepsOf(run, kind);
  const at = steps.indexOf(step);
  const to = (place) => change({ step: steps[place], offset: "", row: "" });
  return [
    app.runs.length > 1 ? field("Run", select(app.runs.map((one) => [one.number, one.name]), run.number, (value) => change({ run: value, step: "", offset: "" }))) : null,
    kindSelect(run, kind, change),
    h("div", { class: "stepper", role: "group", "aria-label": "Step" },
      h("button", { type: "button", "data-key": "[", disabled: at <= 0, on: { click: () => to(at - 1) }, "aria-label": "Previous step" }, "\u2039"),
      select(steps.map((one) => [one, `step ${one}`]), step, (value) => change({ step: value, offset: "" }), "Step"),
      h("button", { type: "button", "data-key": "]", disabled: at < 0 || at >= steps.length - 1, on: { click: () => to(at + 1) }, "aria-label": "Next step" }, "\u203a")),
  ];
}

export function stepFrom(params, run, kind) {
  const steps = stepsOf(run, kind);
  const step = params.step === undefined ? steps.at(-1) : Number(params.step);
  return steps.includes(step) ? step : steps.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best), steps.at(-1));
}

export function nothingRecorded(run) {
  return h("div", { class: "problem" },
    h("p", {}, `${run?.name || "The run"} has no such episodes so far.`),
    h("p", {}, "A run records its episodes with ", h("code", {}, "rollout_dump_dir=<output_dir>/rollouts"), "."));
}

export async function showGroups(main, params, app) {
  const run = app.run(params);
  const kind = params.kind || (stepsOf(run, "train").length ? "train" : stepsOf(run, "validation").length ? "validation" : "train");
  const step = stepFrom(params, run, kind);
  const change = (more) => go("groups", { ...params, ...more });
  if (step === undefined) {
    replace(main, h("div", { class: "bar" }, stepBar(app, params, step, kind, change)), nothingRecorded(run));
    return;
  }
  const offset = Number(params.offset || 0);
  const asked = { kind, step, ...filtersOf(params), sort: params.sort, order: params.order, offset: offset || undefined, limit: PER_PAGE };
  const found = await get(`/api/runs/${run.number}/groups`, asked);
  const pages = h("div", { class: "pages" },
    h("span", {}, found.total ? `Groups ${offset + 1} to ${Math.min(offset + PER_PAGE, found.total)} of ${found.total}; ${found.rows} episodes fit` : "No group fits."),
    h("button", { type: "button", disabled: offset === 0, on: { click: () => change({ offset: Math.max(offset - PER_PAGE, 0) || "" }) } }, "Back"),
    h("button", { type: "button", disabled: offset + PER_PAGE >= found.total, on: { click: () => change({ offset: offset + PER_PAGE }) } }, "Further"));
  replace(
    main,
    h("h1", { class: "visually-hidden" }, `Groups of step ${step}`),
    h("div", { class: "bar" }, stepBar(app, params, step, kind, change),
      field("Sorted by", select(ORDERS, params.sort || "recorded", (sort) => change({ sort, offset: "" }))),
      field("Order", select([["", "rising"], ["desc", "falling"]], params.order || "", (order) => change({ order, offset: "" }))),
      kind === "train" ? h("a", { class: "button", href: hashOf("differences", { run: params.run, step }) }, "Largest train/infer differences") : null),
    filterBar(params, found.values || {}, (more) => change({ ...more, offset: "" })),
    histogram(found.histogram, "Rewards of the step"),
    pages,
    found.groups.map((group) => groupCard(group, { run, kind, step, params })),
    found.groups.length > 3 ? pages.cloneNode(false) : null,
  );
  const latest = params.step === undefined;
  app.refresh = async () => {
    if (latest && stepFrom(params, app.run(params), kind) !== step) window.dispatchEvent(new HashChangeEvent("hashchange"));
  };
}

function groupCard(group, { run, kind, step, params }) {
  const parts = [...new Set(group.members.flatMap((member) => Object.keys(member.reward_parts || {})))].slice(0, 6);
  const first = group.members[0];
  const dropped = group.members.some((member) => member.dropped);
  const mismatched = group.members.some((member) => member.mismatch_max !== null);
  const heads = ["Episode", "Reward", ...parts, ...(kind === "train" ? ["Advantage"] : []), "Tokens", "End", "Versions",
    ...(mismatched ? ["Train/infer"] : []), ...(dropped ? ["Dropped because"] : []), "Response"];
  const rows = group.members.map((member) =>
    h("tr", { class: member.match ? "" : "dim", "data-row": member.row },
      h("td", {}, h("a", { href: hashOf("episode", { run: run.number || undefined, kind: kind === "train" ? undefined : kind, step, row: member.row }) }, nameOf(member))),
      h("td", { class: "num" }, number(member.reward)),
      parts.map((part) => h("td", { class: "num" }, number(member.reward_parts?.[part]))),
      kind === "train" ? h("td", { class: `num ${member.advantage < 0 ? "neg" : member.advantage > 0 ? "pos" : ""}` }, member.advantage === null ? "\u2013" : signed(member.advantage)) : null,
      h("td", { class: "num" }, number(member.num_response_tokens)),
      h("td", {}, h("span", { class: `chip status-${member.status}` }, member.status), member.finish_reason === "length" ? " length" : ""),
      h("td", { class: "num" }, versions(member)),
      mismatched ? h("td", { class: "num" }, number(member.mismatch_max)) : null,
      dropped ? h("td", { class: "wrap" }, member.dropped) : null,
      h("td", { class: "excerpt" }, h("span", { dir: "auto" }, member.response_start))));
  return h(
    "article",
    { class: "card group", "data-task": group.task_id },
    h("h2", {}, group.task_id, h("span", { class: "chip" }, group.tag),
      h("span", { class: "quiet" }, `mean ${number(group.reward_mean)}, spread ${number(group.reward_std)}, ${group.members.length} episodes, ${group.distinct} distinct ${group.distinct === 1 ? "response" : "responses"}`),
      h("a", { href: hashOf("compare", { run: params.run, task: group.task_id, kind, step }) }, "over the run")),
    h("p", { class: "prompt" }, h("span", { class: "label" }, "Task "), h("span", { dir: "auto" }, endOf(first.prompt_end))),
    first.ground_truth ? h("p", { class: "truth" }, h("span", { class: "label" }, "Gold answer "), h("span", { dir: "auto" }, first.ground_truth)) : null,
    table(`Members of ${group.task_id}`, heads, rows),
  );
}

// Marks of chat templates: <|im_start|>, <start_of_turn>, [INST], DeepSeek's wide bars; and a thought that is opened.
const TEMPLATE_MARKS = /<[|\uff5c][^<>|\uff5c]{1,40}[|\uff5c]>|<\/?(?:start|end)_of_turn>|\[\/?INST\]|<\/?s>|<think>/;
const ROLE = /^\s*(?:system|user|assistant|model|tool)\b[ \t]*(?:\n|$)/;

// The last thing that is said in a prompt, without its template's marks and the opening of the response.
export function questionOf(text) {
  const said = text.split(TEMPLATE_MARKS).map((part) => part.replace(ROLE, "")).filter((part) => part.trim());
  return said.at(-1) || text;
}

// The end of a prompt, where the question stands in most.
function endOf(text) {
  const whole = questionOf(text || "").trim().replace(/\s*\n\s*/g, " \u21b5 ");
  return whole.length > 180 ? `\u2026${whole.slice(-180)}` : whole;
}

export function nameOf(row) {
  const context = /\/(\d+)$/.exec(row.row_id || "");
  return `#${row.member}${context ? `/${context[1]}` : ""}`;
}

export function versions(row) {
  if (row.version_min === null || row.version_min < 0) return "\u2013";
  return row.version_min === row.version_max ? String(row.version_min) : `${row.version_min}\u2013${row.version_max}`;
}
