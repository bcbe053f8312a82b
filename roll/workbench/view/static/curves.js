// Curves of one run or several over each other, what a run is doing, and what went wrong.

import { announce, field, h, number, replace, seconds, select, table } from "./dom.js";
import { get } from "./source.js";
import { lasting, nowOf, usageOf } from "./live.js";
import { go, hashOf } from "./routes.js";
import { configurationOf } from "./runs.js";
import { profileLinks } from "./timeline.js";

export const PANELS = [
  "reward/mean", "val/accuracy", "val/reward", "actor/entropy", "kl/reference", "actor/ppo_kl", "mismatch/kl", "response/length_mean",
  "response/truncated_share", "group/zero_signal_share", "actor/grad_norm", "actor/loss", "sft/loss", "preference/loss",
  "preference/accuracy", "val/token_accuracy", "staleness/mean", "time/step",
];
const MAX_PANELS = 9;
// Metrics that answer a question together, each set a button.
const SETS = {
  Learning: ["reward/mean", "val/accuracy", "reward/std", "group/reward_std_mean", "group/zero_signal_share", "response/length_mean", "response/truncated_share"],
  Collapse: ["actor/entropy", "group/zero_signal_share", "group/reward_std_mean", "response/length_mean", "val/accuracy", "kl/reference", "actor/ppo_kl", "actor/grad_norm"],
  "Train/infer": ["mismatch/kl", "mismatch/ratio_max", "mismatch/ratio_min", "mismatch/abs_log_ratio_mean", "mismatch/weight_mean", "mismatch/rejected_share", "staleness/mean", "staleness/max"],
  Failures: ["rollout/failed_episodes", "rollout/failed_groups", "rollout/filtered_groups", "rollout/filtered_responses", "rollout/failed_env_error", "rollout/failed_reward_error", "rollout/failed_timeout", "env/restarts", "rollout/engine_restarts"],
  Time: ["time/step", "time/generate", "time/train_actor", "time/sync_weights", "time/validate", "throughput/tokens_per_second", "throughput/generated_per_second", "memory/host_gib"],
};
const COLOURS = ["--run-0", "--run-1", "--run-2", "--run-3", "--run-4", "--run-5"];
const MARKS = { checkpoint: "--mark-checkpoint", "engine restart": "--mark-restart", warning: "--mark-warning", failure: "--mark-warning" };

export function colourOf(place) {
  return getComputedStyle(document.documentElement).getPropertyValue(COLOURS[place % COLOURS.length]).trim();
}

