// Small charts of our own: curves with axes and a reading line, sparklines, bars, strips. All SVG.

import { h, s, show } from "./dom.js";

const PAD = { top: 10, right: 16, bottom: 24, left: 56 };
const HALF_LETTER = 3.4;
const REACH = 24;
const TIMES_S = [1, 5, 15, 30, 60, 120, 300, 600, 900, 1800, 3600];

/** Round numbers between low and high, about `wanted` of them; with `whole` none has a fraction. */
export function ticks(low, high, wanted = 5, whole = false) {
  if (!(high > low)) return [low];
  const rough = Math.max((high - low) / wanted, whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough && (!whole || Number.isInteger(n)));
  const from = Math.ceil(low / step - 1e-9);
  const to = Math.floor(high / step + 1e-9);
  return Array.from({ length: to - from + 1 }, (_, i) => Number(((from + i) * step).toPrecision(12)));
}

/** Ticks for what is counted: steps, tokens. */
export const wholeTicks = (low, high, wanted) => ticks(low, high, wanted, true);

/** Ticks for parts of a whole: nothing below 0 or above 1, where only the margin of the chart is. */
export const shareTicks = (low, high, wanted) => ticks(Math.max(low, 0), Math.min(high, 1), wanted);

/** Multiples of a power of two, which are round in KiB, MiB and GiB. */
export function binaryTicks(low, high, wanted) {
  const step = 2 ** Math.max(0, Math.ceil(Math.log2((high - low) / wanted)));
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => (first + i) * step);
}

/** Ticks of a logarithmic axis from 10^low to 10^high: 1, 2 and 5 times powers of ten, or the powers alone. */
export function logTicks(low, high, wanted) {
  const powers = Array.from({ length: Math.floor(high) - Math.floor(low) + 1 }, (_, i) => Math.floor(low) + i);
  const all = powers.flatMap((power) => [1, 2, 5].map((n) => Number(`${n}e${power}`)));
  const inside = all.filter((value) => Math.log10(value) >= low && Math.log10(value) <= high);
  if (inside.length < 3) return ticks(10 ** low, 10 ** high, wanted);
  return inside.length > 2 * wanted ? inside.filter((value) => Number.isInteger(Math.log10(value))) : inside;
}

/** The texts at an axis' ticks, each with all digits that any of them needs. */
export function labels(marks, write) {
  const digits = Math.max(...marks.map((mark) => mark.toExponential().replace(/e.*|\D/g, "").length));
  return marks.map((mark) => write(mark, digits));
}

/** Unix seconds at which clocks show something round. */
export function timeTicks(low, high, wanted) {
  const step = TIMES_S.find((seconds) => (high - low) / seconds <= wanted) || 7200;
  const first = Math.ceil(low / step) * step;
  return Array.from({ length: Math.max(0, Math.floor((high - first) / step) + 1) }, (_, i) => first + i * step);
}

