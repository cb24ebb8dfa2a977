// The page: signs in, shows the screen the address names, and says so when the service is away.

import { get, key, path, whenSignedOut } from "./api.js";
import { h, notice, show, toast } from "./dom.js";
import { chatScreen } from "./screens/chat.js";
import { compareScreen } from "./screens/compare.js";
import { composeScreen } from "./screens/compose.js";
import { dataScreen } from "./screens/data.js";
import { jobScreen } from "./screens/job.js";
import { jobsScreen } from "./screens/jobs.js";
import { operationsScreen } from "./screens/operations.js";
import { usageScreen } from "./screens/usage.js";

const SCREENS = { jobs: jobsScreen, job: jobScreen, compare: compareScreen, new: composeScreen, data: dataScreen, chat: chatScreen, operations: operationsScreen, usage: usageScreen };
const TITLES = { jobs: "Jobs", job: "Job", compare: "Compare jobs", new: "New job", data: "Files and models", chat: "Chat", operations: "Operations", usage: "Usage" };
const main = document.getElementById("main");
const [who, tenant, offline] = ["who", "tenant", "offline"].map((id) => document.getElementById(id));
let leaving = null;
let signedIn = false;

function placeOf(hash) {
  const [name, ...rest] = hash.replace(/^#\/?/, "").split("/").map(decode);
  if (name === "jobs" && rest[0]) return { name: "job", args: rest };
  return { name: name in SCREENS && name !== "job" ? name : "jobs", args: rest };
}

function decode(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

function open() {
  if (!signedIn) return;
  leaving?.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const { name, args } = placeOf(location.hash);
  document.title = `${TITLES[name]} · weft`;
  for (const link of document.querySelectorAll(".tabs a")) {
    const here = link.dataset.screen === (name === "job" || name === "compare" ? "jobs" : name);
    if (here) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  // Each screen gets an element of its own: an answer that comes late has nowhere to be drawn.
  const root = h("div", { class: `screen ${name}` });
  show(main, root);
  window.scrollTo(0, 0);
  const overview = (months = 0) => get(path("/dashboard/overview", { months }), signal);
  const failed = (error) => { if (!signal.aborted) show(root, notice("This screen could not be drawn; reload the page.", { bad: true })); console.error(error); };
  try {
    Promise.resolve(SCREENS[name](root, { signal, args, overview, go: (to) => { location.hash = to; } })).catch(failed);
  } catch (error) { failed(error); }
}

/** Asks for a key, or goes on without one where the service wants none. */
async function start(isNew = false) {
  let seen = null;
  try {
    seen = await get("/dashboard/overview");
  } catch (error) {
    if (error.status === 401) { askKey(isNew ? error.message : ""); return; }
    if (error.status !== 403) {
      show(main, notice(error.message, { bad: true }));
      setTimeout(start, 3000);
      return;
    }
    // A key that may not see the overview may still do other things.
  }
  signedIn = true;
  document.body.classList.remove("signed-out");
  who.hidden = !key.get();
  tenant.textContent = seen ? seen.tenant.name : "";
  open();
}

function askKey(problem) {
  leaving?.abort();
  signedIn = false;
  document.body.classList.add("signed-out");
  who.hidden = true;
  const field = h("input", { id: "key", type: "password", autocomplete: "off", spellcheck: false, placeholder: "weft_…", required: true });
  const form = h("form", { class: "card sign-in", onsubmit: (event) => {
    event.preventDefault();
    if (!field.value.trim()) { askKey("Paste your key first."); return; }
    key.set(field.value.trim());
    start(true);
  } }, h("h1", null, "Sign in"), h("p", null, "Paste your API key. It stays in this tab and is forgotten when you close it."),
    h("label", { htmlFor: "key" }, "API key"), field, problem ? h("p", { class: "wrong", role: "alert" }, problem) : null,
    h("button", { type: "submit", class: "main" }, "Sign in"));
  key.clear();
  show(main, form);
  field.focus();
}

whenSignedOut(() => { if (signedIn) askKey("The key is not accepted any more; paste another."); });
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
document.getElementById("sign-out").addEventListener("click", () => askKey(""));
window.addEventListener("hashchange", () => { open(); main.focus({ preventScroll: true }); });
window.addEventListener("unhandledrejection", (event) => { if (event.reason?.name !== "AbortError") toast("Something went wrong on this page; reload it if it looks wrong.", true); });

// Whether the service answers: one quiet question now and then, one sentence if not.
async function pulse() {
  let away = false;
  if (!document.hidden) {
    try { away = !(await fetch("/healthz", { cache: "no-store" })).ok; } catch { away = true; }
    offline.hidden = !away;
    offline.textContent = away ? "The service cannot be reached; this page tries again by itself." : "";
  }
  setTimeout(pulse, away ? 2000 : 5000);
}
pulse();
start();
