/**
 * The time from a write in the database to the painted page: the median and the 95th percentile of
 * the last 200 changes, and a plot of them. The database and this browser share a clock.
 */

import { byId, setText } from "./dom.js";
import { whenPainted } from "./frames.js";

const CHANGES_MAX = 200;
/** With fewer than this, the plot does not fill its width. */
const AT_LEAST = 40;
const SHOW_EVERY_MS = 400;
const [WIDTH, HEIGHT] = [120, 28];

/** In milliseconds, the oldest first. @type {number[]} */
const latencies = [];
let isDue = false;

/** How often the page was shown or hidden. */
let visibilityChanges = 0;
document.addEventListener("visibilitychange", () => (visibilityChanges += 1));

/** A change that was committed at this time was received; the next frame shows it. @param {string | null} at */
export function received(at) {
  // A page in the background is not painted: there is nothing to measure.
  if (!at || document.hidden) return;
  const before = visibilityChanges;
  whenPainted((now) => {
    if (before === visibilityChanges) measured(Math.max(0, now - Date.parse(at)));
  });
}

/** @param {number} ms */
function measured(ms) {
  latencies.push(ms);
  if (latencies.length > CHANGES_MAX) latencies.shift();
  if (isDue) return;
  isDue = true;
  setTimeout(show, SHOW_EVERY_MS);
}

function show() {
  isDue = false;
  const sorted = latencies.toSorted((a, b) => a - b);
  const share = (part) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * part))];
  setText(byId("p50"), `${share(0.5)} ms`);
  setText(byId("p95"), `${share(0.95)} ms`);
  drawPlot(Math.max(24, share(0.95) * 1.6));
}

/** @param {number} top the value at the upper edge */
function drawPlot(top) {
  const step = WIDTH / (Math.max(latencies.length, AT_LEAST) - 1);
  const from = Math.max(0, AT_LEAST - latencies.length);
  const points = latencies.map((ms, i) => {
    const y = HEIGHT - 2 - (Math.min(ms, top) / top) * (HEIGHT - 4);
    return `${((from + i) * step).toFixed(1)},${y.toFixed(1)}`;
  });
  const line = `M${points.join("L")}`;
  const [area, course] = byId("latency").querySelectorAll("path");
  course.setAttribute("d", line);
  area.setAttribute("d", `${line}L${WIDTH},${HEIGHT}L${(from * step).toFixed(1)},${HEIGHT}Z`);
}
