// One episode: why it got its credit, the conversation, its tokens, and what the task says.

import { h, number, replace, seconds, signed, table, textBlock } from "./dom.js";
import { get, pictureAddress } from "./source.js";
import { go, hashOf } from "./routes.js";
import { fact } from "./curves.js";
import { nameOf, nothingRecorded, stepBar, stepFrom, stepsOf, versions } from "./groups.js";
import { timeline, traceId } from "./timeline.js";
import { tokenView } from "./tokens.js";

const THOUGHT = /<(think|thinking|thought|reasoning)>([\s\S]*?)(?:<\/\1>|$)/g;
const CALL = /<tool_call>([\s\S]*?)(?:<\/tool_call>|$)/g;
const LONG_PROMPT = 1500;
const FAILURES = new Set(["env_error", "reward_error", "timeout", "aborted"]);

export async function showEpisode(main, params, app) {
  const run = app.run(params);
  const kind = params.kind || (stepsOf(run, "train").length ? "train" : "validation");
  const step = stepFrom(params, run, kind);
  const change = (more) => go("episode", { ...params, token: "", ...more });
  if (step === undefined) {
    replace(main, h("div", { class: "bar" }, stepBar(app, params, step, kind, change)), nothingRecorded(run));
    return;
  }
  const row = Number(params.row || 0);
  const found = await get(`/api/runs/${run.number}/episode`, { kind, step, row });
  const when = await timeline(found, run, step, app.info.trace_url);
  const to = (other) => hashOf("episode", { ...params, kind: kind === "train" ? undefined : kind, step, row: other, token: "" });
  replace(
    main,
    h("div", { class: "bar" }, stepBar(app, params, step, kind, (more) => change({ row: 0, ...more })),
      h("div", { class: "stepper", role: "group", "aria-label": "Episode" },
        h("button", { type: "button", "data-key": "k", disabled: row === 0, on: { click: () => go("episode", { ...params, step, row: row - 1, token: "" }) }, "aria-label": "Previous episode" }, "\u2039"),
        h("span", {}, `episode ${row + 1} of ${found.rows}`),
        h("button", { type: "button", "data-key": "j", disabled: row >= found.rows - 1, on: { click: () => go("episode", { ...params, step, row: row + 1, token: "" }) }, "aria-label": "Next episode" }, "\u203a")),
      h("a", { class: "button", href: hashOf("groups", { run: params.run, kind: params.kind, step, q: "" }) }, "All groups"),
      h("a", { class: "button", href: hashOf("compare", { run: params.run, task: found.task_id, kind, step, row }) }, "Compare")),
    h("h1", {}, `${found.task_id} ${nameOf(found)}`, h("span", { class: "chip" }, found.tag), h("span", { class: `chip status-${found.status}` }, found.status)),
    h("div", { class: "columns" },
      h("div", { class: "wide" },
        whyCard(found, kind, to),
        branches(found, kind, params),
        conversation(found),
        tokenView(found, { ...params, step, row }),
        when),
      h("aside", { class: "side", "aria-label": "About the episode" }, sideOf(found, kind, run, params, step))),
  );
}

