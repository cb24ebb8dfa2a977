// The colours of the reports, one per job or series, readable on white and on near-black.

export const CALM = ["#4a7fb5", "#d98a3d", "#4b9b78", "#c65d5d", "#8c70b8", "#3a9fae", "#c4a234", "#c272a0", "#84964a", "#97765f"];
export const OTHERS = "#8b929f";

/** A colour that a name keeps on every screen. */
export function colourOf(name) {
  let hash = 7;
  for (const letter of name) hash = (hash * 31 + letter.codePointAt(0)) >>> 0;
  return CALM[hash % CALM.length];
}

/** Colours for some names: as far as possible no two the same. */
export function colours(names) {
  const taken = new Set();
  return new Map([...names].sort().map((name) => {
    const start = CALM.indexOf(colourOf(name));
    const free = CALM.map((_, i) => CALM[(start + i) % CALM.length]).find((colour) => !taken.has(colour)) || CALM[start];
    taken.add(free);
    return [name, free];
  }));
}
