// One job: curves while they grow, what was asked for, what happened, and what came of it.

import { action, saving } from "../actions.js";
import { get, patience, post } from "../api.js";
import { curves, logToggle, meter, smooth } from "../charts.js";
import { chip, facts, h, notice, repeat, show, table } from "../dom.js";
import { clock, count, duration, number, share, when } from "../format.js";
import { colourOf } from "../palette.js";
import { EventLog, MAY, SHARES, STEPS, isOver, nameOf, progress, settingsOf, stateOf, tokensOf } from "../training.js";

const SHOWN_EVENTS = 60;

export function jobScreen(root, { signal, args: [id] }) {
  const base = `/v1/fine_tuning/jobs/${encodeURIComponent(id)}`;
  const log = new EventLog(id);
  const parts = layout(id);
  let job = null;
  let checkpoints = [];
  let isLast = false;
  let turn = 0;
  let drawn = "";
  show(root, h("p", { class: "loading" }, "Loading…"));

  async function refresh() {
    if (isLast) return undefined;
    try {
      // The events of a job that has ended are complete only if asked for after it had, so the job comes first.
      const found = turn % 2 === 0 || !job ? await get(base, signal) : job;
      await log.refresh(signal);
      if (turn % 4 === 0 || isOver(found)) checkpoints = (await get(`${base}/checkpoints?limit=20`, signal)).data;
      turn += 1;
      isLast = isOver(found) && log.isWhole;
      if (!job) show(root, parts.all);
      job = found;
      const now = JSON.stringify([job, checkpoints, log.known.size]);
      if (now !== drawn) draw();
      drawn = now;
    } catch (error) {
      if (error.name === "AbortError") return undefined;
      if (!job) show(root, notice(error.message, { bad: true, action: h("a", { class: "button", href: "#/jobs" }, "All jobs") }));
      return patience(error);
    }
    return undefined;
  }

  async function act(wish) {
    job = await post(`${base}/${wish}`);
    isLast = false;
    turn = 0;
    draw();
  }

  function draw() {
    drawHead(parts, job, log, act);
    drawCharts(parts, job, log);
    show(parts.settings, settings(job));
    const metadata = Object.entries(job.metadata || {});
    show(parts.metadata, metadata.length ? [h("h2", null, "Metadata"), h("section", { class: "card padded" }, facts(metadata, "settings"))] : []);
    drawCheckpoints(parts.checkpoints, checkpoints, job);
    drawEvents(parts.events, log);
  }

  return repeat(refresh, 1.5, signal);
}

function layout(id) {
  const loss = curves("Training loss", { ...STEPS, y: number, height: 300 });
  const accuracy = curves("Token accuracy", { ...STEPS, ...SHARES, height: 180 });
  const rate = curves("Learning rate", { ...STEPS, y: number, height: 180 });
  const norm = curves("Gradient norm", { ...STEPS, y: number, height: 180 });
  const parts = { loss, accuracy, rate, norm, colour: colourOf(id) };
  for (const name of ["head", "settings", "metadata", "checkpoints", "events"]) parts[name] = h("div");
  parts.small = h("div", { class: "grid three" }, card("Token accuracy", "dots: validation", accuracy.node), card("Gradient norm", "before clipping", norm.node), card("Learning rate", "", rate.node));
  parts.all = [
    parts.head,
    card("Loss", "faint: every step, clear: smoothed; dots: validation", loss.node, logToggle(loss.setLog)), parts.small,
    h("h2", null, "Checkpoints"), parts.checkpoints, h("h2", null, "Events"), parts.events,
    h("h2", null, "Settings"), h("section", { class: "card padded" }, parts.settings), parts.metadata,
  ];
  return parts;
}

function card(title, note, node, extra = null) {
  return h("section", { class: "card chart-card" }, h("header", null, h("h3", null, title), h("p", null, note), extra), node);
}

