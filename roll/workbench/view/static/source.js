// Where answers come from: the server, or what an exported file has brought along.

const recorded = document.getElementById("recorded");
export const EXPORTED = recorded ? JSON.parse(recorded.textContent) : null;

export function addressOf(path, params = {}) {
  const pairs = [];
  for (const [name, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && one !== "") pairs.push([name, String(one)]);
    }
  }
  const query = new URLSearchParams(pairs).toString();
  return query ? `${path}?${query}` : path;
}

export class Refused extends Error {}

export async function get(path, params = {}) {
  if (EXPORTED) return answerOf(path, params);
  let response;
  try {
    response = await fetch(addressOf(path, params), { headers: { Accept: "application/json" } });
  } catch {
    throw new Refused("The server of this page doesn't answer; is `roll view` still running?");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(body.error || `The server answered ${response.status}.`);
  return body;
}

export function fileAddress(run, path) {
  return addressOf(`/api/runs/${run}/file`, { path });
}

export function pictureAddress(run, path) {
  if (EXPORTED) return EXPORTED.pictures[`${run}/${path}`] || "";
  return fileAddress(run, path);
}

// --- an exported file -------------------------------------------------------------------------------------------------

const NOT_EXPORTED = "This part of the run isn't in the exported file; `roll view RUN` has all of it.";

function answerOf(path, params) {
  const bare = path.split("/").at(-1);
  const filtered = bare === "rows" || bare === "groups";
  const kept = { ...params };
  if (filtered) for (const name of Object.keys(kept)) if (!["kind", "step"].includes(name)) delete kept[name];
  if (bare === "metrics") delete kept.name;
  const found = EXPORTED.answers[addressOf(path, kept)];
  if (found === undefined) throw new Refused(NOT_EXPORTED);
  if (bare === "groups") return filterGroups(structuredClone(found), params, path.slice(0, -bare.length - 1));
  if (bare === "rows") return filterRows(structuredClone(found), params, path.slice(0, -bare.length - 1));
  return found;
}

export function fits(row, params, base) {
  for (const [name, value] of Object.entries(params)) {
    if (value === undefined || value === null || value === "" || value.length === 0) continue;
    const column = name.slice(4);
    if (name === "q") {
      const wholeRow = EXPORTED?.answers[addressOf(`${base}/episode`, { kind: params.kind, step: row.step, row: row.row })];
      const text = `${wholeRow?.prompt ?? row.prompt_end}\n${wholeRow?.response ?? row.response_start}`;
      const whole = value === value.toLowerCase() ? text.toLowerCase() : text;
      if (!whole.includes(value)) return false;
    } else if (name.startsWith("min_")) {
      if (row[column] === null || row[column] < Number(value)) return false;
    } else if (name.startsWith("max_")) {
      if (row[column] === null || row[column] > Number(value)) return false;
    } else if (["status", "tag", "domain", "finish_reason", "task_id"].includes(name)) {
      if (![value].flat().includes(row[name])) return false;
    }
  }
  return true;
}

function sorted(items, name, order) {
  if (!name || name === "recorded") return order === "desc" ? items.reverse() : items;
  const sign = order === "desc" ? -1 : 1;
  return items.sort((a, b) => (a[name] === b[name] ? 0 : sign * (a[name] === null || a[name] < b[name] ? -1 : 1)));
}

function filterGroups(found, params, base) {
  for (const group of found.groups) for (const member of group.members) member.match = fits(member, params, base);
  const left = found.groups.filter((group) => group.members.some((member) => member.match));
  const offset = Number(params.offset || 0);
  const shown = sorted(left, params.sort, params.order).slice(offset, offset + Number(params.limit || 20));
  const rows = left.flatMap((group) => group.members.filter((member) => member.match));
  return { ...found, groups: shown, total: left.length, rows: rows.length, histogram: binned(rows) };
}

function filterRows(found, params, base) {
  const left = found.rows.filter((row) => fits(row, params, base));
  const offset = Number(params.offset || 0);
  const shown = sorted([...left], params.sort, params.order).slice(offset, offset + Number(params.limit || 100));
  return { total: left.length, rows: shown, histogram: binned(left) };
}

function binned(rows) {
  const counts = new Map();
  for (const row of rows) if (row.reward !== null) counts.set(row.reward, (counts.get(row.reward) || 0) + 1);
  const values = [...counts.keys()].sort((a, b) => a - b);
  return { values, counts: values.map((value) => counts.get(value)) };
}
