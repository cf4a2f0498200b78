/** Names of tables and columns, for fields that suggest them. */

import { ask } from "./api.js";
import { fill, h } from "./dom.js";

let number = 0;

/** A field that takes any text and suggests some. @param {Record<string, any>} properties */
export function suggesting(properties) {
  const list = h("datalist", { id: `names-${++number}` });
  const field = h("input", { type: "text", autocomplete: "off", spellcheck: "false", list: list.id, ...properties });
  return {
    field,
    list,
    /** @param {string[]} names */
    suggest: (names) => fill(list, names.map((name) => h("option", { value: name }))),
  };
}

/** The captured tables, with their columns. @param {AbortSignal} signal @returns {Promise<any[]>} */
export async function captured(signal) {
  const { tables } = await ask("tables", {}, signal);
  return tables.filter((/** @type {any} */ table) => table.capture);
}
