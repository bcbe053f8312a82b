// The filters of groups and of the search: numbers, status, tag, text. They stand in the address.

import { field, h, select } from "./dom.js";

export const FILTERS = [
  "q", "status", "tag", "domain", "finish_reason", "min_reward", "max_reward", "min_advantage", "max_advantage",
  "min_num_response_tokens", "max_num_response_tokens", "min_staleness", "min_mismatch_max", "min_num_tool_calls", "min_num_turns",
];

export function filtersOf(params) {
  return Object.fromEntries(FILTERS.filter((name) => params[name] !== undefined).map((name) => [name, params[name]]));
}

export function filterBar(params, values, change) {
  const input = (name, label, hint) =>
    field(label, h("input", { type: "number", step: "any", inputmode: "decimal", value: params[name] ?? "", on: { change: (e) => change({ [name]: e.target.value }) } }), hint);
  const choice = (name, label, options) =>
    field(label, select([["", "any"], ...options.map((one) => [one, one])], params[name] || "", (value) => change({ [name]: value })));
  const search = h("input", { type: "search", "data-key": "search", value: params.q ?? "", placeholder: "in prompts and responses" });
  const more = ["max_reward", "min_advantage", "max_advantage", "min_num_response_tokens", "max_num_response_tokens", "min_staleness", "min_mismatch_max", "finish_reason", "min_num_turns"];
  const flag = (name, label) =>
    h("label", { class: "flag" }, h("input", { type: "checkbox", checked: params[name] !== undefined, on: { change: (e) => change({ [name]: e.target.checked ? "1" : "" }) } }), label);
  return h(
    "form",
    { class: "bar filters", role: "search", "aria-label": "Filters", on: { submit: (event) => { event.preventDefault(); change({ q: search.value }); } } },
    field("Text", search, "Upper case counts if there is any"),
    choice("status", "Status", values.status?.length ? values.status : ["ok", "truncated", "filtered", "env_error", "reward_error", "timeout", "aborted"]),
    values.tag?.length > 1 ? choice("tag", "Tag", values.tag) : null,
    values.domain?.length > 1 && values.domain.join() !== values.tag?.join() ? choice("domain", "Domain", values.domain) : null,
    input("min_reward", "Reward from"),
    input("max_reward", "to"),
    flag("min_num_tool_calls", "tool used"),
    h("details", { open: more.some((name) => params[name] !== undefined && name !== "max_reward") },
      h("summary", {}, "More"),
      h("div", { class: "bar" },
        input("min_advantage", "Advantage from"), input("max_advantage", "to"),
        input("min_num_response_tokens", "Tokens from"), input("max_num_response_tokens", "to"),
        input("min_staleness", "Staleness from", "Weight versions between sampling and training"),
        input("min_mismatch_max", "Train/infer from", "Largest difference of log-probs in the response"),
        input("min_num_turns", "Turns from"),
        choice("finish_reason", "Ended by", ["stop", "length", "abort"]))),
    h("button", { type: "submit" }, "Search"),
    Object.keys(filtersOf(params)).length ? h("button", { type: "button", on: { click: () => change(Object.fromEntries(FILTERS.map((name) => [name, ""]))) } }, "Clear") : null,
  );
}
