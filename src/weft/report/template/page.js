"use strict";
document.addEventListener("plotly", () => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const names = Object.keys(figures);
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const isNarrow = () => matchMedia("(max-width: 760px)").matches;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // The colours of the background, for every axis a figure has.
  function theme(name) {
    const look = {
      // Not transparent: plotly takes that for white and draws a white halo around the hover line.
      "paper_bgcolor": css("--card"),
      "plot_bgcolor": css("--card"),
      "font.color": css("--soft"),
      "font.family": getComputedStyle(document.body).fontFamily,
      "font.size": isNarrow() ? 11 : 12,
      "hoverlabel.bgcolor": css("--card"),
      "hoverlabel.bordercolor": css("--line"),
      "hoverlabel.font.color": css("--ink"),
    };
    for (const axis of Object.keys(figures[name].layout).filter((key) => /^[xy]axis/.test(key))) {
      look[axis + ".gridcolor"] = css("--grid");
      look[axis + ".linecolor"] = css("--line");
      look[axis + ".tickcolor"] = css("--line");
    }
    look["xaxis.showgrid"] = false;
    look["xaxis.spikecolor"] = css("--soft");
    return look;
  }

  function draw(name) {
    const { data, layout } = figures[name];
    // On a touch screen a drag scrolls the page.
    Object.assign(layout, { autosize: true, dragmode: isTouch ? false : "zoom" });
    const config = { displayModeBar: false, responsive: true, displaylogo: false };
    Plotly.newPlot(name, data, layout, config).then(() => Plotly.relayout(name, theme(name)));
  }
  names.forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    names.forEach((name) => Plotly.relayout(name, theme(name))));

  for (const button of document.querySelectorAll("[data-log]")) {
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", on);
      Plotly.relayout(button.dataset.log, { "yaxis.type": on ? "log" : "linear", "yaxis.autorange": true });
    });
  }

  // A click hides or shows a job in all charts; a double click shows it alone, or all again.
  const chips = [...document.querySelectorAll(".chip")];
  const isOn = (chip) => chip.getAttribute("aria-pressed") === "true";
  function showJobs() {
    const on = new Set(chips.filter(isOn).map((chip) => Number(chip.dataset.job)));
    for (const name of names) {
      const owned = figures[name].data.map((trace, i) => [trace.meta && trace.meta.job, i]).filter(([job]) => job !== undefined);
      if (owned.length) Plotly.restyle(name, { visible: owned.map(([job]) => on.has(job)) }, owned.map(([, i]) => i));
    }
  }
  for (const chip of chips) {
    chip.addEventListener("click", () => {
      chip.setAttribute("aria-pressed", !isOn(chip));
      showJobs();
    });
    chip.addEventListener("dblclick", () => {
      // The two clicks before have left the chip as it was.
      const isAlone = isOn(chip) && chips.every((other) => other === chip || !isOn(other));
      chips.forEach((other) => other.setAttribute("aria-pressed", isAlone || other === chip));
      showJobs();
    });
  }

  const table = document.querySelector(".jobs");
  function sortKey(body, by) {
    if (by === "name") return Number(body.dataset.job);
    if (by === "state") return body.querySelector(".badge").textContent;
    const key = body.querySelectorAll(".number")[Number(by)].dataset.key;
    return key === "" ? Infinity : Number(key);
  }
  for (const button of table.querySelectorAll("[data-sort]")) {
    button.addEventListener("click", () => {
      const head = button.closest("th");
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      table.querySelectorAll("[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const keyed = [...table.tBodies].map((body) => [sortKey(body, button.dataset.sort), body]);
      keyed.sort(([a], [b]) => (a < b ? -sign : a > b ? sign : 0));
      table.append(...keyed.map(([, body]) => body));
    });
  }
});
