/** Input fields that suggest the names of tables and columns. */

import { ask } from "./api.js";
import { fill, h } from "./dom.js";

let number = 0;

/** A text field with suggestions. @param {Record<string, any>} properties */
export function suggestField(properties) {
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
export async function capturedTables(signal) {
  const { tables } = await ask("tables", {}, signal);
  return tables.filter((/** @type {any} */ table) => table.capture);
}
