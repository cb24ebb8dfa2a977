// What was used: tokens by month and by job, bytes stored, limits, and for operators tenants and keys.

import { get, patience } from "../api.js";
import { columns, meter } from "../charts.js";
import { h, notice, repeat, searchBox, show, table, tile } from "../dom.js";
import { ago, bytes, count, when } from "../format.js";
import { CALM } from "../palette.js";
import { nameOf } from "../training.js";

const KINDS = [["trained", "trained", CALM[0]], ["prompt", "prompts", CALM[2]], ["completion", "answers", CALM[1]], ["evaluated", "evaluations", CALM[3]]];

export function usageScreen(root, { signal, overview }) {
  show(root, h("p", { class: "loading" }, "Loading…"));
  const [all, lists] = [h("div"), h("div")];
  const search = searchBox("Search tenants and keys", () => show(lists, operator(last, search.matches)));
  let last = null;
  let isDrawn = false;

  async function refresh() {
    try {
      const [seen, jobs] = await Promise.all([overview(6), get("/v1/fine_tuning/jobs?limit=100", signal)]);
      const where = window.scrollY;
      show(all, h("header", { class: "head" }, h("h1", null, "Usage")), tilesOf(seen), months(seen), limits(seen), byJob(jobs.data));
      if (seen.is_admin) show(lists, operator(seen, search.matches));
      if (!isDrawn) show(root, all, seen.is_admin ? [h("div", { class: "finding" }, search.node), lists] : []);
      else window.scrollTo(0, where);
      last = seen;
      isDrawn = true;
    } catch (error) {
      if (error.name !== "AbortError" && !isDrawn) show(root, notice(error.message, { bad: true }));
      return patience(error);
    }
    return undefined;
  }

  return repeat(refresh, 15, signal);
}

function tilesOf({ usage }) {
  return h("section", { class: "tiles" },
    KINDS.map(([kind, label]) => tile(kind === "trained" ? "trained tokens" : `tokens of ${label}`, count(usage.totals[kind]), "in all")),
    tile("stored", bytes(usage.stored_bytes), "files and adapters"));
}

function months({ usage }) {
  const name = (at) => new Date(at * 1000).toLocaleDateString("en", { month: "short", year: "2-digit", timeZone: "UTC" });
  const items = usage.months.map((month) => ({ name: name(month.start), parts: KINDS.map(([kind, label, colour]) => [month[kind], colour, label]) }));
  return [h("h2", null, "Tokens by month"), h("section", { class: "card padded" },
    items.some(({ parts }) => parts.some(([value]) => value)) ? columns("Tokens by month", items, count) : notice("No tokens have been used in these months."),
    h("ul", { class: "legend" }, KINDS.map(([, label, colour]) => h("li", null, h("i", { class: "dot", style: { background: colour } }), label))))];
}

function limits({ tenant, usage, queue_of_tenant: queue }) {
  const active = ["validating_files", "queued", "running", "paused"].reduce((sum, state) => sum + (queue[state] || 0), 0);
  const rows = [
    ["Active jobs", active, tenant.max_active_jobs, count],
    ["Trained tokens, and those jobs are yet to train", usage.totals.trained + usage.reserved_tokens, tenant.max_trained_tokens, count],
    ["Stored bytes", usage.stored_bytes, tenant.max_stored_bytes, bytes],
  ].map(([label, used, limit, write]) => h("div", { class: "limit" }, h("span", null, label), limit === null ? h("span", { class: "soft" }, `${write(used)}, no limit`) : h("span", null, `${write(used)} of ${write(limit)}`),
    limit === null ? null : meter(used / limit, label, used / limit > 0.9 ? "var(--warn)" : "var(--accent)")));
  const rate = tenant.max_requests_per_minute;
  return [h("h2", null, "Limits"), h("section", { class: "card padded" }, rows, h("div", { class: "limit" }, h("span", null, "Requests per minute"), h("span", { class: rate === null ? "soft" : "" }, rate === null ? "no limit" : `at most ${count(rate)}`)))];
}

function byJob(jobs) {
  const used = jobs.filter((job) => job.trained_tokens).sort((a, b) => b.trained_tokens - a.trained_tokens);
  if (!used.length) return [h("h2", null, "Tokens by job"), notice("No job has trained any tokens yet.")];
  const total = used.reduce((sum, job) => sum + job.trained_tokens, 0);
  return [h("h2", null, "Tokens by job"), h("section", { class: "card table-card" }, table("Tokens by job", ["job", "tokens", "share", "created"], used.slice(0, 30).map((job) => [
    [h("a", { href: `#/jobs/${encodeURIComponent(job.id)}` }, nameOf(job)), "name"], [count(job.trained_tokens), "number"], [meter(job.trained_tokens / total, "of all tokens"), "progress"], [ago(job.created_at), "soft"],
  ])))];
}

function operator({ tenants, keys }, matches) {
  const state = (key) => (key.revoked_at ? h("span", { class: "badge failed" }, "revoked") : h("span", { class: "badge succeeded" }, "active"));
  return [
    h("h2", null, "Tenants"), h("section", { class: "card table-card" }, table("Tenants", ["tenant", "state", "active jobs", "trained tokens", "stored", "weight"], tenants.filter((tenant) => matches(tenant.name, tenant.id)).map((tenant) => [
      [tenant.name, "name"], [h("span", { class: `badge ${tenant.is_disabled ? "failed" : "succeeded"}` }, tenant.is_disabled ? "shut out" : "active"), "state"],
      [count(tenant.num_active_jobs), "number"], [count(tenant.trained_tokens), "number"], [bytes(tenant.stored_bytes), "number"], [String(tenant.weight), "number"],
    ]))),
    h("h2", null, "Keys"), h("section", { class: "card table-card" }, table("Keys", ["key", "state", "tenant", "may", "last used", "made"], keys.filter((key) => matches(key.name, `weft_${key.id}`, key.tenant, ...key.scopes)).map((key) => [
      [[h("code", null, `weft_${key.id}_…`), h("small", null, key.name)], "name"], [state(key), "state"], key.tenant, [key.scopes.join(", "), "wide wrap"], [key.last_used_at ? ago(key.last_used_at) : "never", "soft"], [when(key.created_at), "soft"],
    ]))),
    h("p", { class: "soft" }, "Keys are made and revoked with weft keys; a secret is shown once and kept nowhere."),
  ];
}
