// A new job: a file in, its problems line by line, a few settings, start.

import { ApiError, get, path, post, upload } from "../api.js";
import { meter } from "../charts.js";
import { valuesOf } from "../clone.js";
import { h, notice, show } from "../dom.js";
import { bytes, count } from "../format.js";
import { fileProblems, isFineTuned, nameOf } from "../training.js";

const READABLE = 64 * 2 ** 20;
const SHOWN_PROBLEMS = 50;
const HYPER = [
  ["n_epochs", "Epochs", "auto", "Passes over the examples, 1 to 50."],
  ["batch_size", "Batch size", "auto", "Examples per step, 1 to 256."],
  ["learning_rate_multiplier", "Learning rate ×", "auto", "1 is a peak of 2e-4 for LoRA."],
];
const LORA = [["r", "Rank", "16", "Higher learns more and takes more memory."], ["alpha", "Alpha", "32", "Usually twice the rank.", "twice the rank"], ["dropout", "Dropout", "0", "0 to 1; helps with few examples."]];
const MORE = [["max_length", "Longest example", "1024", "In tokens; longer ones are cut."], ["max_steps", "Most steps", "", "Instead of epochs."], ["priority", "Priority", "0", "Higher goes first, as far as allowed."], ["seed", "Seed", "42", "The same seed gives the same adapter."]];
const METHODS = [["supervised", "Examples (supervised)"], ["dpo", "Pairs of answers (DPO)"]];
const BETA = ["beta", "Beta", "auto", "Higher stays closer to the start, up to 2."];
const JSONS = [
  ["settings", "Other settings", 'Of a jobs file, as JSON: {"lr_scheduler_type": "cosine"}'],
  ["metadata", "Metadata", 'As JSON: {"team": "blue"}'],
  ["integrations", "Integrations", 'As JSON: [{"type": "wandb", "wandb": {"project": "p"}}]'],
];
const TARGETS = ["all-linear", "q_proj, v_proj", "q_proj, k_proj, v_proj, o_proj"];

export function composeScreen(root, { signal, args: [source], go }) {
  const form = h("form", { class: "compose", novalidate: true, onsubmit: (event) => { event.preventDefault(); start(); } });
  const training = filePicker("training", "Training examples", "A .jsonl file: one chat, or one prompt and completion, per line.", signal);
  const validation = filePicker("validation", "Validation examples", "Optional; its loss is measured while training.", signal);
  const model = h("select", { id: "model", name: "model", onchange: drawChoices });
  const kind = h("select", { id: "kind", name: "kind", onchange: drawChoices }, METHODS.map(([value, label]) => h("option", { value }, label)));
  const beta = input(BETA);
  const shape = step("Adapter (LoRA)", h("div", { class: "fields" }, LORA.map(input), targets()));
  const more = h("details", { class: "card step" }, h("summary", null, h("h2", null, "More")), h("div", { class: "fields" }, MORE.map(input)), h("div", { class: "pickers" }, JSONS.map(area)));
  const said = h("div", { "aria-live": "polite" });
  const button = h("button", { type: "submit", class: "main" }, "Start training");
  form.append(
    step("Examples", h("div", { class: "pickers" }, training.node, validation.node)),
    step("Model", h("div", { class: "pickers" }, field("Start from", model, "model", "A model of your own goes on from where it is."), input(["suffix", "Name", "", "Becomes part of the model's name: letters, digits, '.', '_', '-'."]))),
    step("Training", h("div", { class: "fields" }, field("Method", kind, "kind", "What the examples are."), HYPER.map(input), beta)),
    shape, more, said, h("div", { class: "submit" }, button));
  const title = h("h1", null, "New job");
  show(root, h("header", { class: "head" }, title), form);
  drawChoices();

  const listed = list();
  listed.catch((error) => { if (error.name !== "AbortError") show(said, notice(error.message, { bad: true })); });

  async function list() {
    const [models, files, job] = await Promise.all([
      get("/v1/models", signal), get(path("/v1/files", { purpose: "fine-tune", limit: 100 }), signal),
      source ? get(`/v1/fine_tuning/jobs/${encodeURIComponent(source)}`, signal) : null,
    ]);
    const options = (wanted) => models.data.filter(wanted).map((each) => h("option", { value: each.id }, each.id));
    const own = options(isFineTuned).reverse();
    show(model, options((each) => !isFineTuned(each)), own.length ? h("optgroup", { label: "Your models" }, own) : null);
    training.offer(files.data);
    validation.offer(files.data);
    if (job) await fill(job);
  }

  function drawChoices() {
    shape.hidden = isFineTuned({ id: model.value });
    beta.hidden = kind.value !== "dpo";
  }

  // The settings of another job, to start it again or to change some.
  async function fill(job) {
    title.textContent = `New job like ${nameOf(job)}`;
    // A checkpoint is a model too, but not listed.
    if (![...model.options].some((option) => option.value === job.model)) model.append(h("option", { value: job.model }, job.model));
    for (const [name, value] of Object.entries(valuesOf(job))) form.elements[name].value = value ?? (HYPER.some(([hyper]) => hyper === name) ? "auto" : "");
    more.open = true;
    drawChoices();
    await Promise.all([training.choose(job.training_file), job.validation_file && validation.choose(job.validation_file)]);
  }

  async function start() {
    show(said);
    clearMarks(form);
    button.disabled = true;
    button.textContent = "Checking the examples…";
    try {
      const [examples, checks] = await Promise.all([training.file(), validation.file()]);
      if (!examples) { training.refuse("Choose a training file first."); return; }
      // Whoever is quicker than the list of models waits for it; where it failed, it is asked for again.
      await listed.catch(list);
      const job = await post("/v1/fine_tuning/jobs", bodyOf(form, examples, checks), { "Idempotency-Key": crypto.randomUUID?.() ?? String(Math.random()) });
      go(`#/jobs/${encodeURIComponent(job.id)}`);
    } catch (error) {
      if (error.name !== "AbortError") refuse(error);
    } finally {
      button.disabled = false;
      button.textContent = "Start training";
    }
  }

  // A problem is shown where it can be fixed: at the file, at the field, or above the button.
  function refuse(error) {
    const param = error.details?.param || "";
    if (/^(training_|validation_)?file$/.test(param) || fileProblems(error).length) {
      (param.startsWith("validation") ? validation : training).refuse(error.message, error);
      return;
    }
    const names = param.split(".").reverse().map((name) => ({ lora_alpha: "alpha", lora_dropout: "dropout" }[name] || name));
    const control = names.map((name) => form.querySelector(`[name="${CSS.escape(name)}"]`)).find(Boolean);
    if (!control) { show(said, notice(error.message, { bad: true })); return; }
    control.closest("details")?.setAttribute("open", "");
    control.setAttribute("aria-invalid", "true");
    control.closest(".field").append(h("p", { class: "wrong", role: "alert" }, error.message));
    control.focus();
  }
}

