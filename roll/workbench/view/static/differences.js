// The tokens of a step on which engine and trainer differ most, each with a link to its place.

import { h, number, replace, signed, table } from "./dom.js";
import { get } from "./source.js";
import { go, hashOf } from "./routes.js";
import { nameOf, nothingRecorded, stepBar, stepFrom, stepsOf } from "./groups.js";

export async function showDifferences(main, params, app) {
  const run = app.run(params);
  const step = stepFrom(params, run, "train");
  const change = (more) => go("differences", { ...params, ...more });
  const bar = h("div", { class: "bar" }, stepBar(app, params, step, "train", change));
  if (step === undefined || !stepsOf(run, "train").length) {
    replace(main, bar, nothingRecorded(run));
    return;
  }
  const found = await get(`/api/runs/${run.number}/differences`, { step, limit: 100 });
  const rows = found.tokens.map((one) =>
    h("tr", {},
      h("td", {}, h("a", { href: hashOf("episode", { run: params.run, step, row: one.row, token: one.position, by: "difference" }) }, h("code", {}, JSON.stringify(one.token)))),
      h("td", { class: "num" }, signed(one.old_logprob - one.sampling_logprob)),
      h("td", { class: "num" }, number(Math.exp(one.old_logprob - one.sampling_logprob), 4)),
      h("td", { class: "num" }, number(one.old_logprob, 4)),
      h("td", { class: "num" }, number(one.sampling_logprob, 4)),
      h("td", {}, `${one.task_id} ${nameOf(one)}`),
      h("td", { class: "num" }, one.position)));
  replace(
    main,
    bar,
    h("h1", {}, `Largest differences between trainer and engine, step ${step}`),
    h("p", { class: "quiet" }, "Log-prob of the trainer before the update less the engine's at sampling time. Large ones come from precision, kernels, or weights that were not in step."),
    rows.length
      ? table("Tokens with the largest differences", ["Token", "Difference", "Ratio", "Trainer", "Engine", "Episode", "Position"], rows)
      : h("div", { class: "problem" }, `Nothing to compare: ${found.note}`),
  );
}
