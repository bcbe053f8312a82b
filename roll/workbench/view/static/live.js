// What a run does at this moment: how far the step is, what engines and episodes do, what each role uses.

import { h, number, seconds, table } from "./dom.js";

export function nowOf(state) {
  if (state.status !== "running") return null;
  return [
    Object.entries(state.rollout || {}).map(([purpose, playing]) => playingOf(purpose, playing)),
    enginesOf(state.engines || {}),
  ];
}

// The groups of the step that is collected; in asynchronous mode those that are ready for it.
function playingOf(purpose, playing) {
  const wanted = playing.groups_wanted;
  const where = purpose === "train" ? `step ${playing.step}` : purpose;
  const words = [
    wanted ? `${playing.groups_done} of ${wanted} groups` : `${playing.groups_done} groups ready`,
    `${playing.groups_open} open`,
    playing.groups_dropped ? `${playing.groups_dropped} dropped` : "",
    `${playing.episodes_running} episodes under way`,
    `${playing.episodes_ended} ended`,
    playing.episodes_failed ? `${playing.episodes_failed} failed` : "",
  ].filter(Boolean);
  return h("div", { class: "playing", "data-purpose": purpose },
    h("p", {}, `Generating for ${where}: ${words.join(", ")}`),
    wanted ? h("progress", { max: wanted, value: Math.min(playing.groups_done, wanted), "aria-label": `Groups of ${where}` }) : null,
    playing.last_failure ? h("p", { class: "neg", dir: "auto" }, `Last failure: ${playing.last_failure}`) : null);
}

function enginesOf(load) {
  const running = load.running || [];
  const all = running.reduce((sum, one) => sum + one, 0);
  const busy = Object.entries(load.busy || {}).sort((a, b) => b[1] - a[1]).slice(0, 4);
  if (!all && !load.waiting && !busy.length && !load.down?.length) return null;
  const most = 8;
  const each = running.length > 1 ? ` (${running.slice(0, most).map((one, rank) => `engine ${rank}: ${one}`).join(", ")}${running.length > most ? ", \u2026" : ""})` : "";
  const parts = [`${all} requests in engines${each}`, `${load.waiting || 0} waiting`];
  if (load.down?.length) parts.push(`being replaced: ${load.down.map((rank) => `engine ${rank}`).join(", ")}`);
  if (busy.length) parts.push(`episodes elsewhere: ${busy.map(([doing, count]) => `${count} ${doing}`).join(", ")}`);
  return h("p", { class: "engines quiet" }, parts.join("; "));
}

export function usageOf(state) {
  const rows = Object.entries(state.usage || {}).map(([role, used]) =>
    h("tr", {},
      h("th", { scope: "row" }, role),
      h("td", { class: "num" }, used.elsewhere ? `${used.processes} here, ${used.elsewhere} elsewhere` : used.processes),
      h("td", { class: "num" }, `${number(used.memory_gib, 2)} GiB`),
      h("td", { class: "num" }, used.cores === undefined ? "\u2013" : number(used.cores, 2)),
      h("td", {}, (used.devices || []).map((one) => `${one.index}: ${number(one.memory_gib, 1)} of ${number(one.total_gib, 1)} GiB, ${Math.round(100 * one.utilisation)} % busy`).join("; ") || "\u2013")));
  return rows.length && state.status === "running"
    ? h("details", { class: "usage", open: true }, h("summary", {}, "Memory and processors by role"), table("What each role uses", ["Role", "Processes", "Resident memory", "Cores busy", "Devices"], rows))
    : null;
}

// How long the present phase lasts, by the clock of the machine that serves the page.
export function lasting(state) {
  return state.status === "running" && state.since ? `, for ${seconds(Math.max(state.now - state.since, 0))}` : "";
}
