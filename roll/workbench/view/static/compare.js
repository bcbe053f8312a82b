// The same task at two steps, or in two runs, beside each other; and how it went over the run.

import { field, h, number, replace, select, signed, table } from "./dom.js";
import { get } from "./source.js";
import { go, hashOf } from "./routes.js";
import { conversation } from "./episode.js";
import { PANELS } from "./curves.js";
import { wholes } from "./runs.js";
import { nameOf, stepsOf } from "./groups.js";

export async function showCompare(main, params, app) {
  const sides = ["a", "b"];
  const task = params.task || "";
  const left = app.runs[Number(params.run ?? 0)] || app.runs[0];
  // A task is compared with itself over the run, runs as wholes with each other, unless another one is chosen.
  const right = app.runs[Number(params.run_b ?? -1)] || (params.task ? left : app.runs.find((run) => run !== left)) || left;
  const runOf = (side) => (side === "b" ? right : left);
  const change = (more) => go("compare", { ...params, ...more });
  const bar = [];
  if (app.runs.length > 1) {
    bar.push(field("Left run", select(app.runs.map((run) => [run.number, run.name]), runOf("a").number, (run) => change({ run, a: "" }))));
    bar.push(field("Right run", select(app.runs.map((run) => [run.number, run.name]), runOf("b").number, (run_b) => change({ run_b, b: "" }))));
  }
  const input = h("input", { value: task, list: "task-names", "data-key": "search", placeholder: "task id" });
  const names = await tasksOf(runOf("a"));
  bar.push(h("form", { class: "bar", on: { submit: (event) => { event.preventDefault(); change({ task: input.value.trim(), a: "", b: "", step: "", row: "" }); } } },
    field("Task", input), h("datalist", { id: "task-names" }, names.map((one) => h("option", { value: one.task_id }))), h("button", { type: "submit" }, "Compare")));
  if (!task) {
    const changed = names.filter((one) => one.change);
    const rest = names.length - changed.length;
    const known = PANELS.filter((name) => left.metrics.includes(name) || right.metrics.includes(name));
    replace(main, h("h1", { class: "visually-hidden" }, "Compare"), h("div", { class: "bar" }, bar),
      right === left ? null : await wholes(left, right, known),
      h("h2", {}, right === left ? "Tasks that changed over the run" : `Tasks that changed over the run ${left.name}`),
      h("p", {}, "Pick a task, here or by \u201cCompare\u201d in an episode. ",
        !names.length ? "Nothing is recorded so far." : changed.length ? "Those that changed most come first." : "None changed.",
        rest && changed.length ? ` ${rest} more ended as they began.` : ""),
      changed.length ? taskList(changed, params) : null);
    return;
  }
  const rows = await Promise.all(sides.map(async (side) => (await get(`/api/runs/${runOf(side).number}/task`, { task })).rows.sort(byTime)));
  const keyOf = (row) => `${row.kind}.${row.step}.${row.row}`;
  const given = params.step !== undefined && params.row !== undefined ? `${params.kind || "train"}.${params.step}.${params.row}` : null;
  const usual = { a: rows[0].find((row) => keyOf(row) === given) || rows[0][0], b: null };
  const other = rows[1].filter((row) => runOf("b") !== runOf("a") || keyOf(row) !== keyOf(usual.a || {}));
  usual.b = other.findLast((row) => row.member === usual.a?.member) || other.at(-1) || rows[1].at(-1);
  const picked = sides.map((side, at) => rows[at].find((row) => keyOf(row) === params[side]) || usual[side]);
  if (picked.includes(undefined) || picked.includes(null)) {
    replace(main, h("div", { class: "bar" }, bar), h("div", { class: "problem" }, `Task ${task} isn't recorded in both.`));
    return;
  }
  const found = await Promise.all(sides.map((side, at) => get(`/api/runs/${runOf(side).number}/episode`, { kind: picked[at].kind, step: picked[at].step, row: picked[at].row })));
  const shared = commonStart(found[0].response || "", found[1].response || "");
  replace(
    main,
    h("div", { class: "bar" }, bar),
    h("h1", {}, `${task}`),
    h("p", { class: "quiet" }, found[0].response === found[1].response ? "The responses are the same." : `The responses share their first ${shared.length} characters.`),
    differencesOf(found),
    h("div", { class: "pair" }, sides.map((side, at) =>
      h("section", { class: "side-by-side", "aria-label": at ? "Right" : "Left" },
        field(at ? "Right" : "Left", select(rows[at].map((row) => [keyOf(row), labelOf(row)]), keyOf(picked[at]), (value) => change({ [side]: value }))),
        h("p", {}, h("a", { href: hashOf("episode", { run: runOf(side).number || undefined, kind: picked[at].kind, step: picked[at].step, row: picked[at].row }) }, "Open this episode")),
        responseMarked(found[at].response || "", shared),
        conversation(found[at], at ? "right" : "left")))),
    h("h2", {}, "Over the run"),
    sides.slice(0, runOf("a") === runOf("b") ? 1 : 2).map((side, at) => overRun(runOf(side), rows[at], (row) =>
      (runOf("a") === runOf("b") ? sides : [side]).map((to) =>
        h("button", { type: "button", on: { click: () => change({ [to]: keyOf(row) }) } }, to === "a" ? "left" : "right")))),
  );
}

