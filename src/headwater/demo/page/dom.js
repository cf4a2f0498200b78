/** Elements, made in one line. */

/**
 * @param {string} tag with classes, as in "span.pill"
 * @param {Record<string, string> | string | null} [attributes] attributes, or the text inside
 * @param {...(Node | string)} children
 */
export function element(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const made = document.createElement(name);
  if (classes.length) made.className = classes.join(" ");
  if (typeof attributes === "string") made.textContent = attributes;
  else for (const key in attributes ?? {}) made.setAttribute(key, attributes[key]);
  made.append(...children);
  return made;
}

/** The element with that id. @param {string} id @returns {any} */
export const byId = (id) => document.getElementById(id);

/** Set a text only if it differs, so that the browser lays out nothing else. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Add or remove a class. */
export const toggleClass = (node, name, on) => node.classList.toggle(name, Boolean(on));

const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
/** Whether the visitor's settings allow animations. */
export const allowsMotion = () => !reducedMotion.matches;

/** A function that calls `work` once, `ms` after its own last call. */
export function debounce(ms, work) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(work, ms);
  };
}

const NOTE_MS = 4000;
let noteTimer;

/** Show a note to the visitor for a while. @param {string} text */
export function showNote(text) {
  const note = byId("note");
  setText(note, text);
  toggleClass(note, "shown", true);
  clearTimeout(noteTimer);
  noteTimer = setTimeout(() => toggleClass(note, "shown", false), NOTE_MS);
}

/** Show an error to the visitor. @param {Error & {hint?: string}} error */
export function showError({ message, hint }) {
  showNote(hint ? `${message}. ${hint}` : message);
}
