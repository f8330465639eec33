"""The page's style sheet and script."""

from __future__ import annotations

__all__ = ["SCRIPT", "STYLE"]

STYLE = """
:root { color-scheme: light dark; --page: #fcfcfa; --ink: #17191e; --soft: #5c626d; --line: #e4e4df; --faint: #f3f3ef;
  --accent: #2f5fde; --idle: #d3d4d1; --link: #b9bcc2; --lost: #d0342c;
  --c0: #2f5fde; --c1: #7a9bf0; --c2: #c9cdd6; --c3: #14806f; --c4: #79bfb0; --c5: #c2571a; --c6: #e59a5f;
  --c7: #edc9a0; --c8: #8a5cc7; --c9: #c78ae0; }
@media (prefers-color-scheme: dark) { :root { --page: #111317; --ink: #e6e8ec; --soft: #98a0ad; --line: #2a2e36;
  --faint: #191c22; --accent: #7ea2ff; --idle: #383d47; --link: #4b515d; --lost: #ff7a70;
  --c0: #5f86f2; --c1: #3f5cab; --c2: #565d6b; --c3: #2fa391; --c4: #1f6d61; --c5: #e07b3c; --c6: #a85a2b;
  --c7: #74452a; --c8: #a37fe0; --c9: #6d4a86; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 ui-sans-serif, system-ui, -apple-system,
  "Segoe UI", Roboto, "Helvetica Neue", sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1120px; margin: 0 auto; padding: 48px 32px 80px; }
h1 { margin: 0; font-size: 34px; line-height: 1.15; font-weight: 650; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { margin: 56px 0 4px; font-size: 19px; font-weight: 640; letter-spacing: -.01em; }
h3 { margin: 28px 0 6px; font-size: 14px; font-weight: 640; }
p { margin: 4px 0 14px; color: var(--soft); max-width: 84ch; }
.lead { margin: 8px 0 0; font-size: 16px; max-width: none; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(108px, 1fr)); gap: 22px 20px; margin: 34px 0 0;
  padding: 22px 0; border: solid var(--line); border-width: 1px 0; }
.facts dt { color: var(--soft); font-size: 12.5px; }
.facts dd { margin: 0; font-size: 22px; font-weight: 600; letter-spacing: -.015em; white-space: nowrap; }
.facts small { display: block; font-size: 12.5px; font-weight: 400; letter-spacing: 0; color: var(--soft); }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 12px 32px; }
.row > * { min-width: 0; }
.wide { overflow-x: auto; padding: 2px 0 8px; }
.wide svg { display: block; }
.chart { display: block; width: 100%; height: auto; overflow: visible; touch-action: pan-y; }
.wide .chart { min-width: 640px; overflow: hidden; }
.chart text { font-size: 11px; fill: var(--soft); }
.grid { stroke: var(--line); fill: none; }
.line { fill: none; stroke: var(--accent); stroke-width: 1.8; stroke-linejoin: round; }
.faint { opacity: .35; stroke-width: 1; }
.dot { fill: var(--accent); }
.at, .cross { visibility: hidden; pointer-events: none; }
.cross { stroke: var(--soft); stroke-dasharray: 2 3; }
.lost { stroke: var(--lost); stroke-width: 1.5; }
.none { padding: 28px 0; font-style: italic; }
#tip { position: fixed; top: 0; left: 0; z-index: 1; pointer-events: none; visibility: hidden; padding: 3px 9px;
  border-radius: 5px; background: var(--ink); color: var(--page); font-size: 12.5px; white-space: nowrap; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { padding: 6px 22px 6px 0; border-bottom: 1px solid var(--line); color: var(--soft); font-weight: 500;
  font-size: 12.5px; text-align: left; vertical-align: bottom; white-space: nowrap; }
td { padding: 5px 22px 5px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
.total td { font-weight: 640; }
.n { text-align: right; }
td.bar { width: 30%; min-width: 110px; padding-right: 0; }
.bar i { display: block; height: 8px; border-radius: 2px; min-width: 1px; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 9px; vertical-align: -1px; }
.stack { display: flex; height: 26px; margin: 12px 0 14px; gap: 1px; border-radius: 5px; overflow: hidden; }
.stack i { min-width: 1px; }
.fit { max-width: 100%; height: auto; }
.torus .link { stroke: var(--link); stroke-width: 1.3; fill: none; }
.torus .hop { stroke: var(--ink); stroke-width: 2.2; }
.torus .wrap { stroke-dasharray: 3 3; }
.torus .chip, .torus .idle { stroke: var(--page); stroke-width: 2; }
.torus .idle { fill: var(--idle); }
.torus text { text-anchor: middle; }
.torus .axis { fill: var(--soft); font-size: 12px; font-style: italic; }
.torus .arrow { stroke: var(--soft); fill: none; }
.torus .in { fill: #fff; font-size: 12px; font-weight: 650; }
.torus .by { text-anchor: start; fill: var(--soft); font-size: 11px; paint-order: stroke;
  stroke: var(--page); stroke-width: 3px; }
.said { min-width: 60px; max-width: 46ch; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.cut { display: block; color: var(--soft); font-size: 11.5px; font-style: italic; }
details { margin: 18px 0 0; border-top: 1px solid var(--line); padding: 12px 0 0; }
summary { cursor: pointer; font-weight: 600; font-size: 14px; }
summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; border-radius: 2px; }
pre { margin: 12px 0 0; padding: 16px 18px; border-radius: 8px; background: var(--faint); overflow-x: auto;
  font: 12.5px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
@media (max-width: 640px) { main { padding: 28px 18px 56px; } h1 { font-size: 27px; } }
@media print { main { max-width: none; padding: 0; } }
"""

SCRIPT = """
const tip = document.getElementById("tip");
for (const chart of document.querySelectorAll(".chart")) {
  const points = JSON.parse(chart.dataset.points);
  const cross = chart.querySelector(".cross"), dot = chart.querySelector(".at");
  const show = on => { for (const part of [cross, dot, tip]) part.style.visibility = on ? "visible" : "hidden"; };
  chart.addEventListener("pointermove", event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse()).x;
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if ((points[middle][0] + points[middle + 1][0]) / 2 < at) low = middle + 1; else high = middle;
    }
    const [x, y, words] = points[low];
    cross.setAttribute("transform", `translate(${x} 0)`);
    dot.setAttribute("cx", x);
    dot.setAttribute("cy", y);
    tip.textContent = words;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    tip.style.transform = `translate(${left}px, ${Math.max(event.clientY - 36, 4)}px)`;
    show(true);
  });
  chart.addEventListener("pointerleave", () => show(false));
}
"""
