/**
 * Drawing, at most once a frame however much happens: a burst of changes costs what its last state
 * costs. And the moment at which a frame was on the screen, for who measures.
 */

/** @type {Set<() => void>} */
const drawings = new Set();
/** @type {((now: number) => void)[]} */
let painted = [];
let isAsked = false;

/** Have this drawn with the next frame. @param {() => void} draw */
export function draw(draw) {
  drawings.add(draw);
  ask();
}

/** Hear, once, when what is drawn next is on the screen. @param {(now: number) => void} heard */
export function whenPainted(heard) {
  painted.push(heard);
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

// A message sent inside a frame is received behind its painting.
const after = new MessageChannel();
after.port1.onmessage = () => {
  const [heard, now] = [painted, Date.now()];
  painted = [];
  for (const each of heard) each(now);
};