function bodyOf(form, training_file, validation_file) {
  const values = new FormData(form);
  const text = (name) => String(values.get(name) || "").trim();
  // What is no number goes as it was typed: the service says what would be right.
  const value = (name) => (text(name) === "" || text(name) === "auto" ? undefined : Number.isFinite(Number(text(name))) ? Number(text(name)) : text(name));
  const kind = text("kind");
  const hyper = Object.fromEntries([...HYPER, ...(kind === "dpo" ? [BETA] : [])].map(([name]) => [name, value(name) ?? "auto"]));
  const [{ adapter, ...settings } = {}, metadata, integrations] = JSONS.map(([name, label]) => jsonOf(text(name), name, label));
  const lora = { ...adapter, ...Object.fromEntries(LORA.map(([name]) => [name, value(name)]).filter(([, each]) => each !== undefined)) };
  const list = text("target_modules").split(",").map((name) => name.trim()).filter(Boolean);
  if (list.length) lora.target_modules = list.length === 1 && list[0].startsWith("all-") ? list[0] : list;
  return {
    model: text("model"), training_file, validation_file: validation_file || undefined, suffix: text("suffix") || undefined,
    method: { type: kind, [kind]: { hyperparameters: hyper } }, settings, metadata, integrations,
    // A model keeps the shape of its adapter.
    lora: isFineTuned({ id: text("model") }) || !Object.keys(lora).length ? undefined : lora,
    ...Object.fromEntries(MORE.map(([name]) => [name, value(name)])),
  };
}

function jsonOf(text, name, label) {
  if (!text) return undefined;
  try {
    const value = JSON.parse(text);
    if (value && typeof value === "object" && Array.isArray(value) === (name === "integrations")) return value;
  } catch { /* The sentence below says what is accepted. */ }
  throw new ApiError(`${label}: write JSON as in the example.`, 400, { param: name });
}

function clearMarks(form) {
  form.querySelectorAll(".wrong").forEach((node) => node.remove());
  form.querySelectorAll("[aria-invalid]").forEach((node) => node.removeAttribute("aria-invalid"));
}

function step(title, ...children) {
  return h("section", { class: "card step" }, h("h2", null, title), children);
}

function field(label, control, id, hint = "") {
  return h("div", { class: "field" }, h("label", { htmlFor: id }, label), control, hint ? h("p", { class: "hint", id: `${id}-hint` }, hint) : null);
}

function input([name, label, value, hint, blank = value]) {
  const control = h("input", { id: name, name, value, placeholder: blank, autocomplete: "off", spellcheck: false, inputMode: name === "suffix" ? "text" : "decimal", "aria-describedby": `${name}-hint` });
  return field(label, control, name, hint);
}

function area([name, label, hint]) {
  return field(label, h("textarea", { id: name, name, rows: 3, autocomplete: "off", spellcheck: false, "aria-describedby": `${name}-hint` }), name, hint);
}

