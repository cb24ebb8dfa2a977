// Numbers, sizes and times as people read them.

const NOTHING = "–";

/** 1234567 -> 1.23 M. */
export function count(value, digits = 3) {
  if (!Number.isFinite(value)) return NOTHING;
  for (const [unit, size] of [["B", 1e9], ["M", 1e6], ["k", 1e4]]) {
    const scale = unit === "k" ? 1e3 : size;
    if (Math.abs(value) >= size) return `${trim(value / scale, digits)} ${unit}`;
  }
  return Math.round(value).toLocaleString("en");
}

/** 3221225472 -> 3 GiB. */
export function bytes(value, digits = 3) {
  if (!Number.isFinite(value)) return NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (Math.abs(value) >= 1024 && i < units.length - 1) { value /= 1024; i += 1; }
  return `${i === 0 ? value : trim(value, digits)} ${units[i]}`;
}

/** A loss or a rate, short but never rounded to nothing; exponents are written with just so many `digits`. */
export function number(value, digits = 0) {
  if (value === null || value === undefined || !Number.isFinite(Number(value))) return NOTHING;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) {
    const text = Number(value).toExponential(digits ? digits - 1 : 2).replace("e+", "e");
    return digits ? text : text.replace(/\.?0+e/, "e");
  }
  return trim(Number(value), Math.max(4, digits));
}

/** 0.6125 -> 61.3 %. */
export function share(value, digits = 0) {
  if (!Number.isFinite(value)) return NOTHING;
  return `${digits ? trim(100 * value, digits) : (100 * value).toFixed(1)} %`;
}

/** Seconds -> 1 h 4 min. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return NOTHING;
  seconds = Math.max(0, Math.round(seconds));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60 && seconds < 600 ? `${seconds % 60} s` : ""}`.trim();
  const hours = Math.floor(seconds / 3600);
  if (hours < 48) return `${hours} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Unix seconds -> "3 min ago". */
export function ago(at) {
  if (!at) return NOTHING;
  const seconds = Date.now() / 1000 - at;
  return seconds < 5 ? "just now" : `${duration(seconds < 3600 ? seconds - (seconds >= 60 ? seconds % 60 : 0) : seconds)} ago`;
}

/** Unix seconds as date and time. */
export function when(at) {
  return at ? new Date(at * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }) : NOTHING;
}

/** Unix seconds as the time of day, for axes and event lists. */
export function clock(at, withSeconds = true) {
  const options = { hour: "2-digit", minute: "2-digit", hour12: false, ...(withSeconds ? { second: "2-digit" } : {}) };
  return new Date(at * 1000).toLocaleTimeString("en-GB", options);
}

function trim(value, digits) {
  return String(Number(value.toPrecision(Math.max(3, digits))));
}
