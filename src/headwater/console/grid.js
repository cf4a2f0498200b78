/**
 * A table that is updated row by row: a cell is changed only if its content differs. Columns with a
 * `by` can be sorted.
 *
 * @typedef {object} Column
 * @property {string} name
 * @property {(row: any) => any} show a text, or elements made with `h`
 * @property {(row: any) => any} [by]
 * @property {boolean} [number]
 */

import { fill, h, setText } from "./dom.js";

export class Grid {
  /** @type {Map<string, {element: any, cells: any[]}>} */
  #shown = new Map();
  /** @type {any[]} */
  #rows = [];
  #columns;
  #key;
  #sort;
  #body = h("tbody");
  #empty;

  /**
   * @param {string} caption
   * @param {Column[]} columns
   * @param {{key: (row: any) => string, empty?: any, sort?: [number, number]}} options `sort` is a
   *   column and 1 or -1
   */
  constructor(caption, columns, { key, empty = "Nothing yet.", sort }) {
    this.#columns = columns;
    this.#key = key;
    this.#sort = sort;
    this.#empty = h("p", { class: "empty" }, empty);
    this.head = h("tr");
    this.table = h(
      "table",
      { class: "stacked" },
      h("caption", { class: "hidden" }, caption),
      h("thead", {}, this.head),
      this.#body,
    );
    this.element = h("div", {}, this.table, this.#empty);
    this.#title();
    this.update([]);
  }

  #title() {
    fill(this.head, this.#columns.map((column, i) => {
      const sorted = this.#sort?.[0] === i && (this.#sort[1] < 0 ? "descending" : "ascending");
      const name = column.by
        ? h("button", { type: "button", onclick: () => this.#sortBy(i) }, column.name)
        : column.name;
      return h("th", { scope: "col", class: column.number && "number", "aria-sort": sorted }, name);
    }));
  }

  /** @param {number} column */
  #sortBy(column) {
    const first = this.#columns[column].number ? -1 : 1;
    const before = this.#sort;
    this.#sort = before?.[0] === column ? [column, -before[1]] : [column, first];
    this.#title();
    this.head.children[column].querySelector("button")?.focus();
    this.update(this.#rows);
  }

  /** Show these rows. @param {readonly any[]} rows */
  update(rows) {
    this.#rows = [...rows];
    const gone = new Set(this.#shown.keys());
    let place = this.#body.firstElementChild;
    for (const row of this.#sorted()) {
      const key = this.#key(row);
      gone.delete(key);
      const { element } = this.#show(key, row);
      if (element === place) place = place.nextElementSibling;
      else this.#body.insertBefore(element, place);
    }
    for (const key of gone) {
      this.#shown.get(key)?.element.remove();
      this.#shown.delete(key);
    }
    this.table.hidden = !rows.length;
    this.#empty.hidden = rows.length > 0;
  }

  #sorted() {
    if (!this.#sort) return this.#rows;
    const [column, direction] = this.#sort;
    const by = this.#columns[column].by ?? this.#columns[column].show;
    return this.#rows.sort((a, b) => direction * compare(by(a), by(b)));
  }

  /** @param {string} key @param {any} row */
  #show(key, row) {
    let shown = this.#shown.get(key);
    if (!shown) {
      const cells = this.#columns.map((column) =>
        h("td", { "data-label": column.name, class: column.number && "number" }),
      );
      shown = { element: h("tr", {}, cells), cells };
      this.#shown.set(key, shown);
    }
    this.#columns.forEach((column, i) => put(shown.cells[i], content(column, row)));
    return shown;
  }
}

/** What a cell shows. A cell that fails must not hide the others. @param {Column} column @param {any} row */
function content(column, row) {
  try {
    return column.show(row);
  } catch (error) {
    console.error(error);
    return "cannot be shown";
  }
}

/** @param {any} cell @param {any} content */
function put(cell, content) {
  if (content === null || content === undefined || content === false) content = "";
  if (typeof content !== "object") setText(cell, String(content));
  else {
    const before = cell.firstElementChild;
    const after = h("div", {}, content);
    if (!before || before.outerHTML !== after.outerHTML) {
      // Do not replace an element that has the focus.
      if (!cell.contains(document.activeElement)) cell.replaceChildren(after);
    }
  }
}

/** @param {any} a @param {any} b */
function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return a < b ? -1 : 1;
}
