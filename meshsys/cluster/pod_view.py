"""The style and script of the picture of a pod: chips in space that can be turned, at any recorded moment."""

from __future__ import annotations

__all__ = ["POD_SCRIPT", "POD_STYLE"]

POD_STYLE = """
.names { margin: 8px 0 2px; font-size: 12.5px; } .names span { margin-right: 18px; white-space: nowrap; }
.pod p { display: flex; gap: 14px; align-items: center; max-width: none; flex-wrap: wrap; }
.pod input { flex: 1; min-width: 160px; accent-color: var(--accent); }
.pod select { font: inherit; color: inherit; background: var(--faint); border: 1px solid var(--line);
  border-radius: 5px; padding: 3px 6px; }
.pod output { font-size: 13.5px; min-width: 22em; }
.pod canvas { display: block; width: 100%; height: 620px; touch-action: none; cursor: grab; }
"""

POD_SCRIPT = """
const pods = document.getElementById("pods");
if (pods) {
  const {dims, shown, policies} = JSON.parse(pods.textContent);
  const box = document.querySelector(".pod"), canvas = box.querySelector("canvas"), pen = canvas.getContext("2d");
  const choice = box.querySelector("select"), slider = box.querySelector("input"), words = box.querySelector("output");
  let yaw = shown > 2 ? 0.6 : 0, tilt = shown > 2 ? 0.5 : 0, codes, moment, drawn = [];
  const decode = text => {
    const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
    return new Uint16Array(bytes.buffer);
  };
  const colour = job => `hsl(${(job * 137.5) % 360} ${50 + (job * 7) % 25}% ${46 + (job * 5) % 14}%)`;
  const draw = () => {
    const style = getComputedStyle(document.documentElement), ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const reach = Math.hypot(...dims.map(size => size - 1)) + 1.5;
    const unit = shown > 2 ? Math.min(width, height) / reach : Math.min(width / (dims[0] + 1), height / (dims[1] + 1));
    const [sy, cy, st, ct] = [Math.sin(yaw), Math.cos(yaw), Math.sin(tilt), Math.cos(tilt)];
    drawn = [];
    for (let chip = 0; chip < codes.length; chip++) {
      const at = [Math.floor(chip / (dims[1] * dims[2])), Math.floor(chip / dims[2]) % dims[1], chip % dims[2]];
      const [x, y, z] = at.map((place, dim) => place - (dims[dim] - 1) / 2);
      const across = x * cy + y * sy, deep = y * cy - x * sy;
      const [up, depth] = shown > 2 ? [z * ct + deep * st, deep * ct - z * st] : [-y, 0];
      drawn.push([width / 2 + across * unit, height / 2 - up * unit, depth, codes[chip], at]);
    }
    drawn.sort((a, b) => b[2] - a[2]);
    for (const [x, y, depth, code] of drawn) {
      const radius = unit * (code > 1 ? 0.34 : 0.09) * (1 - 0.12 * depth / reach);
      pen.beginPath();
      pen.arc(x, y, Math.max(radius, 0.8), 0, 7);
      pen.fillStyle = code > 1 ? colour(moment.jobs[code - 2][0]) : style.getPropertyValue(code ? "--idle" : "--lost");
      pen.fill();
      if (!code) {
        pen.strokeStyle = style.getPropertyValue("--lost");
        pen.strokeRect(x - 0.2 * unit, y - 0.2 * unit, 0.4 * unit, 0.4 * unit);
      }
    }
  };
  const show = () => {
    moment = policies[choice.value].moments[slider.value];
    codes = decode(moment.chips);
    const part = (100 * moment.used / codes.length).toFixed(1);
    words.textContent = `hour ${moment.hours.toLocaleString()}: ${moment.jobs.length} jobs on ${part}% of the chips`;
    draw();
  };
  const choose = () => {
    const moments = policies[choice.value].moments;
    const hours = moment ? moment.hours : moments[moments.length >> 1].hours;
    slider.max = moments.length - 1;
    slider.value = Math.max(0, moments.findLastIndex(each => each.hours <= hours));
    show();
  };
  choice.addEventListener("change", choose);
  slider.addEventListener("input", show);
  addEventListener("resize", draw);
  let held = null;
  canvas.addEventListener("pointerdown", event => {
    held = [event.clientX, event.clientY, yaw, tilt];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointerleave", () => { tip.style.visibility = "hidden"; });
  canvas.addEventListener("pointermove", event => {
    if (held && shown > 2) {
      yaw = held[2] + (event.clientX - held[0]) / 160;
      tilt = Math.max(-1.57, Math.min(1.57, held[3] + (event.clientY - held[1]) / 160));
      draw();
      return;
    }
    const frame = canvas.getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
    const near = drawn.findLast(each => Math.hypot(each[0] - x, each[1] - y) < 7);
    tip.style.visibility = near ? "visible" : "hidden";
    if (near) {
      const job = near[3] > 1 ? moment.jobs[near[3] - 2] : null;
      const state = near[3] ? "free" : "failed";
      tip.textContent = `(${near[4].slice(0, shown).join(", ")}): ${job ? `job ${job[0]}, ${job[1]}` : state}`;
      const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
      tip.style.transform = `translate(${left}px, ${Math.max(event.clientY - 36, 4)}px)`;
    }
  });
  choose();
}
"""
