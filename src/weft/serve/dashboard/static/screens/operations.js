// The machines: who trains what, how fast, with how much memory, and what waits.

import { patience, post } from "../api.js";
import { binaryTicks, curves, meter, strip, timeTicks, wholeTicks } from "../charts.js";
import { facts, h, notice, repeat, show, tile, toast } from "../dom.js";
import { ago, bytes, clock, count, duration, share } from "../format.js";
import { CALM, OTHERS, colours } from "../palette.js";

const STATES = [["running", "var(--busy)"], ["queued", OTHERS], ["validating_files", CALM[4]], ["paused", "var(--warn)"]];
const TIMES = { x: (at) => clock(at), xTick: (at) => clock(at, at % 60 !== 0), xMarks: timeTicks };
const TIME_PARTS = [["computing", "#5b6b82"], ["evaluating", "#7fa39e"], ["compiling", "#a58aa8"], ["loading", "#93a8c4"], ["preparing data", "#c2ab83"], ["writing", "#c08f84"], ["idle", "color-mix(in srgb, var(--soft) 35%, transparent)"]];
const BADGES = { alive: "running", draining: "paused", drained: "paused", leaving: "paused", lost: "failed" };
const WISHES = { alive: ["drain", "Drain"], draining: ["undrain", "Take jobs again"], drained: ["undrain", "Take jobs again"], lost: ["remove", "Forget"] };
const ENDED = ["succeeded", "failed", "cancelled"];

export function operationsScreen(root, { signal, overview }) {
  const speed = curves("Throughput", { ...TIMES, y: count, yMarks: wholeTicks, fromZero: true, empty: "No worker has reported yet." });
  const memory = curves("Memory", { ...TIMES, y: bytes, yMarks: binaryTicks, fromZero: true, empty: "No worker has reported yet." });
  const [tiles, queue, workers] = [h("section", { class: "tiles" }), h("section", { class: "card padded" }), h("div", { class: "machines" })];
  let isDrawn = false;
  show(root, h("p", { class: "loading" }, "Loading…"));

  async function refresh() {
    let seen;
    try {
      seen = await overview();
    } catch (error) {
      if (error.name !== "AbortError" && !isDrawn) show(root, notice(error.message, { bad: true }));
      return patience(error);
    }
    if (!isDrawn) {
      show(root, h("header", { class: "head" }, h("h1", null, "Operations")), tiles,
        h("h2", null, "Over time"), h("div", { class: "grid two" }, chart("Throughput", "trained tokens per second, all tenants", speed), chart("Memory", "in use, by worker", memory)),
        h("h2", null, seen.is_admin ? "Queue, all tenants" : "Queue, your jobs"), queue, h("h2", null, "Workers"), workers);
      isDrawn = true;
    }
    show(tiles, tilesOf(seen));
    drawHistory(seen, speed, memory);
    show(queue, queueOf(seen));
    show(workers, seen.workers.length ? machinesOf(seen, steer) : notice("No worker is alive: jobs wait until one starts (weft worker)."));
    return undefined;
  }

  async function steer(worker, wish, button) {
    button.disabled = true;
    try {
      await post(`/v1/workers/${encodeURIComponent(worker.id)}/${wish}`);
      await refresh();
    } catch (error) {
      toast(error.message, true);
      button.disabled = false;
    }
  }

  return repeat(refresh, 2, signal);
}

function chart(title, note, { node }) {
  return h("section", { class: "card chart-card" }, h("header", null, h("h3", null, title), h("p", null, note)), node);
}

