// Elements, numbers and texts. Whatever a run has recorded gets onto the page as a text node, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "rect", "line", "path", "g", "title"]);
const LONG_TEXT = 20000;

// Control characters, marks of direction, invisible characters and halves of surrogate pairs.
const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u200b\\u200e\\u200f\\u202a-\\u202e\\u2028\\u2029" +
    "\\u2060-\\u2069\\ufeff\\ufff9-\\ufffb]|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]",
  "g",
);

export function visible(text) {
  return String(text).replace(HIDDEN, (found) => {
    const code = found.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

export function h(tag, props, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
    else if (name === "css") for (const [key, what] of Object.entries(value)) node.style.setProperty(key, what);
    else if (name === "value") node.value = value;
    else if (name === "checked" || name === "disabled" || name === "selected" || name === "open") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children) {
    if (child === undefined || child === null || child === false) continue;
    if (Array.isArray(child)) append(node, child);
    else node.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
}

export function replace(node, ...children) {
  node.textContent = "";
  append(node, children);
  return node;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "\u2013";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return value.toFixed(size >= 100 ? 1 : digits);
}

export function signed(value) {
  return value > 0 ? `+${number(value)}` : number(value);
}

export function seconds(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value < 60) return `${value.toFixed(1)} s`;
  const whole = Math.round(value / 60);
  return whole < 60 ? `${whole} min` : `${Math.floor(whole / 60)} h ${String(whole % 60).padStart(2, "0")} min`;
}

// A text as it was recorded, with its line breaks; a very long one is cut until somebody asks for the rest.
export function textBlock(text, name) {
  const whole = String(text ?? "");
  const box = h("div", { class: "text", dir: "auto", role: "group", "aria-label": name });
  if (whole.length <= LONG_TEXT) return replace(box, whole);
  const rest = whole.length - LONG_TEXT;
  const more = h(
    "button",
    { type: "button", class: "more", on: { click: () => replace(box, whole) } },
    `Show the other ${rest.toLocaleString("en")} characters`,
  );
  return replace(box, whole.slice(0, LONG_TEXT), "\u2026 ", more);
}

export function announce(text) {
  replace(document.getElementById("announce"), text);
}

export function field(label, control, hint) {
  const id = `f-${(field.count = (field.count || 0) + 1)}`;
  control.id = id;
  return h("div", { class: "field" }, h("label", { for: id, title: hint }, label), control);
}

export function select(options, value, onchange, label) {
  return h(
    "select",
    { "aria-label": label, on: { change: (event) => onchange(event.target.value) } },
    options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text)),
  );
}

// A table that scrolls by itself where the window is narrow.
export function table(caption, heads, rows, props = {}) {
  return h(
    "div",
    { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" },
    h(
      "table",
      props,
      h("caption", { class: "visually-hidden" }, caption),
      h("thead", {}, h("tr", {}, heads.map((head) => (head instanceof Node ? head : h("th", { scope: "col" }, head))))),
      h("tbody", {}, rows),
    ),
  );
}

export function histogram(found, label) {
  const counts = found?.counts || [];
  if (!counts.length) return h("p", { class: "quiet" }, "No values.");
  const most = Math.max(...counts);
  const width = 240;
  const height = 48;
  const each = width / counts.length;
  const name = (place) =>
    found.values
      ? number(found.values[place])
      : `${number(found.low + ((found.high - found.low) * place) / counts.length)} to ` +
        number(found.low + ((found.high - found.low) * (place + 1)) / counts.length);
  const bars = counts.map((count, place) => {
    const tall = Math.max(count ? 1 : 0, (height * count) / most);
    const size = { x: place * each + 0.5, y: height - tall, width: Math.max(each - 1, 0.5), height: tall };
    return h("rect", { class: "bar", ...size }, h("title", {}, `${name(place)}: ${count}`));
  });
  const said = counts.map((count, place) => (count ? `${name(place)}: ${count}` : "")).filter(Boolean);
  const ends = [name(0).split(" to ")[0], name(counts.length - 1).split(" to ").at(-1)];
  return h(
    "figure",
    { class: "histogram" },
    h("figcaption", {}, label),
    h(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `${label}: ${said.join("; ")}` },
      bars,
    ),
    h("div", { class: "ends", "aria-hidden": "true" }, h("span", {}, ends[0]), h("span", {}, ends[1])),
  );
}
