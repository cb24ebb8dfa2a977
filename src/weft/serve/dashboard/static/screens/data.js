// The tenant's files and models: how large they are, what can be done with them, and deleting.

import { action, saving } from "../actions.js";
import { get, patience, remove } from "../api.js";
import { h, notice, repeat, searchBox, show, table, tile, toast } from "../dom.js";
import { ago, bytes, count, when } from "../format.js";
import { isFineTuned, shortModel } from "../training.js";

const MOST = 1000;
const PURPOSES = { "fine-tune": "examples", "fine-tune-results": "results of a job" };

export function dataScreen(root, { signal }) {
  const search = searchBox("Search files and models", draw);
  const [tiles, files, models] = [h("section", { class: "tiles" }), h("div"), h("div")];
  const lists = {
    files: { path: `/v1/files?limit=${MOST}`, node: files, draw: drawFiles },
    models: { path: "/v1/models", node: models, draw: drawModels },
  };
  show(root, h("header", { class: "head" }, h("h1", null, "Files and models"), search.node), tiles, h("h2", null, "Files"), files, h("h2", null, "Models"), models);
  for (const { node } of Object.values(lists)) show(node, h("p", { class: "loading" }, "Loading…"));

  // A key may be allowed to see one of the two only.
  async function refresh() {
    const waits = await Promise.all(Object.values(lists).map(async (list) => {
      try {
        Object.assign(list, { answer: await get(list.path, signal), error: null });
      } catch (error) {
        if (error.name === "AbortError") return undefined;
        list.error = error;
        return patience(error);
      }
      return undefined;
    }));
    if (!signal.aborted) draw();
    return waits.find(Boolean);
  }

  function draw() {
    show(tiles, Object.entries(lists).filter(([, { answer }]) => answer).map(([name, { answer }]) => {
      const own = answer.data.filter((each) => each.bytes !== undefined);
      return tile(name, bytes(own.reduce((sum, each) => sum + each.bytes, 0)), `${answer.has_more ? "the newest " : ""}${count(own.length)} ${name}`);
    }));
    for (const { answer, error, node, draw: fill } of Object.values(lists)) {
      if (answer) show(node, fill(answer.data));
      else if (error) show(node, notice(error.message, { bad: true }));
    }
  }

  function drawFiles(all) {
    const rows = all.filter((file) => search.matches(file.filename, file.id, PURPOSES[file.purpose])).map((file) => [
      [[file.filename, h("small", null, h("code", null, file.id))], "name"],
      [PURPOSES[file.purpose] || file.purpose, "soft"], [bytes(file.bytes), "number"],
      [[ago(file.created_at), file.expires_at ? h("small", null, `until ${when(file.expires_at)}`) : null], "soft"],
      [h("div", { class: "actions" }, saving("Download", `/v1/files/${file.id}/content`, file.filename),
        deleting(`/v1/files/${file.id}`, file.filename, `Delete ${file.filename}? Jobs that were created with it go on.`)), "wide"],
    ]);
    return listed("Files, newest first", ["file", "what", "size", "uploaded", ""], rows, all.length, "No file has been uploaded yet.");
  }

  function drawModels(all) {
    const own = all.filter(isFineTuned).sort((a, b) => b.created - a.created);
    const rows = own.filter((model) => search.matches(model.id, model.job)).map((model) => {
      const place = `/v1/models/${model.id}`;
      return [
        [[shortModel(model.id), h("small", null, h("code", null, model.id))], "name"],
        [model.root, "soft"], [bytes(model.bytes), "number"], [ago(model.created), "soft"],
        [h("div", { class: "actions" }, h("a", { class: "button", href: `#/chat/${encodeURIComponent(model.id)}` }, "Try it"),
          h("a", { class: "button", href: `#/jobs/${encodeURIComponent(model.job)}` }, "Job"), saving("Download", `${place}/adapter`, `${shortModel(model.id)}.zip`),
          deleting(place, model.id, `Delete ${model.id}? The checkpoints of its job go with it.`)), "wide"],
      ];
    });
    return listed("Models, newest first", ["model", "base", "size", "made", ""], rows, own.length, "No job has made a model yet.");
  }

  function listed(caption, heads, rows, number, empty) {
    if (!rows.length) return notice(number ? `None of them matches "${search.node.value.trim()}".` : empty);
    return h("section", { class: "card table-card" }, table(caption, heads, rows));
  }

  function deleting(from, name, question) {
    return action("Delete", async () => {
      if (!confirm(question)) return;
      await remove(from);
      toast(`${name} is deleted.`);
      await refresh();
    }, { class: "danger", data: { deletes: from }, "aria-label": `Delete ${name}` });
  }

  return repeat(refresh, 10, signal);
}
