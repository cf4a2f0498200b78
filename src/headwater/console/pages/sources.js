/** The sources: databases elsewhere whose tables are mirrored. State, copy, lag and errors of each. */

import { ask } from "../api.js";
import { card, fill, h, head, setText } from "../dom.js";
import { age, bytes, count, moment, now, rate, seconds } from "../format.js";
import { Grid } from "../grid.js";
import { follow } from "../subscriptions.js";
import { plot, RateSeries, Series } from "../plot.js";

/** @type {Record<string, string>} */
const LEVELS = {
  running: "good", copying: "accent", checking: "accent", paused: "warn", removing: "warn",
  failed: "bad", refused: "bad", lost: "bad", diverged: "bad",
};
/** States in which changes arrive. */
const FOLLOWS = ["running", "copying"];
/** @type {Record<string, string>} */
const TABLE_LEVELS = { live: "good", copying: "accent", recopying: "accent", dropped: "bad", removed: "" };

/** @param {HTMLElement} page @param {any} context */
export function open(page, context) {
  const { signal } = context;
  const grid = new Grid("Sources", COLUMNS, {
    key: (row) => row.name,
    empty: ["No source is declared. Add one: ", h("code", {}, "headwater source add URL --into SCHEMA")],
  });
  const cards = h("div", { class: "page" });
  /** @type {Map<string, Source>} */
  const sources = new Map();
  page.append(
    head("Sources", "Databases elsewhere whose tables are mirrored here. Lag: from the commit at the source to the commit here, of the last transaction."),
    card("Sources", grid.element),
    cards,
  );
  const show = (/** @type {readonly any[]} */ rows) => {
    grid.update(rows);
    const names = rows.map((row) => row.name);
    if (String(names) !== String([...sources.keys()])) {
      const known = new Map(sources);
      sources.clear();
      names.forEach((name) => sources.set(name, known.get(name) ?? new Source(name)));
      fill(cards, [...sources.values()].map((each) => each.element));
    }
    rows.forEach((row) => sources.get(row.name)?.update(row));
  };
  void past(signal).then((rows) => {
    if (signal.aborted) return;
    for (const row of rows) {
      if (!sources.has(row.name)) sources.set(row.name, new Source(row.name));
      sources.get(row.name)?.add(row);
    }
    follow(context, page, { table: "headwater.sources", limit: 200 }, show);
  });
  const timer = setInterval(() => sources.forEach((each) => each.draw()), 1000);
  signal.addEventListener("abort", () => clearInterval(timer));
}

const PAST_MS = 2000;

/** The reports of the last minutes, if the log has them quickly. @param {AbortSignal} signal @returns {Promise<any[]>} */
async function past(signal) {
  try {
    const soon = AbortSignal.any([signal, AbortSignal.timeout(PAST_MS)]);
    const { changes } = await ask("log", { table: "headwater.sources", limit: 500 }, soon);
    return changes.map((/** @type {any} */ change) => change.after).filter(Boolean).reverse();
  } catch {
    return []; // The plots then begin now.
  }
}

class Source {
  #lag = new Series();
  #changes = new RateSeries();
  #tables = new Grid("Tables", TABLE_COLUMNS, { key: (row) => row.name, empty: "Its tables are not known yet." });
  #position = h("code", { class: "wrap" });
  #runner = h("span", { class: "wrap" });

  /** @param {string} name */
  constructor(name) {
    this.plots = [plot("Lag", seconds, [this.#lag]), plot("Changes a second", rate, [this.#changes])];
    this.element = card(
      name,
      this.#tables.element,
      h("p", { class: "muted" }, "Position ", this.#position, this.#runner),
      h("div", { class: "plots" }, this.plots.map((each) => each.element)),
    );
  }

  /** @param {any} row */
  add(row) {
    const at = Date.parse(row.updated_at);
    this.#lag.add(at, row.lag);
    if (FOLLOWS.includes(row.state)) this.#changes.report(at, Number(row.changes));
    else this.#changes.end();
  }

  /** @param {any} row */
  update(row) {
    this.add(row);
    this.#tables.update(row.tables ?? []);
    setText(this.#position, row.position ?? "–");
    setText(this.#runner, row.runner ? ` · run by ${row.runner}` : " · no process runs it");
    this.draw();
  }

  draw() {
    this.#changes.rest(now());
    this.plots.forEach((each) => each.draw());
  }
}

/** @param {any} row */
function name(row) {
  return [
    h("strong", { class: "wrap" }, row.name), " ", h("span", { class: `badge ${LEVELS[row.state] ?? ""}` }, row.state),
    row.feed_only && [" ", h("span", { class: "badge" }, "feed only")],
    h("div", { class: "muted wrap" }, `${row.kind} → ${row.into_schema}`),
    row.error && h("div", { class: "problem fail" }, h("p", {}, row.error), row.hint && h("p", { class: "hint" }, row.hint)),
    row.warning && h("div", { class: "problem" }, h("p", {}, row.warning)),
  ];
}

/** @param {any} row */
function copies(row) {
  const tables = (row.tables ?? []).filter((/** @type {any} */ table) => !["dropped", "removed"].includes(table.state));
  const live = tables.filter((/** @type {any} */ table) => table.state === "live");
  return live.length === tables.length ? count(live.length) : `${live.length} of ${tables.length}`;
}

/** How far the copy of a table is. @param {any} table */
function copied(table) {
  if (!table.estimate || table.state === "live") return count(table.copied);
  const value = Math.min(table.copied, table.estimate);
  return [h("progress", { max: table.estimate, value, "aria-label": `Copy of ${table.name}` }), ` ${count(table.copied)} of about ${count(table.estimate)}`];
}

const COLUMNS = [
  { name: "Source", by: (/** @type {any} */ row) => row.name, show: name },
  { name: "Tables live", number: true, show: copies },
  { name: "Lag", number: true, by: (/** @type {any} */ row) => row.lag, show: (/** @type {any} */ row) => seconds(row.lag) },
  { name: "Kept there", number: true, by: (/** @type {any} */ row) => row.lag_bytes, show: (/** @type {any} */ row) => bytes(row.lag_bytes) },
  { name: "Changes", number: true, by: (/** @type {any} */ row) => row.changes, show: (/** @type {any} */ row) => count(row.changes) },
  { name: "Transactions", number: true, by: (/** @type {any} */ row) => row.transactions, show: (/** @type {any} */ row) => count(row.transactions) },
  { name: "Last commit", number: true, show: (/** @type {any} */ row) => row.committed_at ? moment(row.committed_at) : "–" },
  { name: "Last change", number: true, show: (/** @type {any} */ row) => `${age(row.updated_at)} ago` },
];

const TABLE_COLUMNS = [
  { name: "Table", by: (/** @type {any} */ row) => row.name, show: (/** @type {any} */ row) => h("strong", { class: "wrap" }, row.name) },
  { name: "Mirror", show: (/** @type {any} */ row) => row.target },
  { name: "State", show: (/** @type {any} */ row) => h("span", { class: `badge ${TABLE_LEVELS[row.state] ?? ""}` }, row.state) },
  { name: "Copied", number: true, show: copied },
];