function tilesOf({ workers: known, queue, is_admin: isAdmin }) {
  const workers = known.filter((worker) => worker.state !== "lost");
  const lost = known.length - workers.length;
  const sum = (name) => workers.reduce((total, worker) => total + (worker[name] || 0), 0);
  const others = workers.reduce((total, worker) => total + worker.num_other_jobs, 0);
  const waiting = (queue.queued || 0) + (queue.validating_files || 0);
  return [
    tile("workers", count(workers.length), lost ? `alive, ${count(lost)} lost` : workers.some((worker) => worker.state !== "alive") ? "some drain or leave" : workers.length ? "alive" : "none is alive"),
    tile("tokens per second", workers.length ? count(sum("tokens_per_second")) : "–", "all workers and tenants"),
    tile("memory in use", sum("memory_bytes") ? bytes(sum("memory_bytes")) : "–", sum("memory_total_bytes") ? `of ${bytes(sum("memory_total_bytes"))}` : ""),
    tile(isAdmin ? "jobs of all tenants" : "your jobs", `${count(queue.running || 0)} running`, `${count(waiting)} waiting${others ? `; beside ${count(others)} of other tenants` : ""}`),
  ];
}

function drawHistory({ history, workers }, speed, memory) {
  const ids = Object.keys(history);
  const colour = colours(ids);
  const name = (id) => workers.find((worker) => worker.id === id)?.name || id.slice(-6);
  const series = (field, more) => ids.map((id) => ({ name: name(id), colour: colour.get(id), points: history[id].map((point) => [point.at, point[field] ?? NaN]), ...more }));
  speed.update(series("tokens_per_second", { area: ids.length === 1 }));
  memory.update(series("memory_bytes", { area: ids.length === 1 }));
}

function queueOf({ queue, tenants, is_admin: isAdmin }) {
  const active = STATES.map(([state, colour]) => [state.replaceAll("_", " "), queue[state] || 0, colour]);
  const ended = ENDED.map((state) => `${count(queue[state] || 0)} ${state}`).join(", ");
  if (!active.some(([, number]) => number)) return notice(`${isAdmin ? "No job of any tenant" : "None of your jobs"} is running or waiting; ${ended} so far.`);
  const rows = (tenants || []).filter((tenant) => STATES.some(([state]) => tenant.queue[state])).map((tenant) => h("li", null, h("b", null, tenant.name),
    STATES.filter(([state]) => tenant.queue[state]).map(([state]) => ` ${tenant.queue[state]} ${state.replaceAll("_", " ")}`).join(",")));
  return [strip("Jobs by state", active, count), h("p", { class: "soft" }, `Ended so far: ${ended}.`), rows.length ? h("ul", { class: "plain" }, rows) : null];
}

// Workers by machine; only operators see which those are.
function machinesOf({ workers, is_admin: isAdmin }, steer) {
  const machines = [...new Set(workers.map((worker) => worker.machine))];
  return machines.map((machine) => {
    const mine = workers.filter((worker) => worker.machine === machine);
    return h("section", { class: "machine" }, machine ? machineHead(machine, mine) : null,
      h("div", { class: "workers" }, mine.map((worker) => workerCard(worker, isAdmin ? steer : null))));
  });
}

function machineHead(machine, workers) {
  const live = workers.filter((worker) => worker.state !== "lost");
  const jobs = live.reduce((sum, worker) => sum + worker.jobs.length + worker.num_other_jobs, 0);
  const speed = live.reduce((sum, worker) => sum + (worker.tokens_per_second || 0), 0);
  const devices = [...new Set(live.map((worker) => worker.device).filter(Boolean))].map((name) => `${live.filter((worker) => worker.device === name).length} × ${name}`);
  const parts = [devices.join(", "), `${count(jobs)} ${jobs === 1 ? "job" : "jobs"}`, `${count(speed)} tokens per second`];
  return h("header", null, h("h3", null, machine), h("p", { class: "soft" }, live.length ? parts.filter(Boolean).join(" · ") : "lost"));
}

function steerButton(worker, steer) {
  const [wish, label] = (steer && WISHES[worker.state]) || [];
  if (!wish) return null;
  const button = h("button", { type: "button", class: "button", data: { steer: worker.id } }, label);
  button.addEventListener("click", () => steer(worker, wish, button));
  return button;
}

