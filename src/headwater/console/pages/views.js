/** The subscriptions and their costs: identical subscriptions share one view. */

import { stringify } from "../../client/json.js";
import { card, h, head } from "../dom.js";
import { age, bytes, count, seconds, short, value } from "../format.js";
import { Grid } from "../grid.js";
import { NOTHING_REPORTED, follow } from "../subscriptions.js";

/** @param {HTMLElement} page @param {any} context */
export function open(page, context) {
  const grid = new Grid("Views", COLUMNS, {
    key: (row) => `${row.gateway}/${row.id}`,
    empty: NOTHING_REPORTED,
    sort: [5, -1],
  });
  page.append(
    head("Subscriptions", "Identical subscriptions share one view, which is updated once for all of them. These are the most expensive of each gateway; select a column title to sort."),
    card(null, grid.element),
  );
  const query = { table: "headwater.activity", where: [["kind", "=", "view"]], order: [["seconds", "desc"]], limit: 400 };
  follow(context, page, query, (rows) => grid.update(rows));
}

/** @type {Record<string, string>} */
const TYPES = { live: "live query", query: "reactive query", changes: "change feed", topic: "topic" };

/** @param {any} row */
function what(row) {
  const { detail } = row;
  const to = row.type === "live" && detail.query && new URLSearchParams({ q: stringify(detail.query) });
  return [
    h("span", { class: "badge accent" }, TYPES[row.type] ?? row.type), " ",
    h("strong", { class: "wrap" }, row.name),
    h("div", { class: "mono muted wrap" }, short(described(row), 220)),
    detail.error && h("div", { class: "problem fail" }, detail.error),
    to && h("a", { href: `#/playground?${to}` }, "Open in the playground"),
  ];
}

/** @param {any} row */
function described({ type, detail }) {
  if (detail.cut) return detail.cut;
  if (type === "live") {
    const { table: _, where, order, ...rest } = detail.query ?? {};
    return [
      where && condition(where),
      order && `by ${order.map((/** @type {any} */ by) => [by].flat().join(" ")).join(", ")}`,
      words(rest),
      detail.role && `as ${detail.role}`,
    ].filter(Boolean).join(" · ") || "all rows, by key";
  }
  if (type === "query") return [words(detail.args), detail.user && `for ${detail.user}`].filter(Boolean).join(" · ");
  return "";
}

/** A filter as text. @param {any} where @returns {string} */
function condition(where) {
  if (where.not) return `not (${condition(where.not)})`;
  const parts = where.and ?? where.or ?? where;
  if (typeof parts[0] === "string") return parts.map((/** @type {any} */ part, /** @type {number} */ i) => (i === 2 ? value(part) : part)).join(" ");
  return parts.map((/** @type {any} */ part) => (part.or ? `(${condition(part)})` : condition(part))).join(where.or ? " or " : " and ");
}

/** @param {Record<string, any>} [fields] */
function words(fields = {}) {
  return Object.entries(fields).map(([name, item]) => `${name} ${value(item)}`).join(" · ");
}

const COLUMNS = [
  { name: "Subscription", by: (/** @type {any} */ row) => row.name, show: what },
  { name: "Subscribers", number: true, by: (/** @type {any} */ row) => row.subscriptions, show: (/** @type {any} */ row) => count(row.subscriptions) },
  { name: "Rows held", number: true, by: (/** @type {any} */ row) => row.rows, show: (/** @type {any} */ row) => row.type === "live" ? count(row.rows) : "–" },
  { name: "Deltas", number: true, by: (/** @type {any} */ row) => row.sent, show: (/** @type {any} */ row) => count(row.sent) },
  { name: "Sent", number: true, by: (/** @type {any} */ row) => row.bytes, show: (/** @type {any} */ row) => bytes(row.bytes) },
  { name: "Time", number: true, by: (/** @type {any} */ row) => row.seconds, show: (/** @type {any} */ row) => row.runs ? seconds(row.seconds) : "–" },
  { name: "Time per run", number: true, by: (/** @type {any} */ row) => row.runs ? row.seconds / row.runs : 0, show: (/** @type {any} */ row) => row.runs ? seconds(row.seconds / row.runs) : "–" },
  { name: "Age", number: true, by: (/** @type {any} */ row) => -Date.parse(row.since), show: (/** @type {any} */ row) => age(row.since) },
];