export async function showCurves(main, params, app) {
  const hidden = new Set([params.hide || []].flat());
  const chosen = [params.metric || []].flat();
  const smooth = Math.min(Math.max(Number(params.smooth || 0), 0), 0.99);
  const known = [...new Set(app.runs.flatMap((run) => run.metrics))].sort();
  const names = chosen.length ? chosen.filter((name) => known.includes(name)) : PANELS.filter((name) => known.includes(name));
  const change = (more) => go("curves", { ...params, ...more });

  const live = h("section", { class: "live", "aria-label": "What the runs are doing" });
  const panels = h("div", { class: "panels" });
  const unmoved = h("p", { class: "quiet unmoved" });
  const happened = h("section", { class: "happened", "aria-label": "Events" });
  const list = h("datalist", { id: "metric-names" }, known.map((name) => h("option", { value: name })));
  const add = h("input", { list: "metric-names", placeholder: "metric", autocomplete: "off", "data-key": "search" });
  const form = h(
    "form",
    {
      class: "bar",
      on: {
        submit: (event) => {
          event.preventDefault();
          const name = add.value.trim();
          if (known.includes(name)) change({ metric: [name, ...names.filter((other) => other !== name)] });
          else announce(`There is no metric ${name}`);
        },
      },
    },
    field("Show a metric", add),
    list,
    h("button", { type: "submit" }, "Add"),
    field("Smoothing", h("input", { type: "range", min: "0", max: "0.95", step: "0.05", value: smooth, on: { change: (e) => change({ smooth: e.target.value }) } })),
    field("Scale", select([["", "linear"], ["1", "logarithmic"]], params.log || "", (log) => change({ log }))),
    app.runs.length > 1
      ? h("fieldset", { class: "runs" }, h("legend", {}, "Runs"), app.runs.map((run) =>
          h("label", { class: "run" },
            h("input", { type: "checkbox", checked: !hidden.has(String(run.number)), on: { change: () => toggle(run) } }),
            h("span", { class: "swatch", css: { background: `var(${COLOURS[run.number % COLOURS.length]})` } }), run.name)))
      : null,
  );
  function toggle(run) {
    const now = new Set(hidden);
    if (!now.delete(String(run.number))) now.add(String(run.number));
    change({ hide: [...now] });
  }

  const sets = Object.entries(SETS).map(([name, wanted]) => [name, wanted.filter((metric) => known.includes(metric))]).filter(([, there]) => there.length);
  const choices = h("div", { class: "bar sets", role: "group", "aria-label": "Sets of metrics" },
    [["Usual ones", []], ...sets].map(([name, metric]) =>
      h("button", { type: "button", "aria-pressed": String(metric.join() === chosen.join()), on: { click: () => change({ metric }) } }, name)));
  replace(main, h("h1", { class: "visually-hidden" }, "Curves"), live, choices, form, panels, unmoved, happened);
  const shown = app.runs.filter((run) => !hidden.has(String(run.number)));
  const plots = [];

  async function draw() {
    const found = await Promise.all(shown.map((run) => get(`/api/runs/${run.number}/metrics`, { name: names })));
    const events = await Promise.all(shown.map(async (run) => (await get(`/api/runs/${run.number}/events`)).events));
    for (const plot of plots.splice(0)) plot.destroy();
    // Of the usual metrics those that never move say nothing as a chart.
    const flat = chosen.length ? [] : names.filter((name) => isFlat(found.map((one) => one.values[name] || [])));
    const drawn = names.filter((name) => !flat.includes(name));
    replace(panels, (chosen.length ? drawn : drawn.slice(0, MAX_PANELS)).map((name) => panel(name, found, events)));
    const still = flat.map((name) => `${name} ${number(found.flatMap((one) => one.values[name] || []).find((value) => value !== null))}`);
    replace(unmoved, still.length ? `The same at every step, so without a chart: ${still.join(", ")}` : "");
    if (!names.length) replace(panels, h("p", { class: "quiet" }, "No metrics so far."));
    drawEvents(happened, shown, events, params);
    await drawLive(live, app, params);
  }

  function panel(name, found, events) {
    const series = shown.map((run, place) => ({ run, steps: found[place].steps, values: found[place].values[name] || [] }))
      .filter((one) => one.values.some((value) => value !== null));
    const place = h("div", { class: "plot" });
    const last = series.map((one) => {
      const at = one.values.findLastIndex((value) => value !== null);
      return [one.run.name, one.steps[at], one.values[at]];
    });
    const said = last.map(([run, step, value]) => `${run} ${number(value)} at step ${step}`).join(", ");
    const figure = h(
      "figure",
      { class: "panel", "data-metric": name },
      h("figcaption", {}, h("span", { class: "metric" }, name),
        h("button", { type: "button", class: "plain", "aria-label": `Remove ${name}`, on: { click: () => change({ metric: names.filter((other) => other !== name) }) } }, "\u00d7")),
      place,
      h("p", { class: "last" }, said || "no values"),
    );
    if (series.length) requestAnimationFrame(() => plots.push(plotOf(place, name, series, events, params, smooth)));
    return figure;
  }

  const redraw = () => draw().catch((error) => announce(error.message));
  const resized = new ResizeObserver(() => {
    for (const plot of plots) plot.setSize({ width: plot.root.parentElement.clientWidth, height: 190 });
  });
  resized.observe(panels);
  window.addEventListener("themechange", redraw);
  app.onLeave(() => {
    resized.disconnect();
    window.removeEventListener("themechange", redraw);
    for (const plot of plots) plot.destroy();
  });
  app.refresh = redraw;
  app.refreshLive = () => drawLive(live, app);
  await draw();
}

// One value only, at two steps or more, in all runs.
function isFlat(columns) {
  const values = columns.flat().filter((value) => value !== null);
  return values.length > 1 && values.every((value) => value === values[0]);
}

export function smoothed(values, weight) {
  let mean = null;
  let share = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = (mean ?? 0) * weight + value * (1 - weight);
    share = share * weight + (1 - weight);
    return mean / share;
  });
}

