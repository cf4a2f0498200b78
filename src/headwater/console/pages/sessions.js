/** The connected clients. */

import { card, h, head } from "../dom.js";
import { age, bytes, count, moment } from "../format.js";
import { Grid } from "../grid.js";
import { NOTHING_REPORTED, follow } from "../subscriptions.js";

/** @param {HTMLElement} page @param {any} context */
export function open(page, context) {
  const grid = new Grid("Sessions", COLUMNS, {
    key: (row) => `${row.gateway}/${row.id}`,
    empty: NOTHING_REPORTED,
    sort: [4, -1],
  });
  page.append(
    head("Sessions", "The connections of clients, the most expensive of each gateway. Bytes wait for a client that reads too slowly."),
    card(null, grid.element),
  );
  const query = { table: "headwater.activity", where: [["kind", "=", "session"]], order: [["bytes", "desc"]], limit: 400 };
  follow(context, page, query, (rows) => grid.update(rows));
}

/** @type {Record<string, string>} */
const TRANSPORTS = { sse: "Server-Sent Events", websocket: "WebSocket", ndjson: "NDJSON" };

/** @param {any} row */
function who(row) {
  const { tenant, role, expires_at: expires, behind } = row.detail;
  const more = [tenant && `tenant ${tenant}`, role && `role ${role}`, expires && `until ${moment(expires)}`].filter(Boolean);
  return [
    h("strong", { class: "wrap" }, row.name ?? "anonymous"),
    behind && [" ", h("span", { class: "badge warn" }, "behind")],
    more.length > 0 && h("div", { class: "muted wrap" }, more.join(" · ")),
  ];
}

const COLUMNS = [
  { name: "User", by: (/** @type {any} */ row) => row.name ?? "", show: who },
  { name: "From", by: (/** @type {any} */ row) => row.detail.address, show: (/** @type {any} */ row) => row.detail.address },
  { name: "Over", by: (/** @type {any} */ row) => row.type, show: (/** @type {any} */ row) => TRANSPORTS[row.type] ?? row.type },
  { name: "Subscriptions", number: true, by: (/** @type {any} */ row) => row.subscriptions, show: (/** @type {any} */ row) => count(row.subscriptions) },
  { name: "Sent", number: true, by: (/** @type {any} */ row) => row.bytes, show: (/** @type {any} */ row) => bytes(row.bytes) },
  { name: "Messages", number: true, by: (/** @type {any} */ row) => row.sent, show: (/** @type {any} */ row) => count(row.sent) },
  { name: "Waiting", number: true, by: (/** @type {any} */ row) => row.waiting, show: (/** @type {any} */ row) => bytes(row.waiting) },
  { name: "Memory of the user", number: true, by: (/** @type {any} */ row) => row.detail.memory ?? 0, show: (/** @type {any} */ row) => bytes(row.detail.memory ?? 0) },
  { name: "Connected for", number: true, by: (/** @type {any} */ row) => -Date.parse(row.since), show: (/** @type {any} */ row) => age(row.since) },
];