function drawHead(parts, job, log, act) {
  const { step, total } = progress(job, log);
  const wishes = Object.keys(MAY).filter((wish) => MAY[wish].includes(stateOf(job)));
  const buttons = wishes.map((wish) => action({ cancel: "Cancel", pause: "Pause", resume: "Resume" }[wish], async () => {
    if (wish !== "cancel" || confirm("Cancel this job for good? It cannot be resumed.")) await act(wish);
  }, { data: { wish }, class: wish === "cancel" ? "danger" : "" }));
  if (job.fine_tuned_model) buttons.unshift(
    h("a", { class: "button main", href: `#/chat/${encodeURIComponent(job.fine_tuned_model)}` }, "Try it"),
    saving("Download adapter", `/v1/models/${job.fine_tuned_model}/adapter`, `${nameOf(job)}.zip`));
  for (const file of job.result_files || []) buttons.push(saving("Results (CSV)", `/v1/files/${file}/content`, `${nameOf(job)}.csv`));
  buttons.push(h("a", { class: "button", href: `#/new/${encodeURIComponent(job.id)}` }, "Clone"));
  const seconds = (job.finished_at || Date.now() / 1000) - (job.started_at || job.created_at);
  show(parts.head,
    h("p", { class: "crumb" }, h("a", { href: "#/jobs" }, "Jobs")),
    h("header", { class: "head" }, h("h1", null, nameOf(job), " ", chip(stateOf(job))), h("div", { class: "actions" }, buttons)),
    job.error?.message ? notice(job.error.message, { bad: true }) : null,
    total ? h("div", { class: "wide-meter" }, meter(step / total, `${step} of ${total} steps`, job.status === "failed" ? "var(--bad)" : "var(--accent)")) : null,
    facts([
      ["step", total ? `${count(step)} of ${count(total)}` : step ? count(step) : null],
      ["loss", log.losses.length ? number(log.losses.at(-1)[1]) : null],
      ["validation", log.evals.length ? number(log.evals.at(-1)[1]) : null],
      ["token accuracy", accuracy(log)],
      ["tokens", tokensOf(job, log) ? count(tokensOf(job, log)) : null],
      [isOver(job) ? "took" : job.started_at ? "for" : "waiting for", duration(seconds)],
      ["left", job.status === "running" && job.estimated_finish ? duration(job.estimated_finish - Date.now() / 1000) : null],
      ["model", job.model],
      ["id", h("code", null, job.id)],
    ], "about"));
}

/** Of the last step and of the last validation, if there are any. */
function accuracy(log) {
  const [trained, validated] = ["train", "valid"].map((kind) => log.last(`${kind}_mean_token_accuracy`));
  if (trained === null) return null;
  return validated === null ? share(trained) : `${share(trained)}, validation ${share(validated)}`;
}

function drawCharts(parts, job, log) {
  const { losses, evals } = log;
  const clear = losses.length > 40 ? smooth(losses) : losses;
  parts.loss.update([
    ...(clear === losses ? [] : [{ name: "each step", colour: parts.colour, points: losses, faint: true }]),
    { name: "training", colour: parts.colour, points: clear },
    { name: "validation", colour: "var(--ink)", points: evals, dots: true },
  ], isOver(job) ? "No step was done." : "The first step has not been done yet.");
  parts.loss.node.dataset.points = losses.length;
  const [norms, rates] = [log.points("grad_norm"), log.points("learning_rate")];
  parts.small.hidden = norms.length < 2 && rates.length < 2;
  parts.accuracy.update([
    { name: "training", colour: parts.colour, points: log.accuracies },
    { name: "validation", colour: "var(--ink)", points: log.evalAccuracies, dots: true },
  ]);
  parts.norm.update([{ name: "norm", colour: parts.colour, points: norms }]);
  parts.rate.update([{ name: "rate", colour: parts.colour, points: rates }]);
}

function settings(job) {
  return facts([
    ...settingsOf(job), ["priority", job.priority ? String(job.priority) : null],
    ["created", when(job.created_at)], ["finished", job.finished_at && when(job.finished_at)],
  ], "settings");
}

function drawCheckpoints(node, checkpoints, job) {
  if (!checkpoints.length) { show(node, notice(isOver(job) ? "This job has no checkpoints." : "No checkpoint has been written yet.")); return; }
  show(node, h("section", { class: "card table-card" }, table("Checkpoints, newest first", ["checkpoint", "training loss", "validation loss", "written", "model"], checkpoints.map((each) => [
    `step ${count(each.step_number)}`,
    [number(each.metrics?.train_loss ?? null), "number"],
    [number(each.metrics?.valid_loss ?? each.metrics?.full_valid_loss ?? null), "number"],
    [clock(each.created_at), "soft"],
    [h("a", { href: `#/chat/${encodeURIComponent(each.fine_tuned_model_checkpoint)}` }, "Try it"), "wide"],
  ]))));
}

function drawEvents(node, log) {
  const scrolled = node.querySelector(".events")?.scrollTop || 0;
  const newest = log.events.slice(-SHOWN_EVENTS).reverse();
  const rest = log.events.length - newest.length;
  show(node, h("section", { class: "card" },
    h("ol", { id: "events", class: "events", reversed: true, tabindex: "0", "aria-label": "Events, newest first" }, newest.map((event) =>
      h("li", { class: event.level }, h("time", null, clock(event.created_at)), h("span", null, event.message)))),
    rest > 0 ? h("p", { class: "soft padded" }, `${count(rest)} older events are in the API.`) : null));
  node.querySelector(".events").scrollTop = scrolled;
}
