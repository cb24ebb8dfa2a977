// All jobs of the tenant: state, progress and a live curve each.

import { get, path, patience } from "../api.js";
import { meter, sparkline } from "../charts.js";
import { chip, h, notice, repeat, show, table } from "../dom.js";
import { ago, count, duration, number } from "../format.js";
import { colourOf } from "../palette.js";
import { EventLog, isOver, nameOf, progress, stateOf, tokensOf } from "../training.js";

const PAGE = 20;
const CURVE_PAGES = 1;
const CURVES_A_TIME = 6;
const STATES = ["all", "running", "queued", "paused", "succeeded", "failed", "cancelled"];

export function jobsScreen(root, { signal }) {
  const state = { jobs: [], hasMore: false, shown: PAGE, filter: "all", logs: new Map(), asked: new Map(), done: new Set() };
  const filters = h("div", { class: "chips", role: "group", "aria-label": "Show jobs that are" });
  const list = h("div", null, h("p", { class: "loading" }, "Loading…"));
  const more = h("button", { type: "button", hidden: true, onclick: () => { state.shown += PAGE; refresh(); } }, "Show older jobs");
  show(root, h("header", { class: "head" }, h("h1", null, "Jobs"), h("a", { class: "button main", href: "#/new" }, "New job")), filters, list, more);

  async function refresh() {
    try {
      await load(state, signal);
      draw();
      await loadCurves(state, signal);
      draw();
    } catch (error) {
      if (error.name === "AbortError") return undefined;
      if (!state.jobs.length) show(list, notice(error.message, { bad: true }));
      return patience(error);
    }
    return undefined;
  }

  function draw() {
    const visible = state.jobs.filter((job) => state.filter === "all" || job.status === state.filter);
    drawFilters();
    more.hidden = !state.hasMore;
    if (!state.jobs.length) {
      const action = h("a", { class: "button main", href: "#/new" }, "Start the first one");
      show(list, notice("There are no jobs yet: upload examples and train an adapter.", { action }));
    } else if (!visible.length) {
      show(list, notice(`None of the jobs listed is ${state.filter}.`));
    } else {
      show(list, h("section", { class: "card table-card" }, table("Jobs, newest first", ["job", "state", "progress", "loss", "last loss", "tokens", "created"], visible.map((job) => row(job, state)), "jobs")));
    }
  }

  function drawFilters() {
    const number = (name) => (name === "all" ? state.jobs.length : state.jobs.filter((job) => job.status === name).length);
    show(filters, STATES.filter((name) => name === "all" || number(name) || name === state.filter).map((name) =>
      h("button", { type: "button", class: "chip", "aria-pressed": String(state.filter === name), data: { filter: name }, onclick: () => { state.filter = name; draw(); } }, `${name} `, h("b", null, name === "all" && state.hasMore ? `${number(name)}+` : number(name)))));
  }

  return repeat(refresh, 4, signal);
}

async function load(state, signal) {
  const jobs = [];
  let after;
  do {
    const page = await get(path("/v1/fine_tuning/jobs", { limit: PAGE, after }), signal);
    jobs.push(...page.data);
    state.hasMore = page.has_more;
    after = page.data.at(-1)?.id;
  } while (state.hasMore && jobs.length < state.shown);
  state.jobs = jobs;
}

// A few curves at a time, those not looked at for longest first; those of jobs that have ended once.
async function loadCurves(state, signal) {
  const moves = (job) => !state.done.has(job.id) && (job.status === "running" || isOver(job) || !state.logs.has(job.id));
  const due = state.jobs.filter(moves).sort((a, b) => (state.asked.get(a.id) || 0) - (state.asked.get(b.id) || 0));
  await Promise.all(due.slice(0, state.asked.size ? CURVES_A_TIME : PAGE).map(async (job) => {
    const log = state.logs.get(job.id) || new EventLog(job.id);
    state.asked.set(job.id, Date.now());
    await log.refresh(signal, CURVE_PAGES);
    state.logs.set(job.id, log);
    if (isOver(job)) state.done.add(job.id);
  }));
}

function row(job, state) {
  const log = state.logs.get(job.id);
  const tokens = tokensOf(job, log);
  const losses = (log?.losses || []).map(([, loss]) => loss);
  const title = h("a", { href: `#/jobs/${encodeURIComponent(job.id)}` }, nameOf(job));
  return [
    [[h("i", { class: "dot", style: { background: colourOf(job.id) } }), title, h("small", null, job.model)], "name"],
    [chip(stateOf(job)), "state"],
    [steps(job, log), progress(job, log).step || job.total_steps ? "progress" : "progress none"],
    [sparkline(losses, colourOf(job.id)), losses.length ? "curve-cell" : "curve-cell none"],
    [number(losses.at(-1) ?? null), losses.length ? "number" : "number none"],
    [tokens ? count(tokens) : "–", tokens ? "number" : "number none"],
    [ago(job.created_at), "soft"],
  ];
}

function steps(job, log) {
  const { step, total } = progress(job, log);
  if (!total) return h("span", { class: "soft" }, step ? `step ${step}` : "–");
  const left = job.status === "running" && job.estimated_finish ? `, ${duration(job.estimated_finish - Date.now() / 1000)} left` : "";
  return [meter(step / total, `${step} of ${total} steps`), h("small", null, `${count(step)} / ${count(total)}${left}`)];
}
