"use strict";
document.addEventListener("plotly", () => {
  const charts = [...document.querySelectorAll(".chart")];
  const buttons = new Map([...document.querySelectorAll("[data-pick]")].map((button) => [Number(button.dataset.pick), button]));
  const unpick = document.querySelector(".unpick");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let picked = null;

  // All points of one trial in one chart, whichever traces hold them.
  function pointsOf(chart, trial) {
    const x = [], y = [];
    for (const trace of chart.data) {
      if (trace.meta && trace.meta.picked) continue;
      (trace.customdata || []).forEach((owner, i) => {
        if (owner === trial) { x.push(trace.x[i]); y.push(trace.y[i]); }
      });
    }
    return { x, y };
  }

  function show(chart) {
    const place = chart.data.findIndex((trace) => trace.meta && trace.meta.picked);
    const { x, y } = picked === null ? { x: [], y: [] } : pointsOf(chart, picked);
    const look = { "line.color": css("--ink"), "line.width": 2.4, "marker.color": css("--ink"), "marker.size": 5 };
    Plotly.restyle(chart, { x: [x], y: [y], ...look }, [place]);
  }

  function pick(trial) {
    picked = trial === picked ? null : trial;
    for (const [owner, button] of buttons) {
      button.setAttribute("aria-pressed", owner === picked);
      button.closest("tbody").classList.toggle("picked", owner === picked);
    }
    if (unpick) {
      unpick.hidden = picked === null;
      unpick.textContent = picked === null ? "" : buttons.get(picked).textContent + " ✕";
    }
    charts.forEach(show);
  }

  for (const [trial, button] of buttons) button.addEventListener("click", () => pick(trial));
  for (const chart of charts) {
    chart.on("plotly_click", ({ points }) => {
      const owner = points[0] && points[0].customdata;
      if (Number.isInteger(owner)) pick(owner);
    });
  }
  if (unpick) unpick.addEventListener("click", () => pick(picked));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && picked !== null) pick(picked);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(show));
});
