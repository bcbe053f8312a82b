// Two runs beside each other as wholes: what differs in their configurations, where they ended, which tasks flipped.

import { h, number, signed, table } from "./dom.js";
import { get } from "./source.js";
import { hashOf } from "./routes.js";

const MOST_TASKS = 100;
// Keys that differ between any two runs and say nothing about what was trained.
const PLACES = new Set(["output_dir", "logging_dir", "checkpoint_config.output_dir", "rollout_dump_dir", "export_dir", "exp_name"]);

export async function wholes(left, right, names) {
  const [[config, other], [metrics, others]] = await Promise.all([
    Promise.all([left, right].map(async (run) => (await get(`/api/runs/${run.number}/config`)).config)),
    Promise.all([left, right].map((run) => get(`/api/runs/${run.number}/metrics`, { name: names }))),
  ]);
  return [differing(config, other), ended(names, metrics, others), await flipped(left, right)];
}

function differing(left, right) {
  const head = h("h2", {}, "What differs in the configuration");
  if (!Object.keys(left).length || !Object.keys(right).length) return [head, h("p", { class: "quiet" }, "Not both runs have kept their configuration (config.yaml).")];
  const keys = [...new Set([...Object.keys(left), ...Object.keys(right)])].filter((key) => left[key] !== right[key] && !PLACES.has(key)).sort();
  const rows = keys.map((key) => h("tr", {}, h("th", { scope: "row" }, key), h("td", { class: "wrap" }, left[key] ?? "\u2013"), h("td", { class: "wrap" }, right[key] ?? "\u2013")));
  return [head, keys.length ? table("Keys that differ", ["Key", "Left", "Right"], rows, { class: "differing" }) : h("p", { class: "quiet" }, "Nothing but names and folders.")];
}

function ended(names, left, right) {
  const last = (found, name) => (found.values[name] || []).findLast((value) => value !== null) ?? null;
  const rows = names.map((name) => [name, last(left, name), last(right, name)]).filter(([, one, other]) => one !== null || other !== null)
    .map(([name, one, other]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "num" }, number(one)), h("td", { class: "num" }, number(other)),
      h("td", { class: "num" }, one === null || other === null ? "\u2013" : signed(other - one))));
  return [h("h2", {}, "Where they ended"), rows.length ? table("Last values", ["Metric", "Left", "Right", "Change"], rows, { class: "ended" }) : h("p", { class: "quiet" }, "No metrics.")];
}

// Tasks that both have, by the mean reward at the last step of each; of validations if both have some.
async function flipped(left, right) {
  for (const kind of ["validation", "train"]) {
    const [one, other] = await Promise.all([left, right].map(async (run) => (await get(`/api/runs/${run.number}/tasks`, { kind })).tasks));
    const there = new Map(other.map((task) => [task.task_id, task]));
    const both = one.filter((task) => there.has(task.task_id) && task.last_reward !== null && there.get(task.task_id).last_reward !== null)
      .map((task) => ({ ...task, other: there.get(task.task_id).last_reward }));
    if (!both.length) continue;
    const changed = both.filter((task) => task.other !== task.last_reward).sort((a, b) => Math.abs(b.other - b.last_reward) - Math.abs(a.other - a.last_reward));
    const rows = changed.slice(0, MOST_TASKS).map((task) =>
      h("tr", {},
        h("td", {}, h("a", { href: hashOf("compare", { run: left.number || undefined, run_b: right.number, task: task.task_id }) }, task.task_id)),
        h("td", {}, task.tag), h("td", { class: "num" }, number(task.last_reward)), h("td", { class: "num" }, number(task.other)),
        h("td", { class: `num ${task.other < task.last_reward ? "neg" : "pos"}` }, signed(task.other - task.last_reward))));
    const what = kind === "validation" ? "validation tasks" : "tasks";
    const better = changed.filter((task) => task.other > task.last_reward).length;
    return [h("h2", {}, kind === "validation" ? "Validation tasks that flipped" : "Tasks that changed"),
      h("p", { class: "quiet" }, `Of ${both.length} ${what} of both runs ${better} ended better on the right, ${changed.length - better} worse, ${both.length - changed.length} the same.`),
      rows.length ? table("Tasks by their change", ["Task", "Tag", "Left", "Right", "Change"], rows, { class: "flipped" }) : null];
  }
  return [h("h2", {}, "Tasks"), h("p", { class: "quiet" }, "No task is recorded in both.")];
}

const configurations = new Map();

// All keys of one run, folded. Asked for once: a card is drawn every second.
export async function configurationOf(run) {
  if (!configurations.has(run.number)) configurations.set(run.number, (await get(`/api/runs/${run.number}/config`)).config);
  const config = configurations.get(run.number);
  const rows = Object.entries(config).map(([key, value]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", { class: "wrap" }, value)));
  return rows.length ? h("details", { class: "configuration" }, h("summary", {}, `Configuration: ${rows.length} keys`), table(`Configuration of ${run.name}`, ["Key", "Value"], rows)) : null;
}
