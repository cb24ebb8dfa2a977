// Talk to an adapter, beside the model it was trained from.

import { chat, get } from "../api.js";
import { h, notice, show } from "../dom.js";
import { count } from "../format.js";
import { isFineTuned, shortModel } from "../training.js";

export function chatScreen(root, { signal, args: [wanted], go }) {
  const state = { turns: [], sides: [], stop: null };
  show(root, h("p", { class: "loading" }, "Loading…"));

  const select = h("select", { id: "chat-model", onchange: () => go(`#/chat/${encodeURIComponent(select.value)}`) });
  const beside = h("input", { type: "checkbox", id: "beside", checked: true, onchange: drawTurns });
  const system = h("input", { id: "system", placeholder: "none", autocomplete: "off" });
  const warmth = h("input", { id: "temperature", value: "0.7", inputMode: "decimal" });
  const most = h("input", { id: "max-tokens", value: "256", inputMode: "numeric" });
  const talk = h("div", { class: "talk", role: "log", "aria-label": "Conversation" });
  const text = h("textarea", { id: "prompt", rows: 2, placeholder: "Ask something", "aria-label": "Message", onkeydown: (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  } });
  const button = h("button", { type: "button", class: "main", onclick: () => (state.stop ? state.stop.abort() : send()) }, "Send");
  let models = [];

  (async () => {
    try {
      models = (await get("/v1/models", signal)).data;
    } catch (error) {
      if (error.name !== "AbortError") show(root, notice(error.message, { bad: true }));
      return;
    }
    const tuned = models.filter(isFineTuned).sort((a, b) => b.created - a.created);
    if (!tuned.length && !wanted) {
      show(root, h("h1", null, "Chat"), notice("No job has finished yet: train an adapter and talk to it here.", { action: h("a", { class: "button main", href: "#/new" }, "New job") }));
      return;
    }
    const names = [...new Set([...(wanted ? [wanted] : []), ...tuned.map(({ id }) => id)])];
    show(select, names.map((id) => h("option", { value: id, selected: id === (wanted || names[0]) }, shortModel(id))));
    show(root,
      h("header", { class: "head" }, h("h1", null, "Chat")),
      h("section", { class: "card chat-settings" },
        labelled("Adapter", select), h("label", { class: "tick", htmlFor: "beside" }, beside, "beside the base model"),
        labelled("System message", system), labelled("Temperature", warmth), labelled("Most tokens", most)),
      talk, h("div", { class: "card prompt" }, text, button));
    drawTurns();
    text.focus({ preventScroll: true });
  })();

  const model = () => select.value;
  const base = () => models.find(({ id }) => id === model())?.root || model().split(":")[1] || models.find((each) => !isFineTuned(each))?.id;

  function drawTurns() {
    talk.classList.toggle("two", beside.checked);
    if (!state.turns.length) { show(talk, h("p", { class: "hollow" }, `Say something to ${shortModel(model())}${beside.checked ? ` and to ${base()}, side by side` : ""}.`)); return; }
    show(talk, state.turns.map((turn) => h("div", { class: "turn" },
      h("p", { class: "said" }, turn.user),
      h("div", { class: "answers" }, turn.answers.map((answer) => answer.node)))));
  }

  function answerBox(name, isBase) {
    const body = h("p", { class: "answer-text" });
    const note = h("p", { class: "soft" }, "…");
    return { name, isBase, text: "", body, note, node: h("div", { class: isBase ? "answer base" : "answer" }, h("h3", null, isBase ? name : shortModel(name)), body, note) };
  }

  // Each side sees its own earlier answers, never the other's.
  function messages(isBase) {
    const before = state.turns.flatMap((turn) => {
      const answer = turn.answers.find((each) => each.isBase === isBase);
      return [{ role: "user", content: turn.user }, ...(answer?.text ? [{ role: "assistant", content: answer.text }] : [])];
    });
    return system.value.trim() ? [{ role: "system", content: system.value.trim() }, ...before] : before;
  }

  async function send() {
    const words = text.value.trim();
    if (!words || state.stop) return;
    text.value = "";
    const sides = [[model(), false], ...(beside.checked && base() !== model() ? [[base(), true]] : [])];
    const turn = { user: words, answers: [] };
    state.turns.push(turn);
    const asked = sides.map(([name, isBase]) => [answerBox(name, isBase), messages(isBase)]);
    turn.answers.push(...asked.map(([box]) => box));
    drawTurns();
    talk.lastElementChild.scrollIntoView({ block: "end" });
    state.stop = new AbortController();
    signal.addEventListener("abort", () => state.stop?.abort());
    button.textContent = "Stop";
    await Promise.all(asked.map(([box, said]) => answer(box, said)));
    state.stop = null;
    button.textContent = "Send";
    text.focus({ preventScroll: true });
  }

  async function answer(box, said) {
    const started = performance.now();
    try {
      const usage = await chat({ model: box.name, messages: said, temperature: Number(warmth.value) || 0, max_tokens: Math.max(1, Math.round(Number(most.value)) || 256) }, (piece) => {
        box.text += piece;
        box.body.textContent = box.text;
      }, state.stop.signal);
      const seconds = (performance.now() - started) / 1000;
      box.note.textContent = usage ? `${count(usage.completion_tokens)} token${usage.completion_tokens === 1 ? "" : "s"} in ${seconds.toFixed(1)} s` : "";
      if (!box.text) box.note.textContent = "It answered with nothing.";
    } catch (error) {
      box.note.textContent = error.name === "AbortError" ? "Stopped." : error.message;
      if (error.name !== "AbortError") box.node.classList.add("wrong");
    }
  }
}

function labelled(label, control) {
  return h("div", { class: "field" }, h("label", { htmlFor: control.id }, label), control);
}
