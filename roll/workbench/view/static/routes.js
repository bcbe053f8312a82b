// The address after `#` says what is shown, so that every view can be linked and the browser's back button works.

export function current() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const params = {};
  for (const [name, value] of new URLSearchParams(query || "")) {
    params[name] = name in params ? [params[name], value].flat() : value;
  }
  return { view: path || "curves", params };
}

export function hashOf(view, params = {}) {
  const pairs = [];
  for (const [name, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && one !== "") pairs.push([name, String(one)]);
    }
  }
  const query = new URLSearchParams(pairs).toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

export function go(view, params, { quietly = false } = {}) {
  const hash = hashOf(view, params);
  if (quietly) {
    history.replaceState(null, "", hash);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = hash;
}
