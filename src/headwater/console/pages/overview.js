/** Rates, latencies and counts of all gateways; the log; problems. */

import { card, fill, h, head, setText } from "../dom.js";
import { age, bytes, count, moment, period, rate, seconds } from "../format.js";
import { Grid } from "../grid.js";
import { NOTHING_REPORTED, follow } from "../subscriptions.js";
import { plot, Series } from "../plot.js";

// These stay while other pages are open.
const changes = new Series();
const messages = new Series();
const middle = new Series();
const upper = new Series();
/** The last row of each gateway. @type {Map<string, any>} */
const before = new Map();
/** The rates of each gateway, and the latency of changes if it has seen any.
 * @type {Map<string, {changes: number, messages: number, bytes: number, lag?: {p50: number, p99: number}}>} */
const rates = new Map();

/** @param {HTMLElement} page @param {any} context */
export function open(page, context) {
  const { info } = context;
  const tiles = new Tiles([
    "Changes", "Messages sent", "Bytes sent", "Latency", "Sessions", "Subscriptions", "Live queries", "Waiting",
  ]);
  const plots = [
    plot("Changes a second", rate, [changes]),
    plot("Messages a second", rate, [messages]),
    plot("Latency from commit", seconds, [middle, upper], ["p50", "p99"]),
  ];
  const gateways = new Grid("Gateways", COLUMNS, {
    key: (row) => row.gateway,
    empty: NOTHING_REPORTED,
  });
  fill(
    page,
    head("Overview", `What the gateways of this database are doing now, reported every ${seconds(info.activity_seconds)}.`),
    tiles.element,
    card(null, h("div", { class: "plots" }, plots.map((each) => each.element))),
    card("Gateways", gateways.element),
    h("div", { class: "columns" }, problems(info.findings), log(info)),
    info.cursors.length > 0 && card("Cursors", cursors(info.cursors)),
  );
  const draw = () => plots.forEach((each) => each.draw());
  follow(context, page, { table: "headwater.activity", where: [["kind", "=", "gateway"]], limit: 100 }, (rows) => {
    rows.forEach(addRates);
    for (const gateway of rates.keys()) {
      if (!rows.some((row) => row.gateway === gateway)) rates.delete(gateway);
    }
    gateways.update(rows);
    showTiles(tiles, rows);
    draw();
  });
  const timer = setInterval(draw, 1000);
  context.signal.addEventListener("abort", () => clearInterval(timer));
  draw();
}

/** @param {any} row */
function addRates(row) {
  const then = before.get(row.gateway);
  before.set(row.gateway, row);
  const passed = then ? (Date.parse(row.updated_at) - Date.parse(then.updated_at)) / 1000 : 0;
  // After a longer gap it would be a mean over the whole gap.
  const silence = (Date.parse(row.alive_until) - Date.parse(row.updated_at)) / 1000;
  if (passed <= 0 || passed > Math.max(60, silence)) return;
  const changed = (row.detail.changes - then.detail.changes) / passed;
  const sent = Math.max(0, row.sent - then.sent) / passed;
  rates.set(row.gateway, { changes: changed, messages: sent, bytes: Math.max(0, row.bytes - then.bytes) / passed, lag: row.detail.lag });
  const at = Date.parse(row.updated_at);
  // Every gateway reads the whole log, so changes are not summed; messages are.
  changes.add(at, Math.max(...values("changes")));
  messages.add(at, sum(values("messages")));
  middle.add(at, slowest("p50"));
  upper.add(at, slowest("p99"));
}

/** The latency of the slowest gateway; undefined if none has seen a change. @param {"p50" | "p99"} name */
function slowest(name) {
  const known = [...rates.values()].flatMap(({ lag }) => (lag ? [lag[name]] : []));
  return known.length ? Math.max(...known) : undefined;
}

/** @param {"changes" | "messages" | "bytes"} name */
const values = (name) => [...rates.values()].map((each) => each[name]);

/** @param {number[]} numbers */
const sum = (numbers) => numbers.reduce((all, each) => all + each, 0);

