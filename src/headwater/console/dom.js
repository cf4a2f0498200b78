/** Makes elements without markup: no text from a database is parsed as HTML. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. Properties that begin with `on` are listeners, `class` and the rest are attributes;
 * children are elements, texts, or lists of them; null and false are nothing.
 *
 * @param {string} tag
 * @param {Record<string, any>} [properties]
 * @param {...any} children
 * @returns {any}
 */
export function h(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** The same, of an SVG. @param {string} tag @param {Record<string, any>} [properties] @param {...any} children */
export function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

/** @param {Element} element @param {Record<string, any>} properties @param {any[]} children */
function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...flat(children));
  return element;
}

/** @param {any[]} children @returns {any[]} */
function flat(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

/** Replace the children of an element. @param {Element} element @param {...any} children */
export function fill(element, ...children) {
  element.replaceChildren(...flat(children));
}

/** Set a text only if it differs, so that a selection in it stays. @param {Node} node @param {string} text */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A page's head. @param {string} title @param {any} words */
export function head(title, words) {
  return h("header", { class: "head" }, h("h1", {}, title), words && h("p", {}, words));
}

/** @param {string | null} title @param {...any} children */
export function card(title, ...children) {
  return h("section", { class: "card" }, title && h("header", {}, h("h2", {}, title)), children);
}

/** An error with its hint. @param {{message: string, hint?: string}} error */
export function errorNote(error) {
  return h(
    "div",
    { class: "note bad", role: "alert" },
    h("p", {}, sentence(error.message)),
    error.hint && h("p", { class: "hint" }, error.hint),
  );
}

/** @param {string} text */
function sentence(text) {
  return text ? text[0].toUpperCase() + text.slice(1) : "Unknown error";
}

/** A labelled field. @param {string} name @param {any} field @param {string} [kind] */
export function labelled(name, field, kind = "") {
  return h("label", { class: `field ${kind}` }, name, field);
}