// Reward, group and advantage in a sentence, and the group's members beside each other.
function whyCard(found, kind, to) {
  const rewards = found.group.filter((member) => !FAILURES.has(member.status)).map((member) => member.reward).filter((value) => value !== null);
  const own = found.group.filter((member) => member.row !== found.row && member.member !== found.member);
  const mean = rewards.reduce((sum, value) => sum + value, 0) / (rewards.length || 1);
  const spread = Math.sqrt(rewards.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (rewards.length || 1));
  const apart = found.reward - mean;
  const where = Math.abs(apart) < 1e-9 ? "the same as" : `${number(Math.abs(apart))} ${apart > 0 ? "above" : "below"}`;
  const failed = FAILURES.has(found.status);
  const words = failed ? [`It failed (${found.status}), so it has no reward.`] : [`Its reward is ${number(found.reward)}`];
  if (own.length && !failed) words.push(`, ${where} the mean of its group (${number(mean)} over ${rewards.length} rows, spread ${number(spread)})`);
  if (!failed) words.push(".");
  if (found.shaped_reward !== null && Math.abs(found.shaped_reward - found.reward) > 1e-9) words.push(` After shaping and normalisation it is ${number(found.shaped_reward)}.`);
  if (kind === "train" && found.advantage !== null) {
    words.push(` The mean advantage of its tokens is ${signed(found.advantage)}: `);
    words.push(found.advantage < 0 ? "the update makes this response less likely." : found.advantage > 0 ? "the update makes it more likely." : "the update doesn't push it either way.");
    if (own.length && spread < 1e-9) words.push(" All rewards of the group are equal, so it carries no signal.");
  }
  if (found.columns.loss_mask && found.columns.action_mask) {
    const left = found.columns.action_mask.reduce((sum, on, at) => sum + (on && !found.columns.loss_mask[at] ? 1 : 0), 0);
    if (left) words.push(` ${left} of its tokens are left out of the loss.`);
  }
  // Errors may be tracebacks: their first line says what was raised, the rest is folded.
  const firstLine = (text) => text.trim().split("\n")[0];
  if (found.dropped) words.push(` It wasn't trained on: ${firstLine(found.dropped)}.`);
  if (found.error && found.error !== found.dropped) words.push(` Error: ${firstLine(found.error)}`);
  const long = [found.error, found.dropped].find((text) => text && text.trim().includes("\n"));
  const parts = Object.entries(found.reward_parts || {});
  const most = Math.max(...found.group.map((member) => Math.abs(member.reward ?? 0)), 1e-9);
  return h(
    "section",
    { class: "card why", "aria-labelledby": "why-title" },
    h("h2", { id: "why-title" }, kind === "train" ? "Why it got its advantage" : "How it ended"),
    h("p", { class: "words" }, words.join("")),
    long ? h("details", { class: "traceback" }, h("summary", {}, "The whole error"), textBlock(long, "The whole error")) : null,
    parts.length ? h("dl", { class: "facts" }, parts.map(([name, value]) => fact(`part ${name}`, number(value)))) : null,
    found.turns?.length > 1 ? h("dl", { class: "facts" }, found.turns.map((turn) => fact(`turn ${turn.number}`, signed(turn.reward)))) : null,
    found.explanation ? h("div", { class: "explanation" }, h("h3", {}, "What the reward says"), textBlock(found.explanation, "Explanation of the reward")) : null,
    found.group.length > 1
      ? h("ul", { class: "members", "aria-label": "The group" }, found.group.map((member) =>
          h("li", {},
            h("a", { href: to(member.row), "aria-current": member.row === found.row ? "true" : undefined }, nameOf(member)),
            h("span", { class: "rod", "aria-hidden": "true" }, h("span", { class: member.reward < 0 ? "neg" : "pos", css: { width: `${(100 * Math.abs(member.reward ?? 0)) / most}%` } })),
            h("span", { class: "num" }, FAILURES.has(member.status) ? member.status : `reward ${number(member.reward)}${member.advantage === null ? "" : `, advantage ${signed(member.advantage)}`}`))))
      : null,
  );
}

// The turns of an episode with branches as a tree; nothing where there is one line of turns.
function branches(found, kind, params) {
  const nodes = found.branches || [];
  if (!nodes.some((node) => node.after !== null || node.resets_context) && new Set(nodes.map((node) => node.role)).size < 2) return null;
  const children = new Map();
  for (const node of nodes) {
    const parent = node.parent ?? "root";
    children.set(parent, [...(children.get(parent) || []), node]);
  }
  const list = (parent) => {
    const below = children.get(parent);
    if (!below) return null;
    return h("ul", {}, below.map((node) =>
      h("li", {},
        h("a", { href: hashOf("episode", { ...params, kind: kind === "train" ? undefined : kind, row: node.row, token: "" }), "aria-current": node.row === found.row ? "true" : undefined }, `turn ${node.number}`),
        node.role ? h("span", { class: "chip" }, node.role) : null,
        h("span", { class: "quiet", dir: "auto" }, ` ${node.response}`),
        list(node.number))));
  };
  return h("section", { class: "card tree", "aria-labelledby": "tree-title" }, h("h2", { id: "tree-title" }, "Branches"), list("root"));
}

export function conversation(found, side = "") {
  const turns = found.turns || [];
  const parts = turns.length
    ? turns.map((turn, at) => turnOf(turn, at, turns))
    : [message("prompt", "Prompt", found.prompt), message("response", "Response", found.response)];
  return h("section", { class: "card conversation", "aria-label": `Conversation ${side}`.trim() }, h("h2", { class: "talk-title" }, turns.length > 1 ? `Conversation, ${turns.length} turns` : "Conversation"), parts);
}

