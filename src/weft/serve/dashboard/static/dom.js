// Elements made node by node: whatever a user wrote stays text.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.setAttribute("class", value);
    else if (name === "style") Object.entries(value).forEach(([key, text]) => node.style.setProperty(key, text));
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name in node && !(node instanceof SVGElement) && !name.startsWith("aria")) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An HTML element; `onclick` and the like are listeners, `style` and `data` are objects. */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** An SVG element. */
export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** Replaces what is inside a node; the keyboard stays where it was if the same control is there again. */
export function show(node, ...children) {
  const held = node.contains(document.activeElement) ? signOf(document.activeElement) : "";
  node.replaceChildren(...children.flat(Infinity).filter(Boolean));
  if (held && !node.contains(document.activeElement)) node.querySelector(held)?.focus({ preventScroll: true });
  return node;
}

function signOf(control) {
  if (control.id) return `#${CSS.escape(control.id)}`;
  if (control.hasAttribute("href")) return `a[href="${CSS.escape(control.getAttribute("href"))}"]`;
  const [data] = Object.entries(control.dataset);
  return data ? `[data-${data[0]}="${CSS.escape(data[1])}"]` : "";
}

/** A table that phones show as cards: every cell knows its column's label. Cells are [content, class]. */
export function table(caption, heads, rows, className = "") {
  const cell = (content, i) => {
    const [inside, kind] = Array.isArray(content) ? content : [content, ""];
    return h(i === 0 ? "th" : "td", { scope: i === 0 ? "row" : null, class: kind || null, data: { label: heads[i] } }, inside);
  };
  return h("table", { class: `list ${className}` },
    h("caption", { class: "unseen" }, caption),
    h("thead", null, h("tr", null, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", null, rows.map((row) => h("tr", null, row.map(cell)))));
}

/** A box to search a list with; `matches` is true of texts that together have every word that is in it. */
export function searchBox(label, oninput) {
  const node = h("input", { type: "search", class: "search", "aria-label": label, placeholder: label, autocomplete: "off", spellcheck: false, oninput });
  const words = () => node.value.toLowerCase().split(/\s+/).filter(Boolean);
  return { node, words, matches: (...texts) => words().every((word) => texts.filter(Boolean).join(" ").toLowerCase().includes(word)) };
}

/** Pairs of a term and what it is; empty ones are left out. */
export function facts(pairs, className = "facts") {
  return h("dl", { class: className }, pairs
    .filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([term, value]) => h("div", null, h("dt", null, term), h("dd", null, value))));
}

/** One big number. */
export function tile(label, value, note = "") {
  return h("div", { class: "tile" }, h("span", { class: "label" }, label), h("strong", null, value), h("span", { class: "note" }, note));
}

/** What a screen shows when there is nothing yet, or when something went wrong. */
export function notice(sentence, { bad = false, action = null } = {}) {
  return h("div", { class: `notice${bad ? " bad" : ""}`, role: bad ? "alert" : null }, h("p", null, sentence), action);
}

/** A job's state as a chip. */
export function chip(state) {
  return h("span", { class: `badge ${state}` }, state.replaceAll("_", " "));
}

/** A sentence at the edge of the page that goes away by itself. */
export function toast(sentence, bad = false) {
  const node = h("p", { class: bad ? "toast bad" : "toast" }, sentence);
  document.getElementById("toasts").append(node);
  setTimeout(() => node.remove(), 6000);
}

/**
 * Calls `work` now and again `seconds` after it ended, not while the page is hidden, until `signal` says stop; a number
 * that `work` returns is waited for instead.
 */
export function repeat(work, seconds, signal) {
  let timer = 0;
  const again = async () => {
    clearTimeout(timer);
    if (signal.aborted) return;
    const wait = document.hidden ? undefined : await work();
    if (!signal.aborted) timer = setTimeout(again, (wait ?? seconds) * 1000);
  };
  const seen = () => { if (!document.hidden) again(); };
  document.addEventListener("visibilitychange", seen, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  return again();
}
