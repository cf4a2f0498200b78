/**
 * How long a change takes from its write in the database to the screen: the median and the 95th
 * percentile of the last 200, and their course. The database and this browser share a clock.
 */

import { byId, write } from "./dom.js";
import { whenPainted } from "./frames.js";

const KEPT = 200;
/** With fewer than this, the course does not fill its place. */
const AT_LEAST = 40;
const SHOW_EVERY_MS = 400;
const [WIDTH, HEIGHT] = [120, 28];

/** In milliseconds, the oldest first. @type {number[]} */
const taken = [];
let isDue = false;

/** How often the page came to the front, or went. */
let turns = 0;
document.addEventListener("visibilitychange", () => (turns += 1));

/** A change of that time was received; the next frame shows it. @param {string | null} at */
export function received(at) {
  // A page in the background is not painted: there is nothing to measure.
  if (!at || document.hidden) return;
  const turn = turns;
  whenPainted((now) => {
    if (turn === turns) took(Math.max(0, now - Date.parse(at)));
  });
}

/** @param {number} ms */
function took(ms) {
  taken.push(ms);
  if (taken.length > KEPT) taken.shift();
  if (isDue) return;
  isDue = true;
  setTimeout(show, SHOW_EVERY_MS);
}

function show() {
  isDue = false;
  const sorted = taken.toSorted((a, b) => a - b);
  const share = (part) => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * part))];
  write(byId("p50"), `${share(0.5)} ms`);
  write(byId("p95"), `${share(0.95)} ms`);
  drawCourse(Math.max(24, share(0.95) * 1.6));
}

/** @param {number} top what the upper edge stands for */
function drawCourse(top) {
  const step = WIDTH / (Math.max(taken.length, AT_LEAST) - 1);
  const from = Math.max(0, AT_LEAST - taken.length);
  const points = taken.map((ms, i) => {
    const y = HEIGHT - 2 - (Math.min(ms, top) / top) * (HEIGHT - 4);
    return `${((from + i) * step).toFixed(1)},${y.toFixed(1)}`;
  });
  const line = `M${points.join("L")}`;
  const [area, course] = byId("latency").querySelectorAll("path");
  course.setAttribute("d", line);
  area.setAttribute("d", `${line}L${WIDTH},${HEIGHT}L${(from * step).toFixed(1)},${HEIGHT}Z`);
}
