"use strict";
// Unpacks plotly, which the page carries compressed, and then lets the charts begin.
(async () => {
  const packed = document.getElementById("plotly");
  const bytes = Uint8Array.from(atob(packed.textContent), (character) => character.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  document.head.append(script);
  packed.remove();
  document.dispatchEvent(new Event("plotly"));
})().catch((error) => {
  for (const chart of document.querySelectorAll(".chart")) {
    chart.textContent = "This browser cannot draw the charts (" + error.message + "); one of 2023 or later can.";
  }
});