function plotOf(place, name, series, events, params, smooth) {
  const style = getComputedStyle(document.documentElement);
  const colour = (variable) => style.getPropertyValue(variable).trim();
  const log = params.log === "1";
  const tables = series.map((one) => {
    const values = log ? one.values.map((value) => (value > 0 ? value : null)) : one.values;
    const padded = [...values, ...Array(Math.max(0, one.steps.length - values.length)).fill(null)];
    return smooth ? [one.steps, padded, smoothed(padded, smooth)] : [one.steps, padded];
  });
  const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
  const lines = series.flatMap((one) => {
    const stroke = colour(COLOURS[one.run.number % COLOURS.length]);
    const points = { show: one.steps.length < 40, size: 4 };
    const raw = { label: one.run.name, stroke: smooth ? `${stroke}55` : stroke, width: 1.5, points, spanGaps: true };
    return smooth ? [raw, { label: `${one.run.name}, smoothed`, stroke, width: 2, points: { show: false }, spanGaps: true }] : [raw];
  });
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
  const options = {
    width: place.clientWidth || 320,
    height: 190,
    legend: { show: false },
    cursor: { sync: { key: "steps" }, y: false },
    scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: log ? undefined : around } },
    axes: [{ ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000] },
      { ...axis, size: 60, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) }],
    series: [{ label: "step" }, ...lines],
    hooks: { draw: [(plot) => drawMarks(plot, events, colour)] },
  };
  const plot = new uPlot(options, data, place);
  plot.over.addEventListener("click", () => {
    const at = plot.cursor.idx;
    if (at !== null && at !== undefined) go("groups", { run: series[0].run.number || undefined, step: data[0][at] });
  });
  return plot;
}

