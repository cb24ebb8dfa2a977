// All jobs of the tenant: state, progress and a live curve each.

import { get, path, patience } from "../api.js";
import { meter, sparkline } from "../charts.js";
import { chip, h, notice, repeat, searchBox, show, table } from "../dom.js";
import { ago, count, duration, number } from "../format.js";
import { CALM, colourOf } from "../palette.js";
import { EventLog, isOver, nameOf, progress, stateOf, tokensOf } from "../training.js";

const PAGE = 20;
const SEARCHED = 1000;
const SEARCH_PAGE = 100;
const SEARCH_S = 15;
const MOST_COMPARED = CALM.length;
const CURVE_PAGES = 1;
const CURVES_A_TIME = 6;
const STATES = ["all", "running", "queued", "paused", "succeeded", "failed", "cancelled"];

export function jobsScreen(root, { signal }) {
  const state = { jobs: [], hasMore: false, shown: PAGE, filter: "all", chosen: new Set(), turn: 0, logs: new Map(), asked: new Map(), done: new Set() };
  const search = searchBox("Search jobs", find);
  const actions = h("div", { class: "actions" });
  const filters = h("div", { class: "chips", role: "group", "aria-label": "Show jobs that are" });
  const list = h("div", null, h("p", { class: "loading" }, "Loading…"));
  const more = h("button", { type: "button", hidden: true, onclick: () => { state.shown += PAGE; refresh(); } }, "Show older jobs");
  show(root, h("header", { class: "head" }, h("h1", null, "Jobs"), actions), h("div", { class: "finding" }, search.node, filters), list, more);

  async function refresh() {
    const isSearch = search.words().length > 0;
    try {
      await load(state, isSearch ? SEARCHED : state.shown, isSearch ? SEARCH_PAGE : PAGE, signal);
      draw();
      await loadCurves(state, visible(), signal);
      draw();
    } catch (error) {
      if (error.name === "AbortError") return undefined;
      if (!state.jobs.length) show(list, notice(error.message, { bad: true }));
      return patience(error);
    }
    return state.jobs.length > SEARCH_PAGE ? SEARCH_S : undefined;
  }

  // Those listed are searched at once, the older ones when they have come.
  let typing = 0;
  function find() {
    draw();
    clearTimeout(typing);
    typing = setTimeout(() => { if (!signal.aborted) refresh(); }, 300);
  }

  const matching = () => state.jobs.filter((job) => search.matches(nameOf(job), job.id, job.model, job.fine_tuned_model, job.status, job.training_file, ...Object.entries(job.metadata || {}).flat()));
  const visible = () => matching().filter((job) => state.filter === "all" || job.status === state.filter);

  function choose(id, on) {
    if (on) state.chosen.add(id); else state.chosen.delete(id);
    draw();
  }

  function draw() {
    const jobs = visible();
    drawFilters(matching());
    const compared = [...state.chosen].map(encodeURIComponent).join("/");
    show(actions, state.chosen.size > 1 ? h("a", { class: "button", href: `#/compare/${compared}` }, `Compare ${state.chosen.size}`) : null,
      h("a", { class: "button main", href: "#/new" }, "New job"));
    more.hidden = !state.hasMore;
    if (!state.jobs.length) {
      const action = h("a", { class: "button main", href: "#/new" }, "Start the first one");
      show(list, notice("There are no jobs yet: upload examples and train an adapter.", { action }));
    } else if (!jobs.length) {
      show(list, notice(search.words().length ? `No job matches "${search.node.value.trim()}"${state.hasMore ? ` among the newest ${count(state.jobs.length)}` : ""}.` : `None of the jobs listed is ${state.filter}.`));
    } else {
      show(list, h("section", { class: "card table-card" }, table("Jobs, newest first", ["job", "state", "progress", "loss", "last loss", "tokens", "created", "compare"], jobs.map((job) => row(job, state, choose)), "jobs")));
    }
  }

  function drawFilters(jobs) {
    const number = (name) => (name === "all" ? jobs.length : jobs.filter((job) => job.status === name).length);
    show(filters, STATES.filter((name) => name === "all" || number(name) || name === state.filter).map((name) =>
      h("button", { type: "button", class: "chip", "aria-pressed": String(state.filter === name), data: { filter: name }, onclick: () => { state.filter = name; draw(); } }, `${name} `, h("b", null, name === "all" && state.hasMore ? `${number(name)}+` : number(name)))));
  }

  return repeat(refresh, 4, signal);
}

async function load(state, wanted, limit, signal) {
  state.turn += 1;
  const { turn } = state;
  const jobs = [];
  let page;
  do {
    page = await get(path("/v1/fine_tuning/jobs", { limit, after: jobs.at(-1)?.id }), signal);
    jobs.push(...page.data);
  } while (page.has_more && jobs.length < wanted);
  // What was wanted meanwhile, by a search or for older jobs, is on its way.
  if (turn === state.turn) Object.assign(state, { jobs, hasMore: page.has_more });
}

// A few curves at a time, those not looked at for longest first; those of jobs that have ended once.
async function loadCurves(state, jobs, signal) {
  const moves = (job) => !state.done.has(job.id) && (job.status === "running" || isOver(job) || !state.logs.has(job.id));
  const due = jobs.filter(moves).sort((a, b) => (state.asked.get(a.id) || 0) - (state.asked.get(b.id) || 0));
  await Promise.all(due.slice(0, state.asked.size ? CURVES_A_TIME : PAGE).map(async (job) => {
    const log = state.logs.get(job.id) || new EventLog(job.id);
    state.asked.set(job.id, Date.now());
    await log.refresh(signal, CURVE_PAGES);
    state.logs.set(job.id, log);
    if (isOver(job)) state.done.add(job.id);
  }));
}

function row(job, state, choose) {
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
    [compareBox(job, state, choose), "compare"],
  ];
}

function compareBox(job, { chosen }, choose) {
  const isChosen = chosen.has(job.id);
  return h("input", {
    type: "checkbox", id: `compare-${job.id}`, "aria-label": `Compare ${nameOf(job)}`, checked: isChosen,
    disabled: !isChosen && chosen.size >= MOST_COMPARED, onchange: (event) => choose(job.id, event.currentTarget.checked),
  });
}

function steps(job, log) {
  const { step, total } = progress(job, log);
  if (!total) return h("span", { class: "soft" }, step ? `step ${step}` : "–");
  const left = job.status === "running" && job.estimated_finish ? `, ${duration(job.estimated_finish - Date.now() / 1000)} left` : "";
  return [meter(step / total, `${step} of ${total} steps`), h("small", null, `${count(step)} / ${count(total)}${left}`)];
}
