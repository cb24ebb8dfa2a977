// Buttons that do something.

import { download } from "./api.js";
import { h, toast } from "./dom.js";

/** A button that cannot be pressed again before its work has ended; an error is shown at the edge of the page. */
export function action(text, work, props = {}) {
  return h("button", { type: "button", ...props, onclick: async (event) => {
    const button = event.currentTarget;
    button.disabled = true;
    try {
      await work();
    } catch (error) {
      toast(error.message, true);
    }
    button.disabled = false;
  } }, text);
}

/** A button that saves what a path answers as a file. */
export function saving(text, from, filename) {
  return action(text, () => download(from, filename), { data: { saves: from } });
}
