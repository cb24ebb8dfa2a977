// What a job and its events say about training, whichever of their fields are there.

import { get, path } from "./api.js";
import { shareTicks, wholeTicks } from "./charts.js";
import { count, share } from "./format.js";

const PAGE = 100;
const MOST = 20_000;
export const FINAL = ["succeeded", "failed", "cancelled"];
export const MAY = {
  pause: ["queued", "running"],
  resume: ["pausing", "paused"],
  cancel: ["validating_files", "queued", "running", "pausing", "paused"],
};

/** How curves over steps write and divide their axis. */
export const STEPS = { x: (step) => `step ${count(step)}`, xTick: count, xMarks: wholeTicks };

/** And how those of accuracies write and divide the other one. */
export const SHARES = { y: share, yMarks: shareTicks };

export const isOver = (job) => FINAL.includes(job.status);
export const nameOf = (job) => job.user_provided_suffix || job.metadata?.name || job.id;

/** The state, or what a user asked for that has not happened yet. */
export function stateOf(job) {
  return isOver(job) ? job.status : { cancel: "cancelling", pause: "pausing" }[job.wanted] || job.status;
}
export const isFineTuned = (model) => model.id.startsWith("ft:");

/** A model's name without what all of a tenant's share. */
export function shortModel(id) {
  const parts = id.split(":");
  return parts[0] === "ft" ? [parts[3] || parts[1], parts.slice(4).join(":")].filter(Boolean).join(" · ") : id;
}

/** Events of one job, oldest first: the newest are fetched each time, the old ones bit by bit behind them. */
export class EventLog {
  constructor(job) {
    this.base = `/v1/fine_tuning/jobs/${encodeURIComponent(job)}/events`;
    this.events = [];
    this.known = new Set();
    this.tail = null;
  }

  /** Fetches what is new, and up to `pages` pages of what is old. Says whether anything came. */
  async refresh(signal, pages = 10) {
    const before = this.known.size;
    const first = await this.#page(undefined, signal);
    let fresh = first.data;
    for (let page = first; this.tail && page.has_more && !page.data.some(({ id }) => this.known.has(id));) {
      page = await this.#page(page.data.at(-1).id, signal);
      fresh = fresh.concat(page.data);
    }
    this.tail ||= { id: first.data.at(-1)?.id, more: first.has_more };
    this.events.push(...this.#unknown(fresh));
    for (let i = 0; i < pages && this.tail.more && this.events.length < MOST; i += 1) {
      const older = await this.#page(this.tail.id, signal);
      this.tail = { id: older.data.at(-1)?.id, more: older.has_more };
      this.events = [...this.#unknown(older.data), ...this.events];
    }
    return this.known.size > before;
  }

  get isWhole() { return Boolean(this.tail) && (!this.tail.more || this.events.length >= MOST); }

  #page(after, signal) { return get(path(this.base, { limit: PAGE, after }), signal); }

  #unknown(newestFirst) {
    const found = newestFirst.filter(({ id }) => !this.known.has(id)).reverse();
    found.forEach(({ id }) => this.known.add(id));
    return found;
  }

  /** Points [step, value] of a metric; a step told twice counts once. */
  points(...names) {
    const found = new Map();
    for (const { data } of this.events) {
      const value = data && names.map((name) => data[name]).find((each) => each !== null && each !== undefined);
      if (data && Number.isFinite(data.step) && Number.isFinite(value)) found.set(data.step, value);
    }
    return [...found].sort(([a], [b]) => a - b);
  }

  get losses() { return this.points("train_loss", "loss"); }
  get accuracies() { return this.points("train_mean_token_accuracy"); }
  get evalAccuracies() { return this.points("valid_mean_token_accuracy", "full_valid_mean_token_accuracy"); }
  get evals() { return this.points("valid_loss", "full_valid_loss", "eval_loss"); }

  /** The last thing metrics said under a name. */
  last(name) {
    for (let i = this.events.length - 1; i >= 0; i -= 1) {
      const value = this.events[i].data?.[name];
      if (value !== null && value !== undefined) return value;
    }
    return null;
  }
}

/** Steps done and in all, from the job or else from its events. */
export function progress(job, log) {
  const step = Math.max(job.step ?? 0, log?.last("step") ?? 0);
  const total = job.total_steps ?? log?.last("total_steps") ?? null;
  return { step: job.status === "succeeded" && total ? total : step, total };
}

/** Tokens trained so far: those accounted for, or while a job trains what it last said. */
export function tokensOf(job, log) {
  return isOver(job) ? job.trained_tokens : Math.max(job.trained_tokens || 0, log?.last("trained_tokens") || 0) || null;
}

/** By what a job trains: pairs of a setting's name and its value as text. */
export function settingsOf(job) {
  const flat = (value, prefix) => Object.entries(value || {}).flatMap(([name, each]) =>
    each && typeof each === "object" && !Array.isArray(each) ? flat(each, `${prefix}${name}.`) : [[prefix + name, Array.isArray(each) ? each.join(", ") : String(each)]]);
  const ours = flat(job.settings, "");
  return [
    ["starts from", job.model], ["training file", job.training_file], ["validation file", job.validation_file],
    ...(ours.length ? ours : flat(job.hyperparameters, "")), ["seed", String(job.seed)],
  ];
}

/** Problems of a training file in a refusal: [{line, text}], by line; empty if the refusal is about something else. */
export function fileProblems(error) {
  const listed = error.details?.problems;
  if (Array.isArray(listed)) {
    return listed.map(({ line, message }) => ({ ...fromText(message), line: line || null }));
  }
  return error.message.split(/\n|;\s+(?=(?:[^\s:]+ )?line \d)/).map(fromText).filter(({ line }) => line !== null);
}

function fromText(text) {
  const match = /\bline (\d+)\b:?\s*/i.exec(text);
  if (!match) return { line: null, text: text.trim() };
  return { line: Number(match[1]), text: text.slice(match.index + match[0].length).replace(/^[:,\s]+/, "").trim() };
}
