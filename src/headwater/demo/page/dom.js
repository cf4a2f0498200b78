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

/** Write a text only where it is another: the rest of the page need not be looked at again. */
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Set a class or take it away. */
export const mark = (node, name, on) => node.classList.toggle(name, Boolean(on));

/** Whether things may move about. */
const still = matchMedia("(prefers-reduced-motion: reduce)");
export const mayMove = () => !still.matches;

/** Call `work` once, `ms` after the last time it was asked for. */
export function soon(ms, work) {
  let timer;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(work, ms);
  };
}

const SAID_MS = 4000;
let said;

/** Tell the visitor something, for a while. @param {string} text */
export function say(text) {
  const note = byId("note");
  write(note, text);
  mark(note, "shown", true);
  clearTimeout(said);
  said = setTimeout(() => mark(note, "shown", false), SAID_MS);
}

/** Tell the visitor what went wrong. @param {Error & {hint?: string}} error */
export function complain({ message, hint }) {
  say(hint ? `${message}. ${hint}` : message);
}