function byTime(a, b) {
  return a.step - b.step || a.kind.localeCompare(b.kind) || a.row - b.row;
}

function labelOf(row) {
  return `step ${row.step} ${row.kind === "train" ? "" : row.kind} ${nameOf(row)}: reward ${number(row.reward)}`;
}

async function tasksOf(run) {
  // Those of validations come again and again; training may meet a task once.
  const kinds = stepsOf(run, "validation").length > 1 ? ["validation", "train"] : ["train", "validation"];
  for (const kind of kinds) {
    const { tasks } = await get(`/api/runs/${run.number}/tasks`, { kind });
    if (tasks.length) return tasks;
  }
  return [];
}

// Tasks that changed most over the run come first.
function taskList(tasks, params) {
  const rows = tasks.map((task) =>
    h("tr", {},
      h("td", {}, h("a", { href: hashOf("compare", { run: params.run, run_b: params.run_b, task: task.task_id }) }, task.task_id)),
      h("td", {}, task.tag),
      h("td", { class: "num" }, task.episodes),
      h("td", { class: "num" }, `${number(task.first_reward)} at step ${task.first_step}`),
      h("td", { class: "num" }, `${number(task.last_reward)} at step ${task.last_step}`),
      h("td", { class: `num ${task.change < 0 ? "neg" : task.change > 0 ? "pos" : ""}` }, task.change === null ? "\u2013" : signed(task.change))));
  return table("Recorded tasks", ["Task", "Tag", "Episodes", "First mean reward", "Last mean reward", "Change"], rows);
}

function commonStart(one, other) {
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  return one.slice(0, at);
}

function responseMarked(text, shared) {
  const limit = 20000;
  return h("div", { class: "text marked", dir: "auto" }, h("span", { class: "same" }, shared.slice(0, limit)), h("mark", {}, text.slice(shared.length, shared.length + limit)));
}

function differencesOf([left, right]) {
  const names = ["reward", "shaped_reward", "advantage", "num_response_tokens", "num_turns", "version_max", "mismatch_max", "kl_mean"];
  const parts = [...new Set([left, right].flatMap((one) => Object.keys(one.reward_parts || {})))];
  const values = [
    ...names.map((name) => [name.replaceAll("_", " "), left[name], right[name]]),
    ...parts.map((name) => [`part ${name}`, left.reward_parts?.[name] ?? null, right.reward_parts?.[name] ?? null]),
  ].filter(([, one, other]) => one !== null || other !== null);
  const rows = values.map(([name, one, other]) =>
    h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "num" }, number(one)), h("td", { class: "num" }, number(other)),
      h("td", { class: "num" }, one === null || other === null ? "\u2013" : signed(other - one))));
  return table("Numbers beside each other", ["Number", "Left", "Right", "Change"], rows);
}

function overRun(run, rows, show) {
  const steps = new Map();
  for (const row of rows) {
    const key = `${row.step} ${row.kind}`;
    steps.set(key, [...(steps.get(key) || []), row]);
  }
  const lines = [...steps.values()].map((members) => {
    const mean = members.reduce((sum, one) => sum + (one.reward ?? 0), 0) / members.length;
    const length = members.reduce((sum, one) => sum + (one.num_response_tokens ?? 0), 0) / members.length;
    return h("tr", {}, h("td", {}, `step ${members[0].step}`), h("td", {}, members[0].kind), h("td", { class: "num" }, members.length), h("td", { class: "num" }, number(mean)), h("td", { class: "num" }, number(length, 1)), h("td", { class: "show" }, show(members[0])));
  });
  return table(`The task over the run ${run.name}`, ["Step", "Episodes", "Number", "Mean reward", "Mean length", "Show"], lines);
}