function targets() {
  const list = h("datalist", { id: "targets" }, TARGETS.map((value) => h("option", { value })));
  const control = h("input", { id: "target_modules", name: "target_modules", value: TARGETS[0], placeholder: TARGETS[0], autocomplete: "off", "aria-describedby": "target_modules-hint" });
  control.setAttribute("list", "targets");
  return h("div", { class: "field wide" }, h("label", { htmlFor: "target_modules" }, "Target modules"), control, list, h("p", { class: "hint", id: "target_modules-hint" }, "all-linear, or names with commas."));
}

/** A place to drop or pick a file, or to take one that is there; `file()` waits until the service has it. */
function filePicker(kind, title, hint, signal) {
  let id = "";
  let local = null;
  let sent = Promise.resolve();
  const picker = h("input", { type: "file", id: `${kind}-file`, accept: ".jsonl", class: "unseen", onchange: () => { if (picker.files[0]) sent = take(picker.files[0]); } });
  const known = h("select", { "aria-label": `${title}: a file uploaded before`, hidden: true, onchange: () => { id = known.value; local = null; show(state, id ? h("p", { class: "ok" }, "Uploaded before and ready.") : null); } });
  const state = h("div", { class: "file-state", "aria-live": "polite" });
  const drop = h("label", { class: "drop", htmlFor: picker.id }, h("strong", null, title), h("span", null, hint), h("span", { class: "soft" }, "Drop it here or choose a file"));
  for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => { event.preventDefault(); if (event.dataTransfer.files[0]) sent = take(event.dataTransfer.files[0]); });

  async function take(file) {
    id = "";
    local = file;
    picker.value = "";
    known.value = "";
    if (!file.name.endsWith(".jsonl")) { refuse(`${file.name} is not a .jsonl file: one JSON object per line.`); return; }
    const bar = h("div");
    show(state, h("p", null, `${file.name}, ${bytes(file.size)}`), bar);
    const progress = (share) => show(bar, meter(share, "sent"), h("small", null, share < 1 ? `${Math.round(100 * share)} % sent` : "Checking…"));
    progress(0);
    try {
      const stored = await upload(file, progress, signal);
      if (local !== file) return; // Another one was chosen meanwhile.
      id = stored.id;
      show(state, h("p", { class: "ok" }, `${stored.filename} is uploaded (${bytes(stored.bytes)}).`));
    } catch (error) {
      if (error.name !== "AbortError" && local === file) refuse(error.message, error);
    }
  }

  /** Its id, or "" where none is chosen; one that was refused has said why. */
  async function file() {
    await sent;
    if (local && !id) throw new Error(`${local.name} was not taken; choose another file.`);
    return id;
  }

  async function refuse(message, error = null) {
    const problems = error ? fileProblems(error) : [];
    const lines = problems.some(({ line }) => line) ? await linesOf(local, new Set(problems.map(({ line }) => line))) : new Map();
    const rows = problems.slice(0, SHOWN_PROBLEMS).map(({ line, text }) => h("li", null,
      h("b", null, line ? `line ${line}` : "file"), h("span", null, text), lines.has(line) ? h("code", null, lines.get(line)) : null));
    const told = problems.length ? `${count(problems.length)} problem${problems.length > 1 ? "s" : ""} in the file; correct ${problems.length > 1 ? "them" : "it"} and drop it again.` : message;
    show(state, notice(told, { bad: true }), rows.length ? h("ol", { class: "problems" }, rows) : null);
    state.scrollIntoView({ block: "nearest" });
  }

  return {
    node: h("div", { class: "picker" }, picker, drop, known, state),
    file,
    refuse,
    /** Takes a file that was uploaded before. */
    async choose(wanted) {
      if (id || local) return; // The user was quicker.
      try {
        const file = await get(`/v1/files/${encodeURIComponent(wanted)}`, signal);
        if (![...known.options].some((option) => option.value === wanted)) known.append(option(file));
        known.hidden = false;
        known.value = wanted;
        known.dispatchEvent(new Event("change"));
      } catch (error) {
        if (error.name !== "AbortError") refuse(error.status === 404 ? "The file of that job has been deleted; choose another." : error.message);
      }
    },
    offer(files) {
      known.hidden = !files.length;
      show(known, h("option", { value: "" }, "or one uploaded before…"), files.map(option));
    },
  };
}

function option(file) {
  return h("option", { value: file.id }, `${file.filename} (${bytes(file.bytes)})`);
}

/** The beginnings of some lines of a file the user has just chosen. */
async function linesOf(file, wanted) {
  const found = new Map();
  if (!file || file.size > READABLE) return found;
  const text = await file.text();
  text.split("\n").forEach((line, i) => { if (wanted.has(i + 1)) found.set(i + 1, line.length > 160 ? `${line.slice(0, 160)}…` : line); });
  return found;
}