function workerCard(worker, steer) {
  const used = worker.memory_total_bytes ? worker.memory_bytes / worker.memory_total_bytes : null;
  return h("section", { class: "card padded worker" },
    h("header", null, h("h3", null, worker.name, " ", h("span", { class: `badge ${BADGES[worker.state]}` }, worker.state)), steerButton(worker, steer)),
    facts([
      ["device", worker.device], ["base model", worker.base_model], ["tokens per second", worker.state !== "lost" && Number.isFinite(worker.tokens_per_second) ? count(worker.tokens_per_second) : null],
      ["memory", worker.memory_bytes ? `${bytes(worker.memory_bytes)}${worker.memory_total_bytes ? ` of ${bytes(worker.memory_total_bytes)}` : ""}` : null],
      ["longest sample", worker.max_length ? `${count(worker.max_length)} tokens` : null], ["places", worker.max_jobs ? `${count(worker.jobs.length + worker.num_other_jobs)} of ${count(worker.max_jobs)} taken` : null],
      ["last seen", ago(worker.seen_at)], ["up since", clock(worker.started_at, false)],
    ]),
    used === null ? null : meter(used, "memory in use", used > 0.92 ? "var(--warn)" : "var(--accent)"),
    worker.time ? [h("h4", null, "Where the time went"), timeOf(worker.time)] : null,
    worker.state === "lost" ? null : [h("h4", null, "Training now"), jobsOf(worker), h("h4", null, "Current program"), programOf(worker)]);
}

// Every second since the worker's process began, once; what took none is left out.
function timeOf(time) {
  const parts = TIME_PARTS.map(([name, colour]) => [name, time[`${name.replace(" ", "_")}_s`] || 0, colour]).filter(([, seconds]) => seconds > 0);
  return strip("Where the time went", parts, (seconds) => `${duration(seconds)}, ${share(seconds / time.wall_s)}`);
}

function jobsOf({ jobs, num_other_jobs: others }) {
  if (!jobs.length && !others) return h("p", { class: "soft" }, "Nothing.");
  return h("ul", { class: "plain row" }, jobs.map((job) => h("li", null, job.is_mine ? h("a", { href: `#/jobs/${encodeURIComponent(job.id)}` }, job.name) : job.name)),
    others ? h("li", { class: "soft" }, `${others} of other tenants`) : null);
}

// Spans side by side, as wide as they were long. Those that train are coloured by each job's share of the tokens.
function programOf({ program, names }) {
  if (!program.length) return h("p", { class: "soft" }, "No step has been reported.");
  const trains = (span) => Object.values(span.tokens).some((tokens) => tokens > 0);
  const ids = [...new Set(program.filter(trains).flatMap((span) => Object.keys(span.tokens)))];
  const colour = colours(ids.filter((id) => id));
  colour.set("", OTHERS);
  const nameOf = (id) => names[id] || "other tenants";
  const seconds = program.reduce((sum, span) => sum + span.seconds, 0);
  return h("div", null,
    h("div", { class: "program", role: "img", "aria-label": `The last ${program.length} spans of work` }, program.map((span) => spanBox(span, colour, nameOf, trains(span)))),
    h("p", { class: "soft" }, `The last ${seconds.toFixed(2)} s of work. Wide: long; high: full; low and grey: optimizer, planning, checkpoints.`),
    h("ul", { class: "legend" }, ids.map((id) => h("li", null, h("i", { class: "dot", style: { background: colour.get(id) } }), nameOf(id)))));
}

function spanBox({ name, seconds, tokens, capacity }, colour, nameOf, trains) {
  const total = Object.values(tokens).reduce((a, b) => a + b, 0);
  const lines = Object.entries(tokens).filter(([, number]) => number).map(([id, number]) => `${nameOf(id)}: ${count(number)} tokens`);
  const title = [`${name.replaceAll("_", " ")}, ${(1000 * seconds).toFixed(1)} ms`, ...lines].join("\n");
  const fill = capacity ? Math.min(1, total / capacity) : 1;
  return h("i", { class: trains ? "span" : "span other", title, style: { "flex-grow": String(Math.max(seconds, 1e-5) * 1000) } },
    trains ? Object.entries(tokens).map(([id, number]) => h("i", { style: { height: `${(100 * fill * number) / total}%`, background: colour.get(id) } })) : null);
}
