/**
 * Draws at most once a frame: a burst of changes costs no more than its last state. Also reports when
 * a frame was painted, for the latency measurement.
 */

/** @type {Set<() => void>} */
const drawings = new Set();
/** @type {((now: number) => void)[]} */
let painted = [];
let isAsked = false;

/** Call a function in the next frame. @param {() => void} draw */
export function draw(draw) {
  drawings.add(draw);
  ask();
}

/** Call a function once, after the next frame was painted. @param {(now: number) => void} listener */
export function whenPainted(listener) {
  painted.push(listener);
  ask();
}

function ask() {
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(frame);
}

function frame() {
  isAsked = false;
  const due = [...drawings];
  drawings.clear();
  for (const each of due) each();
  if (painted.length) after.port2.postMessage(null);
}

// A message that is posted inside a frame arrives after it was painted.
const after = new MessageChannel();
after.port1.onmessage = () => {
  const [listeners, now] = [painted, Date.now()];
  painted = [];
  for (const listener of listeners) listener(now);
};
