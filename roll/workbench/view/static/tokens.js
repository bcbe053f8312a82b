// Every token of a row, coloured by any of its columns; the one under the pointer or the keys says all of them.

import { field, h, number, replace, select, visible } from "./dom.js";
import { go } from "./routes.js";

const CHUNK = 3000;
const ABOUT = {
  action_mask: "chosen by the policy", loss_mask: "counts in the loss", versions: "weight version that sampled it",
  sampling_logprobs: "log-prob of the engine when it was sampled", old_logprobs: "log-prob of the trainer before the update",
  ref_logprobs: "log-prob of the reference", entropies: "entropy of the distribution it was drawn from", values: "the critic's value",
  token_rewards: "reward placed on the token", advantages: "advantage", returns: "return", importance_weights: "weight of the train/infer correction",
  ratio: "trainer's probability over the engine's", difference: "trainer's log-prob less the engine's", kl: "policy's log-prob less the reference's",
};
const DIVERGING = new Set(["advantages", "token_rewards", "difference", "kl", "returns", "values"]);
const STEPS = new Set(["action_mask", "loss_mask", "versions"]);

// Columns that follow from others.
export function withDerived(columns) {
  const all = { ...columns };
  const minus = (a, b) => a.map((value, at) => (value === null || b[at] === null ? null : value - b[at]));
  if (columns.old_logprobs && columns.sampling_logprobs) {
    all.difference = minus(columns.old_logprobs, columns.sampling_logprobs);
    all.ratio = all.difference.map((value) => (value === null ? null : Math.exp(value)));
  }
  if (columns.ref_logprobs) all.kl = minus(columns.old_logprobs || columns.sampling_logprobs, columns.ref_logprobs);
  return all;
}

export function tokenView(episode, params, { view = "episode" } = {}) {
  const columns = withDerived(episode.columns);
  const texts = episode.token_texts?.length ? episode.token_texts : (episode.token_ids || []).map((id) => `${id} `);
  const names = Object.keys(columns);
  const usual = ["advantages", "sampling_logprobs", "action_mask"].find((name) => names.includes(name) && (name !== "advantages" || columns[name].some((value) => value)));
  const by = names.includes(params.by) ? params.by : usual;
  const mask = columns.action_mask || [];
  const scale = scaleOf(by, columns[by] || [], mask);
  const detail = h("div", { class: "detail", role: "status", "aria-live": "polite" }, "Move over a token, or press Tab and the arrow keys.");
  const flow = h("div", { class: "tokens", role: "group", "aria-label": `Tokens, coloured by ${by || "nothing"}`, tabindex: "0" });
  let current = -1;

  const paint = (at) => {
    const given = mask.length && !mask[at];
    const text = visible(texts[at]).replace(/\n/g, "\u21b5\n").replace(/\t/g, "\u21e5");
    const node = h("span", { class: `token${given ? " given" : ""}`, "data-at": at }, text);
    const colour = by && (!given || by === "versions" || STEPS.has(by)) ? scale.colour(columns[by][at]) : null;
    if (colour) node.style.setProperty("background-color", colour);
    return node;
  };
  let upTo = 0;
  const more = h("button", { type: "button", class: "more", on: { click: () => extend() } }, "");
  function extend(until = upTo + CHUNK) {
    more.remove();
    const end = Math.min(Math.max(until, 0), texts.length);
    const part = document.createDocumentFragment();
    for (; upTo < end; upTo += 1) part.append(paint(upTo));
    flow.append(part);
    if (upTo < texts.length) {
      replace(more, `Show the next ${Math.min(CHUNK, texts.length - upTo)} of ${texts.length - upTo} tokens`);
      flow.append(more);
    }
  }
  function pick(at, { scroll = false } = {}) {
    if (at < 0 || at >= texts.length) return;
    if (at >= upTo) extend(at + CHUNK);
    flow.querySelector(".current")?.classList.remove("current");
    const node = flow.querySelector(`[data-at="${at}"]`);
    node?.classList.add("current");
    if (scroll) node?.scrollIntoView({ block: "center" });
    current = at;
    const facts = names.map((name) => [h("dt", { title: ABOUT[name] }, name), h("dd", {}, number(columns[name][at], 4))]);
    replace(detail, h("strong", {}, `Token ${at}: `), h("code", {}, JSON.stringify(texts[at])), ` id ${episode.token_ids?.[at]}`, h("dl", { class: "facts" }, facts));
  }
  flow.addEventListener("mouseover", (event) => {
    const at = event.target.dataset?.at;
    if (at !== undefined) pick(Number(at));
  });
  flow.addEventListener("click", (event) => {
    const at = event.target.dataset?.at;
    if (at !== undefined) pick(Number(at));
  });
  flow.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!by) return;
    event.preventDefault();
    pick(Math.min(Math.max(current + by, 0), texts.length - 1), { scroll: true });
  });
  extend();
  const change = (value) => go(view, { ...params, by: value }, { quietly: true });
  const notes = Object.entries(episode.notes || {}).filter(([name]) => !names.includes(name));
  const box = h(
    "section",
    { class: "tokenview", "aria-label": "Tokens" },
    h("div", { class: "bar" },
      field("Coloured by", select(names.map((name) => [name, `${name.replaceAll("_", " ")}`]), by, change)),
      scale.legend,
      h("span", { class: "quiet" }, "Underlined: not chosen by the policy.")),
    detail,
    flow,
    notes.length ? h("details", { class: "notes" }, h("summary", {}, "Columns that are empty, and why"), h("dl", {}, notes.map(([name, why]) => [h("dt", {}, name), h("dd", {}, why)]))) : null,
  );
  const wanted = params.token === undefined ? -1 : Number(params.token);
  if (wanted >= 0) requestAnimationFrame(() => pick(wanted, { scroll: true }));
  return box;
}

