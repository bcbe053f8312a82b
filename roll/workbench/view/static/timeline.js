// What became of an episode, and when: its spans as bars, with links to the profiles of its step.

import { h, seconds } from "./dom.js";
import { EXPORTED, fileAddress, get } from "./source.js";

export function traceId(context) {
  const parts = String(context || "").split("-");
  return parts.length === 4 && /^[0-9a-f]{32}$/.test(parts[1]) ? parts[1] : "";
}

// The step's own file of the controller has everything in one picture, so it comes first.
export function profilesOf(traces, step) {
  const own = traces.filter((path) => path.includes(`step-${String(step).padStart(6, "0")}.`));
  return own.sort((a, b) => b.includes(".controller.") - a.includes(".controller.") || a.localeCompare(b));
}

export function profileLinks(run, paths) {
  return h("ul", { class: "profiles" }, paths.map((path) => h("li", {}, h("a", { href: fileAddress(run.number, path), download: true }, path.split("/").at(-1)))));
}

export async function timeline(found, run, step, traceUrl) {
  const id = traceId(found.trace);
  const { spans } = id ? await get(`/api/runs/${run.number}/spans`, { trace: id }) : { spans: [] };
  const { traces } = await get(`/api/runs/${run.number}/traces`);
  const profiles = profilesOf(traces, step);
  if (!id && !profiles.length) return null;
  const whole = Math.max(...spans.map((span) => span.start + span.seconds), 1e-9);
  const depth = new Map();
  const rows = spans.map((span) => {
    depth.set(span.id, span.parent === null || !depth.has(span.parent) ? 0 : depth.get(span.parent) + 1);
    const about = Object.entries(span.attributes).map(([name, value]) => `${name} ${value}`).join(", ");
    return h("li", { class: span.failed ? "failed" : "" },
      h("span", { class: "name", css: { "padding-left": `${depth.get(span.id)}rem` } }, span.name),
      h("span", { class: "lane", "aria-hidden": "true" }, h("span", { class: "during", css: { left: `${(100 * span.start) / whole}%`, width: `${Math.max((100 * span.seconds) / whole, 0.4)}%` } })),
      h("span", { class: "num" }, `${seconds(span.seconds)} from ${seconds(span.start)}`),
      h("span", { class: "about quiet" }, about));
  });
  const outside = id && traceUrl && !EXPORTED ? h("a", { class: "button", href: traceUrl.replaceAll("{trace}", id), rel: "noreferrer", target: "_blank" }, "Open the trace") : null;
  return h("section", { class: "card timeline", "aria-labelledby": "timeline-title" },
    h("h2", { id: "timeline-title" }, "Timeline"),
    id ? h("p", { class: "quiet" }, "Trace ", h("code", {}, id), spans.length ? "" : ": spans.jsonl has none of its spans.", " ", outside) : null,
    rows.length ? h("ol", { class: "spans" }, rows) : null,
    profiles.length ? [h("h3", {}, `Profiles of step ${step}, for ui.perfetto.dev`), profileLinks(run, profiles)] : null);
}
