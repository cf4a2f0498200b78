/** A change as people read it: when, what, which row, what differs, by whom, from which source. */

import { stringify } from "../client/json.js";
import { h } from "./dom.js";
import { key as keyText, moment, pretty, short, value } from "./format.js";

const LEVELS = { insert: "good", update: "accent", delete: "bad", truncate: "bad", reset: "", before: "" };
const SHOWN_MAX = 300;

/**
 * @param {any} change of the log or of a feed
 * @param {{linked?: boolean, whole?: boolean}} [options] `linked` to the record's history; `whole`
 *   shows inserted and deleted rows at once
 */
export function changeItem(change, { linked = true, whole = false } = {}) {
  const key = keyText(change.key);
  const rows = { before: change.before, after: change.after };
  return h(
    "li",
    { "data-op": change.op },
    h(
      "div",
      { class: "change" },
      h("span", { class: `badge ${LEVELS[change.op] ?? ""}` }, change.op),
      h("strong", { class: "wrap" }, change.table, key && " ", key && (linked ? historyLink(change.table, key) : key)),
      change.at && h("time", { datetime: change.at }, moment(change.at)),
      h("span", { class: "who wrap" }, who(change)),
      change.origin && h("span", { class: "origin wrap muted" }, origin(change.origin)),
    ),
    change.cut ? h("p", { class: "muted" }, "The row is too large to be shown here.") : differences(change, whole),
    !whole && change.op === "update" && rows.after && h("details", {}, h("summary", {}, "Whole row"), h("pre", {}, pretty(rows.after))),
  );
}

/** @param {string} table @param {string} key */
export function historyLink(table, key) {
  const to = new URLSearchParams({ table, key });
  return h("a", { href: `#/history?${to}` }, short(key, 60));
}

/** @param {any} change */
function who(change) {
  return [change.user ?? change.user_id, change.function ?? change.function_name].filter(Boolean).join(" · ");
}

/** The transaction of a source that a mirrored change came from. @param {any} from */
function origin(from) {
  const committed = from.committed_at && moment(from.committed_at);
  return ["from", from.source, from.position && `at ${short(from.position, 80)}`, committed && `(${committed})`].filter(Boolean).join(" ");
}

/** What an update changed; of other changes, the row. @param {any} change @param {boolean} whole */
function differences(change, whole) {
  const before = change.before ?? {};
  const after = change.after ?? {};
  if (change.op === "update" && change.before) {
    const names = change.changed ?? Object.keys(after).filter((name) => stringify(after[name]) !== stringify(before[name]));
    if (!names.length) return h("p", { class: "muted" }, "No column changed.");
    return h("dl", { class: "diff" }, names.map((/** @type {string} */ name) => {
      // The text 1 and the number 1, in JSON, differ in their quotes only.
      const words = value(before[name]) === value(after[name]) ? stringify : value;
      const arrow = h("span", { class: "arrow", "aria-label": "became" }, "→");
      return [h("dt", {}, name), h("dd", {}, mark("del", before[name], words), arrow, mark("ins", after[name], words))];
    }));
  }
  const row = change.after ?? change.before;
  if (!row) return null;
  const tag = change.after ? "ins" : "del";
  const listed = h("dl", { class: "diff" }, Object.entries(row).map(([name, item]) => [h("dt", {}, name), h("dd", {}, mark(tag, item))]));
  if (whole) return listed;
  return h("details", {}, h("summary", {}, "Row"), listed);
}

/** @param {"ins" | "del"} tag @param {any} item @param {(item: any) => string} [words] */
function mark(tag, item, words = value) {
  return h(tag, { class: (item ?? null) === null && "null" }, short(words(item), SHOWN_MAX));
}