// Colours of a column's values: of the policy's tokens where there is a mask.
function scaleOf(name, values, mask) {
  const own = values.filter((value, at) => value !== null && (!mask.length || mask[at] || STEPS.has(name)));
  if (STEPS.has(name)) {
    const distinct = [...new Set(own)].sort((a, b) => a - b);
    const colour = (value) => `var(--step-${distinct.indexOf(value) % 6})`;
    const shown = distinct.slice(0, 12);
    return { colour, legend: h("span", { class: "legend" }, shown.map((value) => h("span", { class: "key", css: { "background-color": colour(value) } }, String(value)))) };
  }
  const low = Math.min(...own, 0);
  const high = Math.max(...own, 0);
  if (!own.length) return { colour: () => null, legend: null };
  if (DIVERGING.has(name) || (low < 0 && high > 0)) {
    const size = Math.max(Math.abs(low), Math.abs(high)) || 1;
    const colour = (value) => (value ? `rgb(${value < 0 ? "var(--low)" : "var(--high)"} / ${(0.06 + 0.38 * Math.min(Math.abs(value) / size, 1)).toFixed(3)})` : null);
    return { colour, legend: bar([-size, 0, size], colour) };
  }
  const from = name === "ratio" ? Math.min(...own) : low;
  const to = name === "ratio" ? Math.max(...own) : high;
  const range = to - from || 1;
  const falls = name.endsWith("logprobs");
  const colour = (value) => {
    if (value === null) return null;
    const share = falls ? (to - value) / range : (value - from) / range;
    return `rgb(var(--high) / ${(0.04 + 0.4 * Math.min(Math.max(share, 0), 1)).toFixed(3)})`;
  };
  return { colour, legend: bar([from, (from + to) / 2, to], colour) };
}

function bar(values, colour) {
  return h("span", { class: "legend" }, values.map((value) => h("span", { class: "key", css: { "background-color": colour(value) || "transparent" } }, number(value))));
}