function turnOf(turn, at, turns) {
  const shown = turn.observation && at === turns.length - 1 ? message("observation", "What came back", turn.observation) : null;
  const facts = [`${turn.response_tokens} ${turn.response_tokens === 1 ? "token" : "tokens"}`, `ended by ${turn.finish_reason}`, turn.reward || turns.length > 1 ? `reward ${signed(turn.reward)}` : ""].filter(Boolean).join(", ");
  const metrics = Object.entries(turn.metrics || {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  return h(
    "div",
    { class: "turn" },
    turn.prompt ? message("prompt", at ? "Environment, tools or user" : "Prompt", turn.prompt) : null,
    message("response", `Response${turn.role ? ` of ${turn.role}` : ""}${turns.length > 1 ? `, turn ${turn.number}` : ""}`, turn.response, turn),
    h("p", { class: "quiet" }, [facts, metrics].filter(Boolean).join("; ")),
    shown,
  );
}

function message(kind, title, text, turn) {
  const body = kind === "response" ? responseParts(text, turn) : [textBlock(text, title)];
  const long = kind === "prompt" && (text || "").length > LONG_PROMPT;
  const inner = long ? [h("details", {}, h("summary", {}, `${text.length.toLocaleString("en")} characters, the end of which is: \u2026`, h("span", { dir: "auto" }, text.slice(-200))), body)] : body;
  return h("div", { class: `message ${kind}` }, h("h3", {}, title), inner);
}

// Thinking is folded; calls of tools stand apart.
function responseParts(text, turn) {
  const marks = [];
  for (const found of text.matchAll(THOUGHT)) marks.push({ from: found.index, to: found.index + found[0].length, node: thought(found[2]) });
  for (const found of text.matchAll(CALL)) marks.push({ from: found.index, to: found.index + found[0].length, node: toolCall(found[1]) });
  marks.sort((a, b) => a.from - b.from);
  const parts = [];
  let at = 0;
  for (const mark of marks) {
    if (mark.from < at) continue;
    if (text.slice(at, mark.from).trim()) parts.push(textBlock(text.slice(at, mark.from), "Response"));
    parts.push(mark.node);
    at = mark.to;
  }
  if (at < text.length || !parts.length) parts.push(textBlock(text.slice(at), "Response"));
  const known = turn?.tool_calls || [];
  if (known.length && !marks.some((mark) => mark.node.classList.contains("call"))) parts.push(known.map((call) => callCard(call.name, call.arguments)));
  return parts;
}

function thought(text) {
  return h("details", { class: "thought" }, h("summary", {}, `Thinking, ${text.length.toLocaleString("en")} characters`), textBlock(text, "Thinking"));
}

function toolCall(text) {
  try {
    const found = JSON.parse(text);
    return callCard(String(found.name), JSON.stringify(found.arguments ?? found.parameters ?? {}, null, 1));
  } catch {
    return callCard("not readable", text);
  }
}

function callCard(name, given) {
  return h("div", { class: "call" }, h("strong", {}, "Tool call: ", h("code", {}, name)), textBlock(given, "Arguments"));
}

function sideOf(found, kind, run, params, step) {
  const spans = Object.entries(found.spans || {});
  const facts = h(
    "dl",
    { class: "facts stacked" },
    fact("reward", FAILURES.has(found.status) ? "\u2013" : number(found.reward)),
    found.shaped_reward === null ? null : fact("shaped reward", number(found.shaped_reward)),
    found.advantage === null ? null : fact("advantage", signed(found.advantage)),
    found.loss_weight === null ? null : fact("weight in the loss", number(found.loss_weight)),
    fact("tokens of the policy", number(found.num_response_tokens)),
    fact("tokens in all", number(found.num_tokens)),
    fact("ended by", found.finish_reason || "\u2013"),
    fact("weight versions", versions(found)),
    found.staleness === null ? null : fact("staleness", number(found.staleness)),
    found.mismatch_max === null ? null : fact("train/infer, largest", number(found.mismatch_max)),
    found.kl_mean === null ? null : fact("mean log-prob over the reference's", number(found.kl_mean)),
    found.answer ? fact("stated answer", found.answer) : null,
    spans.map(([name, value]) => fact(`time in ${name}`, seconds(value))),
    fact("seed", found.seed === null ? "\u2013" : String(found.seed)),
    found.trace ? fact("trace", h("code", {}, traceId(found.trace) || found.trace)) : null,
  );
  let payload = found.payload || "";
  try {
    payload = JSON.stringify(JSON.parse(payload), null, 1);
  } catch {
    // It was cut, or it is no JSON: shown as it is.
  }
  return [
    found.ground_truth ? h("section", { class: "card gold" }, h("h2", {}, "Gold answer"), textBlock(found.ground_truth, "Gold answer")) : null,
    h("section", { class: "card" }, h("h2", {}, "Numbers"), facts),
    found.pictures?.length ? h("section", { class: "card" }, h("h2", {}, "Pictures of this task"), found.pictures.map((one) => h("figure", {}, h("img", { src: pictureAddress(run.number, one.path), alt: `The episode after step ${one.step}`, loading: "lazy" }), h("figcaption", {}, `validation after step ${Number(one.step)}`)))) : null,
    h("section", { class: "card" }, h("h2", {}, "Task"), h("p", { class: "quiet" }, `${found.source || ""} ${found.domain}`), h("details", {}, h("summary", {}, "Payload"), textBlock(payload, "Payload of the task"))),
  ];
}
