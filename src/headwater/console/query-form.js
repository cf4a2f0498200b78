/** The parts of a live query as fields: conditions that must all hold, an order, a limit. */

import { parse, stringify } from "../client/json.js";
import { fill, h, labelled } from "./dom.js";
import { suggestField } from "./suggestions.js";

const OPERATORS = ["=", "!=", "<", "<=", ">", ">=", "in", "between", "like", "ilike", "is null", "is not null"];
const ORDERS = ["asc", "desc"];

export class QueryForm {
  /** @type {{column: any, operator: any, value: any, element: any}[]} */
  #conditions = [];
  /** @type {{column: any, direction: any, element: any}[]} */
  #order = [];
  #limit = h("input", { type: "number", min: 1, max: 1000, value: 20, oninput: () => this.#changed() });
  #columns = suggestField({ placeholder: "all", oninput: () => this.#changed() });
  #conditionList = h("div", { class: "page" });
  #orderList = h("div", { class: "page" });
  /** @type {string[]} */
  #names = [];
  #changed;

  /** @param {() => void} changed */
  constructor(changed) {
    this.#changed = changed;
    this.element = h("fieldset", { class: "page" },
      h("fieldset", {}, h("legend", {}, "Where all of these hold"), this.#conditionList,
        h("div", {}, h("button", { type: "button", class: "quiet small", onclick: () => this.#addCondition().column.field.focus() }, "Add a condition"))),
      h("fieldset", {}, h("legend", {}, "In this order"), this.#orderList,
        h("div", {}, h("button", { type: "button", class: "quiet small", onclick: () => this.#addOrder().column.field.focus() }, "Add a column"))),
      h("div", { class: "fields" }, labelled("At most", this.#limit, "narrow"), labelled("Columns", [this.#columns.field, this.#columns.list], "wide")),
    );
  }

  /** @param {string[]} names of columns */
  suggest(names) {
    this.#names = names;
    for (const { column } of [...this.#conditions, ...this.#order]) column.suggest(names);
  }

  /** The query in the fields. @param {string} table */
  query(table) {
    const where = this.#conditions.filter(({ column }) => column.field.value.trim()).map(conditionOf);
    const order = this.#order.filter(({ column }) => column.field.value.trim())
      .map(({ column, direction }) => [column.field.value.trim(), direction.value]);
    const columns = this.#columns.field.value.split(",").map((/** @type {string} */ name) => name.trim()).filter(Boolean);
    return {
      table,
      ...(where.length && { where }),
      ...(order.length && { order }),
      ...(this.#limit.value && { limit: Number(this.#limit.value) }),
      ...(columns.length && { columns }),
    };
  }

  /**
   * Show a query in the fields. If they cannot show all of it they are disabled, because an edit
   * would drop the rest.
   *
   * @param {any} query
   * @returns {boolean} whether they show all of it
   */
  show(query) {
    const where = conditions(query.where);
    const order = Array.isArray(query.order) ? query.order.map(ordered) : query.order;
    this.#conditions = [];
    this.#order = [];
    fill(this.#conditionList);
    fill(this.#orderList);
    for (const each of listed(where)) if (typeof listed(each)[0] === "string") this.#addCondition(each);
    for (const each of listed(order)) this.#addOrder(each);
    this.#limit.value = query.limit ?? "";
    this.#columns.field.value = listed(query.columns).join(", ");
    const given = { ...query, where: nonEmpty(where), order: nonEmpty(order) };
    const isComplete = stringify(this.query(query.table), true) === stringify(given, true);
    this.element.disabled = !isComplete;
    return isComplete;
  }

  #addCondition(/** @type {any[]} */ [name = "", operator = "=", item] = []) {
    const column = suggestField({ value: name, placeholder: "column", "aria-label": "Column", oninput: () => this.#changed() });
    const choice = choose(OPERATORS, operator, "Operator", () => this.#changed());
    const value = h("input", { type: "text", value: typed(item), placeholder: "value", "aria-label": "Value", autocomplete: "off", oninput: () => this.#changed() });
    return this.#add(this.#conditions, this.#conditionList, { column, operator: choice, value }, [column.field, column.list, choice, value], "row");
  }

  #addOrder(/** @type {any[]} */ [name = "", direction = "asc"] = []) {
    const column = suggestField({ value: name, placeholder: "column", "aria-label": "Order by", oninput: () => this.#changed() });
    const choice = choose(ORDERS, direction, "Direction", () => this.#changed());
    return this.#add(this.#order, this.#orderList, { column, direction: choice }, [column.field, column.list, choice], "row order");
  }

  /** @param {any[]} parts @param {any} list @param {any} part @param {any[]} fields @param {string} kind */
  #add(parts, list, part, fields, kind) {
    const remove = h("button", { type: "button", class: "quiet", "aria-label": "Remove", onclick: () => {
      parts.splice(parts.indexOf(part), 1);
      part.element.remove();
      this.#changed();
    } }, "×");
    part.element = h("div", { class: kind }, fields, remove);
    part.column.suggest(this.#names);
    parts.push(part);
    list.append(part.element);
    return part;
  }
}

/** @param {any} item @returns {any[]} */
const listed = (item) => (Array.isArray(item) ? item : []);

/** Undefined for an empty list. @param {any} item */
const nonEmpty = (item) => (item?.length === 0 ? undefined : (item ?? undefined));

/** The list of conditions that must all hold; another filter as it is. @param {any} where */
function conditions(where) {
  const given = where?.and ?? where;
  return typeof listed(given)[0] === "string" ? [given] : given;
}

const ORDERED = /^(.*?)(?: (asc|desc))?(?: (nulls first|nulls last))?$/s;

/** A column of an order as a list; it may be a text: `price desc`. @param {any} each @returns {any[]} */
function ordered(each) {
  if (Array.isArray(each)) return each.length === 1 ? [...each, "asc"] : each;
  const [, column, direction = "asc", ...nulls] = /** @type {any[]} */ (ORDERED.exec(String(each)));
  return [column, direction, ...nulls.filter(Boolean)];
}

/** @param {string[]} names @param {string} chosen @param {string} label @param {() => void} onchange */
function choose(names, chosen, label, onchange) {
  const known = names.includes(chosen) ? names : [...names, chosen];
  return h("select", { "aria-label": label, onchange }, known.map((name) => h("option", { selected: name === chosen }, name)));
}

/** @param {any} condition */
function conditionOf({ column, operator, value }) {
  const name = column.field.value.trim();
  if (operator.value.startsWith("is ")) return [name, operator.value];
  return [name, operator.value, read(value.value)];
}

/** A typed value: JSON if it parses, otherwise a text. @param {string} words */
function read(words) {
  try {
    return parse(words);
  } catch {
    return words;
  }
}

/** A value as it is typed; a text that would parse as JSON is quoted. @param {any} item */
function typed(item) {
  if (item === undefined) return "";
  const isPlain = typeof item === "string" && read(item) === item && !/[\r\n]/.test(item);
  return isPlain ? item : stringify(item);
}