/** @param {Tiles} tiles @param {readonly any[]} rows */
function showTiles(tiles, rows) {
  const known = rates.size > 0;
  const [half, most] = [slowest("p50") ?? middle.last, slowest("p99")];
  tiles.set("Changes", known ? rate(Math.max(...values("changes"))) : "–", "a second");
  tiles.set("Messages sent", known ? rate(sum(values("messages"))) : "–", "a second");
  tiles.set("Bytes sent", known ? bytes(sum(values("bytes"))) : "–", "a second");
  const where = rows.length > 1 ? ", the slowest gateway" : "";
  tiles.set("Latency", seconds(half), (most === undefined ? "p50" : `p99 ${seconds(most)}`) + where);
  const gateways = `at ${rows.length} ${rows.length === 1 ? "gateway" : "gateways"}`;
  tiles.set("Sessions", count(sum(rows.map((row) => row.detail.sessions))), gateways);
  tiles.set("Subscriptions", count(sum(rows.map((row) => row.subscriptions))), "of all kinds");
  tiles.set("Live queries", count(sum(rows.map((row) => row.detail.views))), "shared ones counted once");
  tiles.set("Waiting", bytes(sum(rows.map((row) => row.waiting))), "for slow clients");
}

class Tiles {
  /** @type {Map<string, {value: any, small: any}>} */
  #tiles = new Map();

  /** @param {string[]} names */
  constructor(names) {
    this.element = h("dl", { class: "tiles" }, names.map((name) => {
      const value = h("span", {}, "–");
      const small = h("small");
      this.#tiles.set(name, { value, small });
      return h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value), h("dd", {}, small));
    }));
  }

  /** @param {string} name @param {string} value @param {string} [small] */
  set(name, value, small = "") {
    const tile = this.#tiles.get(name);
    if (!tile) return;
    setText(tile.value, value);
    setText(tile.small, small);
  }
}

const COLUMNS = [
  { name: "Gateway", show: (/** @type {any} */ row) => [row.name, " ", h("span", { class: "muted" }, `process ${row.detail.pid}`)] },
  { name: "Up for", number: true, show: (/** @type {any} */ row) => age(row.since) },
  { name: "Sessions", number: true, show: (/** @type {any} */ row) => count(row.detail.sessions) },
  { name: "Subscriptions", number: true, show: (/** @type {any} */ row) => count(row.subscriptions) },
  { name: "Messages", number: true, show: (/** @type {any} */ row) => count(row.sent) },
  { name: "Memory", number: true, show: (/** @type {any} */ row) => bytes(row.detail.memory ?? 0) },
  { name: "Flush", number: true, show: (/** @type {any} */ row) => seconds(row.detail.flush?.p50) },
  { name: "Resyncs", number: true, show: (/** @type {any} */ row) => count(row.detail.resyncs) },
  { name: "Fell behind", number: true, show: (/** @type {any} */ row) => count(row.detail.overflows) },
  { name: "Refused", number: true, show: (/** @type {any} */ row) => count(row.detail.refused) },
];

/** @param {any[]} findings */
function problems(findings) {
  const listed = findings.map((found) =>
    h("li", { class: `problem ${found.level}` },
      h("p", {}, h("strong", {}, found.topic), ": ", found.detail),
      found.hint && h("p", { class: "hint" }, found.hint),
    ),
  );
  return card(
    "Problems",
    listed.length ? h("ul", { class: "page" }, listed) : h("p", { class: "empty" }, "None: headwater doctor finds nothing to change."),
  );
}

/** @param {any} info */
function log({ log, version, user }) {
  const facts = [
    ["Position", h("code", {}, log.position)],
    ["Size", bytes(log.bytes)],
    ["Oldest change", log.oldest ? moment(log.oldest) : "none"],
    ["Retention", period(log.retention)],
    ["Readers", `${log.readers}${log.polling ? ", one of them polls: writers send no NOTIFY" : ", woken by NOTIFY"}`],
    ["Version", version],
    user && ["You", user],
  ].filter(Boolean);
  return card("Log", h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
}

/** @param {any[]} cursors */
function cursors(cursors) {
  const grid = new Grid("Cursors", [
    { name: "Cursor", show: (row) => row.name },
    { name: "Saved", number: true, show: (row) => age(row.saved_at) },
    { name: "Position", show: (row) => h("code", {}, row.position) },
    { name: "", show: (row) => row.lost && h("span", { class: "badge bad" }, "fell off the log") },
  ], { key: (row) => row.name });
  grid.update(cursors);
  return grid.element;
}

