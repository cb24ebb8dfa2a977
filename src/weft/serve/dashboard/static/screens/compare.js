// Several jobs beside each other: their curves on the same axes, and the settings in which they differ.

import { get, patience } from "../api.js";
import { curves, logToggle, smooth } from "../charts.js";
import { chip, h, notice, repeat, show, table } from "../dom.js";
import { count, number, share } from "../format.js";
import { CALM, colours } from "../palette.js";
import { EventLog, SHARES, STEPS, isOver, nameOf, progress, settingsOf, stateOf } from "../training.js";

const CHARTS = [
  ["Training loss", "smoothed", { y: number }, (log) => (log.losses.length > 40 ? smooth(log.losses) : log.losses)],
  ["Validation loss", "", { y: number }, (log) => log.evals],
  ["Token accuracy", "training, smoothed", SHARES, (log) => (log.accuracies.length > 40 ? smooth(log.accuracies) : log.accuracies)],
  ["Learning rate", "", { y: number }, (log) => log.points("learning_rate")],
];

export function compareScreen(root, { signal, args }) {
  const ids = [...new Set(args)].filter(Boolean).slice(0, CALM.length);
  if (!ids.length) { show(root, h("h1", null, "Compare jobs"), notice("Choose jobs in the list.", { action: h("a", { class: "button", href: "#/jobs" }, "All jobs") })); return; }
  const colour = colours(ids);
  const logs = new Map(ids.map((id) => [id, new EventLog(id)]));
  const jobs = new Map();
  const charts = CHARTS.map(([title, note, axis, points]) => ({ title, note, points, ...curves(title, { ...STEPS, ...axis, height: 240, empty: "None of these jobs has any." }) }));
  const [problems, summary, settings] = [h("div"), h("div"), h("div")];
  show(root, h("p", { class: "crumb" }, h("a", { href: "#/jobs" }, "Jobs")), h("header", { class: "head" }, h("h1", null, "Compare jobs")), problems, summary,
    h("div", { class: "grid two overlay" }, charts.map(({ title, note, node, setLog }) => h("section", { class: "card chart-card" },
      h("header", null, h("h3", null, title), h("p", null, note), title.endsWith("loss") ? logToggle(setLog) : null), node))),
    h("h2", null, "Settings that differ"), settings);

  async function refresh() {
    const errors = await Promise.all(ids.map(async (id) => {
      if (jobs.has(id) && isOver(jobs.get(id)) && logs.get(id).isWhole) return null;
      try {
        const job = await get(`/v1/fine_tuning/jobs/${encodeURIComponent(id)}`, signal);
        await logs.get(id).refresh(signal);
        jobs.set(id, job);
        return null;
      } catch (error) {
        return error;
      }
    }));
    if (signal.aborted) return undefined;
    show(problems, errors.filter(Boolean).map((error) => notice(error.message, { bad: true })));
    draw();
    return patience(errors.find(Boolean) || {});
  }

  function draw() {
    const known = ids.filter((id) => jobs.has(id)).map((id) => ({ id, job: jobs.get(id), log: logs.get(id), colour: colour.get(id) }));
    const names = known.map(({ job }) => nameOf(job));
    for (const one of known) one.name = names.filter((name) => name === nameOf(one.job)).length > 1 ? `${nameOf(one.job)} · ${one.id.slice(-4)}` : nameOf(one.job);
    show(summary, known.length ? h("section", { class: "card table-card" }, summaryOf(known)) : []);
    for (const chart of charts) chart.update(known.map(({ name, log, colour: stroke }) => ({ name, colour: stroke, points: chart.points(log) })));
    show(settings, known.length ? differences(known) : []);
  }

  repeat(refresh, 3, signal);
}

function summaryOf(known) {
  return table("Jobs compared", ["job", "state", "step", "loss", "validation", "token accuracy"], known.map(({ id, name, job, log, colour }) => {
    const { step, total } = progress(job, log);
    return [
      [[h("i", { class: "dot", style: { background: colour } }), h("a", { href: `#/jobs/${encodeURIComponent(id)}` }, name), h("small", null, job.model)], "name"],
      [chip(stateOf(job)), "state"], [total ? `${count(step)} of ${count(total)}` : count(step), "number"],
      [number(log.losses.at(-1)?.[1]), "number"], [number(log.evals.at(-1)?.[1]), "number"], [share(log.accuracies.at(-1)?.[1]), "number"],
    ];
  }));
}

function differences(known) {
  const each = known.map(({ job }) => new Map(settingsOf(job).filter(([, value]) => value !== null)));
  const names = [...new Set(each.flatMap((settings) => [...settings.keys()]))];
  const rows = names.filter((name) => new Set(each.map((settings) => settings.get(name))).size > 1);
  if (!rows.length) return notice("All settings are the same.");
  return h("section", { class: "card table-card" }, table("Settings that differ", ["setting", ...known.map(({ name }) => name)], rows.map((name) => [[name, "name"], ...each.map((settings) => [settings.get(name) ?? "–", "wrap"])])));
}