function around(plot, low, high) {
  if (low === null) return [0, 1];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  return low === 0 ? [-1, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
}

function short(tick) {
  const size = Math.abs(tick);
  if (size !== 0 && (size < 1e-2 || size >= 1e5)) return tick.toExponential(1);
  return String(Number(tick.toFixed(3)));
}

function drawMarks(plot, events, colour) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.setLineDash([3, 3]);
  for (const event of events.flat()) {
    if (!(event.kind in MARKS)) continue;
    const x = plot.valToPos(event.step, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = colour(MARKS[event.kind]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function drawEvents(place, runs, events) {
  const all = runs.flatMap((run, at) => events[at].map((event) => ({ ...event, run }))).sort((a, b) => b.step - a.step);
  const rows = all.slice(0, 100).map((event) =>
    h("tr", {},
      h("td", {}, runs.length > 1 ? event.run.name : null, h("a", { href: hashOf("groups", { run: event.run.number || undefined, step: event.step }) }, `step ${event.step}`)),
      h("td", {}, h("span", { class: `mark mark-${event.kind.replace(" ", "-")}` }, event.kind)),
      h("td", { class: "wrap" }, event.text)));
  replace(place, h("h2", {}, "Events"),
    rows.length ? table("Events, the latest first", ["When", "What", "Words"], rows) : h("p", { class: "quiet" }, "No checkpoints, restarts or warnings."));
}

async function drawLive(place, app) {
  const cards = await Promise.all(app.runs.map((run) => cardOf(run)));
  // What a reader has opened or closed stays so.
  const opened = new Map([...place.querySelectorAll("details")].map((one) => [keyOfDetails(one), one.open]));
  for (const one of cards.flatMap((card) => [...card.querySelectorAll("details")])) {
    if (opened.has(keyOfDetails(one))) one.open = opened.get(keyOfDetails(one));
  }
  replace(place, cards);
}

function keyOfDetails(one) {
  return `${one.closest("[data-run]").dataset.run} ${one.className}`;
}

async function cardOf(run) {
  const state = await get(`/api/runs/${run.number}/state`);
  const { failures } = await get(`/api/runs/${run.number}/failures`, { limit: 50 });
  const { causes } = await get(`/api/runs/${run.number}/causes`);
  const { traces } = await get(`/api/runs/${run.number}/traces`);
  const { events } = await get(`/api/runs/${run.number}/events`);
  const configuration = await configurationOf(run);
  const total = state.total_steps;
  const latest = state.latest;
  const quick = Object.entries(latest).filter(([name, value]) => value && (name.startsWith("memory/") || name.startsWith("throughput/") ||
    ["rollout/open_groups", "rollout/ready_groups", "rollout/aborted_requests", "rollout/failed_episodes", "rollout/engine_restarts"].includes(name)));
  const doing = state.status === "running" ? state.doing.filter((name) => name !== "step").join(" \u203a ") || "between two steps" : state.status;
  return h(
    "article",
    { class: "card run-card", "data-run": run.number, "data-status": state.status },
    h("h2", {}, run.name, h("span", { class: `chip state-${state.status}` }, state.status)),
    h("p", { class: "doing" }, `Step ${state.step}${total ? ` of ${total}` : ""}: ${doing}${lasting(state)}`),
    total ? h("progress", { max: total, value: Math.min(state.step, total), "aria-label": `${run.name}: steps done` }) : null,
    nowOf(state),
    h("dl", { class: "facts" },
      fact("a step takes", seconds(state.step_seconds)),
      state.seconds_left !== null ? fact("time left", seconds(state.seconds_left)) : null,
      quick.map(([name, value]) => fact(name, number(value, 1)))),
    adviceOf(run, events),
    shares(latest),
    usageOf(state),
    configuration,
    traces.length ? h("details", { class: "traces" }, h("summary", {}, `Profiles for Perfetto: ${traces.length}`), profileLinks(run, traces)) : null,
    causes.length ? causesOf(run, causes) : null,
    failures.length && !causes.length ? h("details", { class: "drops" }, h("summary", {}, `Dropped and failed: ${failures.length} examples`), failures.map((one) =>
      h("div", { class: "drop" }, h("strong", {}, `step ${one.step}, ${one.reason}: `), `${one.item} \u2014 ${String(one.detail).slice(0, 500)}`))) : null,
  );
}

// What the run has warned of, each in its own words and once, the latest first.
function adviceOf(run, events) {
  const latest = new Map();
  for (const event of events) if (event.kind === "warning") latest.set(event.text.replace(/^step \d+: /, ""), event.step);
  if (!latest.size) return null;
  return h("div", { class: "advice" }, h("h3", {}, "What to look at"), h("ul", {}, [...latest].reverse().slice(0, 8).map(([text, step]) =>
    h("li", {}, h("a", { href: hashOf("groups", { run: run.number || undefined, step }) }, `step ${step}`), `: ${text}`))));
}

// Why episodes weren't trained on, each cause with the way to its first episode and to all of them.
function causesOf(run, causes) {
  const all = causes.reduce((sum, cause) => sum + cause.episodes, 0);
  const kind = "dropped";
  const rows = causes.map((cause) =>
    h("tr", {},
      h("td", {}, cause.tag),
      h("td", {}, h("span", { class: `chip status-${cause.status}` }, cause.status)),
      h("td", { class: "wrap" }, cause.dropped),
      h("td", { class: "num" }, h("a", { href: hashOf("rows", { run: run.number || undefined, kind, tag: cause.tag, status: cause.status }) }, `${cause.episodes} ${cause.episodes === 1 ? "episode" : "episodes"}`)),
      h("td", { class: "num" }, cause.first_step === cause.last_step ? cause.first_step : `${cause.first_step} to ${cause.last_step}`),
      h("td", {}, h("a", { href: hashOf("episode", { run: run.number || undefined, kind, step: cause.step, row: cause.row }) }, "the first one"))));
  return h("details", { class: "causes" }, h("summary", {}, `Not trained on: ${all} ${all === 1 ? "episode" : "episodes"}, for ${causes.length} ${causes.length === 1 ? "reason" : "reasons"}`),
    table(`Why episodes of ${run.name} weren't trained on`, ["Environment", "Status", "Why", "Episodes", "Steps", "Open"], rows));
}

export function fact(name, value) {
  return [h("dt", {}, name), h("dd", {}, value)];
}

// Where the last step's time went, without overlap.
function shares(latest) {
  const outer = new Set(["step", "controller", "controller_share", "validate", "save", "export"]);
  const spans = Object.entries(latest).filter(([name, value]) => name.startsWith("time/") && name.split("/").length === 2 && value > 0 && !outer.has(name.slice(5)));
  const whole = latest["time/step"] || spans.reduce((sum, [, value]) => sum + value, 0);
  if (!whole || !spans.length) return null;
  spans.sort((a, b) => b[1] - a[1]);
  const parts = spans.map(([name, value], at) => {
    const share = (100 * value) / whole;
    return h("span", { class: `share share-${at % 6}`, css: { width: `${Math.min(share, 100)}%` }, title: `${name.slice(5)}: ${share.toFixed(0)} %` });
  });
  const words = spans.map(([name, value]) => `${name.slice(5)} ${((100 * value) / whole).toFixed(0)} %`).join(", ");
  return h("div", { class: "shares" }, h("div", { class: "sharebar", role: "img", "aria-label": `Where the last step's time went: ${words}` }, parts), h("p", { class: "quiet" }, words));
}
