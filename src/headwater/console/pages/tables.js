/** Every table: whether it is captured, its size and changes, its problems. */

import { ask } from "../api.js";
import { card, fill, h, head, labelled, errorNote } from "../dom.js";
import { bytes, count } from "../format.js";
import { Grid } from "../grid.js";
import { every } from "../subscriptions.js";

const PERIOD = 5;

/** @param {HTMLElement} page @param {any} context */
export function open(page, { signal, refused }) {
  /** @type {any[]} */
  let tables = [];
  const filter = h("input", { type: "search", placeholder: "orders", oninput: () => draw() });
  const grid = new Grid("Tables", COLUMNS, { key: (row) => row.name, empty: "No table of that name." });
  const note = h("div");
  const draw = () => {
    const wanted = filter.value.trim().toLowerCase();
    grid.update(tables.filter((table) => table.name.toLowerCase().includes(wanted)));
  };
  page.append(
    head("Tables", "Changes of captured tables go to the log, and from there to subscribers. Rows are PostgreSQL's estimate."),
    card(null, h("div", { class: "fields" }, labelled("Find a table", filter, "search")), note, grid.element),
  );
  void every(signal, PERIOD, async () => {
    try {
      const found = await ask("tables", {}, signal);
      tables = found.tables;
      const more = [
        found.busy && "There were more changes in the last minute than are counted here.",
        found.more && "There are more tables than are listed here.",
      ].filter(Boolean);
      fill(note, more.map((words) => h("p", { class: "note" }, words)));
      draw();
    } catch (error) {
      if (signal.aborted) return;
      refused(error);
      fill(note, errorNote(/** @type {any} */ (error)));
    }
  });
}

/** @param {any} row */
function name(row) {
  const to = new URLSearchParams({ table: row.name });
  return [
    h("strong", { class: "wrap" }, row.name),
    row.kind !== "table" && [" ", h("span", { class: "badge" }, KINDS[row.kind] ?? row.kind)],
    row.secured && [" ", h("span", { class: "badge" }, "row security")],
    row.capture && h("div", { class: "actions" },
      h("a", { href: `#/log?${to}` }, "Changes"),
      h("a", { href: `#/playground?${to}` }, "Live query"),
    ),
  ];
}

/** @type {Record<string, string>} */
const KINDS = { view: "streaming view", system: "Headwater's own", partitioned: "partitioned" };

/** @param {any} row */
function problems(row) {
  return row.problems.length > 0 && row.problems.map((/** @type {any} */ found) =>
    h("div", { class: `problem ${found.level}` },
      h("p", {}, found.detail),
      found.hint && h("p", { class: "hint" }, found.hint),
    ));
}

const COLUMNS = [
  { name: "Table", by: (/** @type {any} */ row) => row.name, show: name },
  {
    name: "Capture",
    by: (/** @type {any} */ row) => row.capture ?? "",
    show: (/** @type {any} */ row) => row.capture ? h("span", { class: "badge good" }, `by ${row.capture}`) : h("span", { class: "badge" }, "off"),
  },
  { name: "Key", show: (/** @type {any} */ row) => row.key.join(", ") || "none" },
  { name: "Rows", number: true, by: (/** @type {any} */ row) => row.rows, show: (/** @type {any} */ row) => row.rows === null ? "not known" : count(row.rows) },
  { name: "Size", number: true, by: (/** @type {any} */ row) => row.bytes, show: (/** @type {any} */ row) => bytes(row.bytes) },
  { name: "Changes a minute", number: true, by: (/** @type {any} */ row) => row.minute, show: (/** @type {any} */ row) => count(row.minute) },
  { name: "Problems", show: problems },
];