/** At most `most` points, keeping the lowest and the highest of every stretch, so that a spike stays a spike. */
export function thin(points, most) {
  if (points.length <= most) return points;
  const stride = Math.ceil(points.length / (most / 2));
  const kept = [];
  for (let i = 0; i < points.length; i += stride) {
    const part = points.slice(i, i + stride);
    const low = part.reduce((a, b) => (b[1] < a[1] ? b : a));
    const high = part.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

/** A running mean over `window` points to both sides, fewer near the ends: it neither lags nor leads, nor cuts a slope. */
export function smooth(points, window = Math.max(3, Math.round(points.length / 25))) {
  return points.map(([x], i) => {
    const reach = Math.min(window, i, points.length - 1 - i);
    const near = points.slice(i - reach, i + reach + 1);
    return [x, near.reduce((sum, [, y]) => sum + y, 0) / near.length];
  });
}

const line = (points, x, y) => points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");

/**
 * Curves that can be given new points: `update(series)` with series of {name, colour, points, faint, area, dots}.
 * `x`, `y` and `xTick` write a value, on an axis with a number of digits; `xMarks` and `yMarks` choose the ticks;
 * `fromZero` keeps 0 on it; `empty` is shown when there are no points.
 */
export function curves(label, { x = String, y = String, xTick = x, xMarks = ticks, yMarks = ticks, fromZero = false, empty = "No points yet.", height = 260 } = {}) {
  const options = { x, y, xTick, xMarks, yMarks, fromZero, empty, height };
  const box = h("div", { class: "plot", style: { "--height": `${height}px` } });
  const state = { series: [], empty, log: false };
  const redraw = () => drawCurves(box, label, state, options);
  new ResizeObserver(redraw).observe(box);
  return {
    node: box,
    update(series, empty = options.empty) { Object.assign(state, { series, empty }); redraw(); },
    setLog(on) { state.log = on; redraw(); },
  };
}

/** A button that makes an axis logarithmic. */
export function logToggle(setLog) {
  const button = h("button", { type: "button", class: "toggle", "aria-pressed": "false", onclick: () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    setLog(on);
  } }, "log");
  return button;
}

function drawCurves(box, label, state, options) {
  const width = box.clientWidth;
  if (!width) return;
  const usable = state.series
    .map((one) => ({ ...one, points: one.points.filter(([, b]) => Number.isFinite(b) && (!state.log || b > 0)) }))
    .filter((one) => one.points.length);
  if (!usable.length) { show(box, h("p", { class: "hollow" }, state.empty)); return; }
  const frame = frameOf(usable, width, state.log, options);
  const svg = s("svg", { viewBox: `0 0 ${width} ${options.height}`, width, height: options.height, role: "img", "aria-label": spoken(label, usable, options) });
  svg.append(...axes(frame, width, options));
  for (const one of usable) {
    const points = thin(one.points, width * 1.5);
    if (one.area) svg.append(s("path", { class: "area", fill: one.colour, d: `${line(points, frame.x, frame.y)}L${frame.x(points.at(-1)[0])} ${frame.bottom}L${frame.x(points[0][0])} ${frame.bottom}Z` }));
    svg.append(s("path", { class: one.faint ? "curve faint" : "curve", stroke: one.colour, d: line(points, frame.x, frame.y) }));
    if (one.dots || points.length === 1) svg.append(...points.map(([a, b]) => s("circle", { cx: frame.x(a), cy: frame.y(b), r: 3, fill: one.colour })));
  }
  show(box, svg, reader(svg, frame, usable, options));
}

function frameOf(series, width, log, { height, fromZero, y: write, yMarks }) {
  const all = series.flatMap((one) => one.points);
  const extent = (values) => [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  const [left, right] = extent(all.map(([a]) => a));
  let [low, high] = extent(all.map(([, b]) => b));
  if (log) [low, high] = [Math.log10(low), Math.log10(high)];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  const [from, to] = [fromZero && !log ? 0 : low - room, high + room];
  const marks = (log ? logTicks : yMarks)(from, to, 4);
  const texts = labels(marks, write);
  const start = Math.max(PAD.left, 16 + 2 * HALF_LETTER * Math.max(...texts.map((text) => text.length)));
  const bottom = height - PAD.bottom;
  const span = width - start - PAD.right;
  const x = (a) => start + (right > left ? (a - left) / (right - left) : 0.5) * span;
  const y = (b) => bottom - (((log ? Math.log10(b) : b) - from) / (to - from)) * (bottom - PAD.top);
  return { x, y, left, right, start, bottom, marks, texts };
}

function axes(frame, width, { xTick, xMarks }) {
  const parts = [];
  frame.texts.forEach((text, i) => {
    const at = frame.y(frame.marks[i]);
    parts.push(s("path", { class: "gridline", d: `M${frame.start} ${at}H${width - PAD.right}` }));
    parts.push(s("text", { class: "tick", x: frame.start - 8, y: at + 4, "text-anchor": "end" }, text));
  });
  const marks = xMarks(frame.left, frame.right, Math.max(4, Math.floor((width - 60) / 100)));
  labels(marks, xTick).forEach((text, i) => {
    // Under its mark, but not beyond the edge.
    const at = Math.min(frame.x(marks[i]), width - 2 - text.length * HALF_LETTER);
    parts.push(s("text", { class: "tick", x: at, y: frame.bottom + 17, "text-anchor": "middle" }, text));
  });
  return parts;
}

// The nearest point of every curve under the pointer, said in a small card.
function reader(svg, frame, series, { x, y }) {
  const rule = s("path", { class: "rule", d: "" });
  const card = h("div", { class: "reading", hidden: true });
  svg.append(rule);
  const named = series.filter((one) => one.name && !one.faint);
  const read = (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const nearest = (points) => points.reduce((a, b) => (Math.abs(frame.x(b[0]) - at) < Math.abs(frame.x(a[0]) - at) ? b : a));
    const reaches = ({ points }) => at > frame.x(points[0][0]) - REACH && at < frame.x(points.at(-1)[0]) + REACH;
    const found = named.filter(reaches).map((one) => [one, nearest(one.points)]);
    if (!found.length) return;
    const place = found[0][1][0];
    rule.setAttribute("d", `M${frame.x(place)} ${PAD.top}V${frame.bottom}`);
    show(card, h("p", null, x(place)), found.map(([one, [, b]]) => h("p", null, h("i", { class: "dot", style: { background: one.colour } }), `${one.name} `, h("b", null, y(b)))));
    card.hidden = false;
    const right = frame.x(place) > svg.clientWidth * 0.6;
    card.style.left = right ? "auto" : `${frame.x(place) + 10}px`;
    card.style.right = right ? `${svg.clientWidth - frame.x(place) + 10}px` : "auto";
  };
  const leave = () => { card.hidden = true; rule.setAttribute("d", ""); };
  svg.addEventListener("pointermove", read);
  svg.addEventListener("pointerdown", read);
  svg.addEventListener("pointerleave", leave);
  return card;
}

function spoken(label, series, { x, y }) {
  const last = series.filter((one) => !one.faint).map((one) => `${one.name || label} ${y(one.points.at(-1)[1])} at ${x(one.points.at(-1)[0])}`);
  return `${label}: ${last.join(", ")}`;
}

/** A curve the size of a word. */
export function sparkline(values, colour, width = 110, height = 26) {
  const points = thin(values.map((value, i) => [i, value]).filter(([, value]) => Number.isFinite(value)), width);
  if (points.length < 2) return h("span", { class: "soft" }, points.length ? "1 step" : "–");
  const all = points.map(([, b]) => b);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const x = (a) => 2 + (a / points.at(-1)[0]) * (width - 6);
  const y = (b) => height - 3 - ((b - low) / (high - low || 1)) * (height - 6);
  return s("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `loss from ${all[0].toPrecision(3)} to ${all.at(-1).toPrecision(3)}` },
    s("path", { class: "curve", stroke: colour, d: line(points, x, y) }),
    s("circle", { cx: x(points.at(-1)[0]), cy: y(all.at(-1)), r: 2.4, fill: colour }));
}

/** Columns with a label below and a value above; every column is a list of parts [value, colour, name]. */
export function columns(label, items, write) {
  const most = Math.max(1, ...items.map(({ parts }) => parts.reduce((sum, [value]) => sum + value, 0)));
  return h("ol", { class: "columns-chart", "aria-label": label }, items.map(({ name, parts }) => {
    const total = parts.reduce((sum, [value]) => sum + value, 0);
    return h("li", null,
      h("span", { class: "value" }, total ? write(total) : ""),
      h("span", { class: "column", "aria-hidden": "true" }, parts.filter(([value]) => value > 0).map(([value, colour, title]) =>
        h("i", { title: `${title}: ${write(value)}`, style: { height: `${(100 * value) / most}%`, background: colour } }))),
      h("span", { class: "name" }, name));
  }));
}

/** One bar divided among parts [name, value, colour], with a legend. */
export function strip(label, parts, write) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  return h("div", { class: "strip-box" },
    h("div", { class: "strip", "aria-hidden": "true" }, parts.filter(([, value]) => value > 0).map(([name, value, colour]) =>
      h("i", { title: name, style: { width: `${(100 * value) / total}%`, background: colour } }))),
    h("ul", { class: "legend", "aria-label": label }, parts.map(([name, value, colour]) =>
      h("li", null, h("i", { class: "dot", style: { background: colour } }), `${name} `, h("b", null, write(value))))));
}

/** A share of a whole, as a bar. */
export function meter(share, label, colour = "var(--accent)") {
  const percent = Math.round(100 * Math.min(1, Math.max(0, share || 0)));
  return h("div", { class: "meter", role: "progressbar", "aria-label": label, "aria-valuenow": percent, "aria-valuemin": 0, "aria-valuemax": 100 },
    h("i", { style: { width: `${percent}%`, background: colour } }));
}
