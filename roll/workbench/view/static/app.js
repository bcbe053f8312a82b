// Header, navigation, keys, and following of runs under way. Each view is a module with `show(main, params, app)`.

import { announce, h, replace } from "./dom.js";
import { EXPORTED, get } from "./source.js";
import { current, go, hashOf } from "./routes.js";
import { showCurves } from "./curves.js";
import { showGroups } from "./groups.js";
import { showRows } from "./rows.js";
import { showEpisode } from "./episode.js";
import { showDifferences } from "./differences.js";
import { showCompare } from "./compare.js";

const VIEWS = {
  curves: { title: "Run", show: showCurves },
  groups: { title: "Groups", show: showGroups },
  rows: { title: "Search", show: showRows },
  episode: { title: "Episode", show: showEpisode },
  differences: { title: "Train/infer", show: showDifferences },
  compare: { title: "Compare", show: showCompare },
};
const POLL_MS = 1000;
const KEYS = [
  ["1 to 6", "open a view"],
  ["[ and ]", "previous and next step"],
  ["j and k", "next and previous episode"],
  ["/", "go to the text search"],
  ["\u2190 and \u2192", "previous and next token, once one has the focus"],
  ["d", "light or dark"],
  ["?", "this list"],
];

export const app = { runs: [], info: {}, versions: [], shown: 0, cleanups: [] };

app.run = (params) => app.runs[Number(params.run || 0)] || app.runs[0];
app.onLeave = (cleanup) => app.cleanups.push(cleanup);

async function loadRuns() {
  const found = await get("/api/runs");
  app.runs = found.runs;
  app.info = found;
}

async function render() {
  const turn = (app.shown += 1);
  for (const cleanup of app.cleanups.splice(0)) cleanup();
  const { view, params } = current();
  const known = VIEWS[view] || VIEWS.curves;
  const main = document.getElementById("main");
  drawHeader(view, params);
  document.title = `${known.title} \u00b7 ${app.run(params)?.name || ""} \u00b7 roll view`;
  const fresh = h("div", { class: `view view-${view}` });
  app.refresh = app.refreshLive = null;
  try {
    await known.show(fresh, params, app);
  } catch (error) {
    replace(fresh, h("div", { class: "problem", role: "alert" }, error.message || String(error)));
    if (error.name !== "Error" && !error.message) console.error(error);
  }
  if (turn !== app.shown) return;
  const moved = main.dataset.view !== view;
  main.dataset.view = view;
  replace(main, fresh);
  main.dataset.ready = String(turn);
  if (moved) window.scrollTo(0, 0);
  announce(`${known.title} is shown`);
}

function drawHeader(view, params) {
  const run = app.run(params);
  const keep = { run: params.run };
  const links = Object.entries(VIEWS).map(([name, { title }]) =>
    h(
      "a",
      {
        href: hashOf(name, { ...keep, ...(["groups", "episode", "differences", "rows"].includes(name) ? stepOf(params) : {}) }),
        class: "tab",
        "aria-current": name === view ? "page" : undefined,
      },
      title,
    ),
  );
  const states = app.runs.map((one) =>
    h("span", { class: `state state-${one.status}` }, `${one.name}: ${one.status}, step ${one.step}`),
  );
  const place = document.getElementById("header");
  const focused = document.activeElement?.closest("nav") ? document.activeElement.textContent : null;
  replace(
    place,
    h("div", { class: "brand" }, h("strong", {}, "roll view"), EXPORTED ? h("span", { class: "chip" }, "exported") : null),
    h("nav", { "aria-label": "Views" }, links),
    h("div", { class: "states" }, states),
    h("div", { class: "tools" },
      h("button", { type: "button", on: { click: switchTheme }, "aria-label": "Switch between light and dark" }, "\u25d0"),
      h("button", { type: "button", on: { click: showHelp }, "aria-label": "Keys" }, "?")),
  );
  if (focused) [...place.querySelectorAll("nav a")].find((link) => link.textContent === focused)?.focus();
  return run;
}

function stepOf(params) {
  const { step, kind } = params;
  return { step, kind };
}

// --- light and dark ---------------------------------------------------------------------------------------------------

function remembered(name, value) {
  try {
    if (value === undefined) return localStorage.getItem(name);
    localStorage.setItem(name, value);
  } catch {
    // A file opened from disk may have no storage.
  }
  return null;
}

function switchTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  remembered("roll-view-theme", document.documentElement.dataset.theme);
  window.dispatchEvent(new Event("themechange"));
}

// --- keys -------------------------------------------------------------------------------------------------------------

function showHelp() {
  const dialog = document.getElementById("help");
  replace(
    dialog,
    h("h2", { id: "help-title" }, "Keys"),
    h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])),
    h("button", { type: "button", on: { click: () => dialog.close() } }, "Close"),
  );
  dialog.showModal();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea, dialog")) return;
  const { params } = current();
  const names = Object.keys(VIEWS);
  if (/^[1-6]$/.test(event.key)) go(names[Number(event.key) - 1], { run: params.run, ...stepOf(params) });
  else if (event.key === "?") showHelp();
  else if (event.key === "d") switchTheme();
  else if (event.key === "/") document.querySelector("[data-key=search]")?.focus();
  else if ("[]jk".includes(event.key)) document.querySelector(`[data-key="${event.key}"]`)?.click();
  else return;
  event.preventDefault();
}

// --- runs under way ---------------------------------------------------------------------------------------------------

// Of a run's version, all but what it does at the moment: that changes every second.
function withoutLive(version) {
  return version.split(" ").filter((_, place) => place !== 1).join(" ");
}

async function poll() {
  if (document.hidden) return;
  try {
    const { versions } = await get("/api/version");
    setLost(false);
    const first = app.versions.length === 0;
    const old = app.versions;
    app.versions = versions;
    if (first || versions.join() === old.join()) return;
    if (versions.map(withoutLive).join() === old.map(withoutLive).join()) {
      if (app.refreshLive) await app.refreshLive();
      return;
    }
    await loadRuns();
    const { view, params } = current();
    drawHeader(view, params);
    if (app.refresh) await app.refresh();
  } catch (error) {
    setLost(true, error.message);
  }
}

function setLost(lost, why) {
  const old = document.getElementById("lost");
  if (!lost) old?.remove();
  else if (!old) document.body.prepend(h("div", { id: "lost", class: "problem", role: "alert" }, why));
}

async function start() {
  const theme = remembered("roll-view-theme");
  if (theme) document.documentElement.dataset.theme = theme;
  try {
    await loadRuns();
  } catch (error) {
    replace(document.getElementById("main"), h("div", { class: "problem", role: "alert" }, error.message));
    return;
  }
  window.addEventListener("hashchange", render);
  window.addEventListener("keydown", onKey);
  await render();
  if (!EXPORTED) {
    await poll();
    setInterval(poll, POLL_MS);
    document.addEventListener("visibilitychange", poll);
  }
}

start();
