/** Builds a live query, runs it, and shows its rows, every delta, and how it is served. */

import { parse, stringify } from "../../client/json.js";
import { ask } from "../api.js";
import { card, fill, h, head, labelled, setText, errorNote } from "../dom.js";
import { count, moment, pretty, short, value } from "../format.js";
import { capturedTables, suggestField } from "../suggestions.js";
import { QueryForm } from "../query-form.js";

const DELTAS_MAX = 200;
const CELL_MAX = 120;

/** @param {HTMLElement} page @param {any} context */
export function open(page, { client, signal, parameters, refused }) {
  const table = suggestField({ required: true, placeholder: "orders", oninput: () => columnsOf() });
  const form = new QueryForm(() => write(json, form.query(table.field.value.trim())));
  const json = h("textarea", { class: "code", spellcheck: "false", rows: 9, oninput: () => fromJson() });
  const wrong = h("p", { class: "muted", role: "status" });
  const rows = h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Result" });
  const state = h("p", { class: "muted", role: "status" }, "Not running.");
  const deltas = h("ol", { class: "changes", "aria-label": "Deltas" });
  const served = h("div", { class: "page" }, h("p", { class: "empty" }, "Run a query to see how it is served."));
  const stop = h("button", { type: "button", class: "quiet", disabled: true, onclick: () => end() }, "Stop");
  /** @type {any[]} */
  let tables = [];
  /** @type {any} */
  let live;

  table.field.addEventListener("input", () => write(json, form.query(table.field.value.trim())));

  function columnsOf() {
    form.suggest(tables.find(({ name }) => name === table.field.value.trim())?.columns ?? []);
  }

  /** @param {any} query */
  function showInForm(query) {
    table.field.value = query.table ?? "";
    columnsOf();
    const isComplete = form.show(query);
    table.field.disabled = !isComplete;
    setText(wrong, isComplete ? "" : "This query has parts that the form cannot show. Edit it here as JSON; it runs as written.");
  }

  function fromJson() {
    try {
      showInForm(parse(json.value));
    } catch {
      setText(wrong, "This is not JSON yet.");
    }
  }

  function end() {
    live?.close();
    live = undefined;
    stop.disabled = true;
    setText(state, "Not running.");
  }

  async function run() {
    end();
    /** @type {any} */
    let query;
    try {
      query = parse(json.value);
    } catch (error) {
      fill(rows, errorNote({ message: `the query is not JSON: ${/** @type {any} */ (error).message}` }));
      return;
    }
    fill(deltas);
    fill(rows);
    setText(state, "Reading…");
    follow(query);
    fill(served, h("p", { class: "empty" }, "Reading the plan…"));
    try {
      const plan = await ask("explain", { q: stringify(query) }, signal);
      fill(served, explained(plan, query));
    } catch (error) {
      if (signal.aborted) return;
      refused(error);
      fill(served, errorNote(/** @type {any} */ (error)));
    }
  }

  /** @param {any} query */
  function follow(query) {
    try {
      live = client.live(query);
    } catch (error) {
      fill(rows, errorNote(/** @type {any} */ (error)));
      return;
    }
    const following = live;
    stop.disabled = false;
    let number = 0;
    const show = () => {
      if (following !== live) return;
      if (following.status === "failed") {
        const { error } = following;
        refused(error);
        end();
        fill(rows, errorNote(error));
      } else if (following.value) {
        fill(rows, result(following.value));
        setText(state, `${count(following.value.length)} ${following.value.length === 1 ? "row" : "rows"}, live.`);
      }
    };
    following.subscribe(show);
    following.deltas((/** @type {any} */ batch) => {
      for (const delta of batch.deltas) deltas.prepend(deltaItem(delta, batch, ++number));
      while (deltas.children.length > DELTAS_MAX) deltas.lastElementChild.remove();
      show();
    });
    following.ready.catch(() => show());
  }

  page.append(
    head("Playground", "A live query sends its rows once, and then deltas: rows that enter, leave, move or change."),
    h("form", { onsubmit: (/** @type {Event} */ event) => { event.preventDefault(); void run(); } },
      h("div", { class: "columns" },
        h("section", { class: "card" },
          h("header", {}, h("h2", {}, "Query")),
          labelled("Table", [table.field, table.list]),
          form.element,
        ),
        h("section", { class: "card" },
          h("header", {}, h("h2", {}, "As JSON")),
          h("label", {}, h("span", { class: "hidden" }, "The query as JSON"), json),
          wrong,
          h("div", { class: "actions" }, h("button", {}, "Run"), stop, state),
        ),
      ),
    ),
    card("Rows", rows),
    h("div", { class: "columns" }, card("How it is served", served), card("Deltas", h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Latest deltas" }, deltas))),
  );
  signal.addEventListener("abort", end);

  const given = parameters.get("q");
  try {
    showInForm(given ? parse(given) : { table: parameters.get("table") ?? "", limit: 20 });
    write(json, given ? parse(given) : form.query(table.field.value));
  } catch {
    showInForm({ table: "", limit: 20 });
    json.value = given; // Running it says what is wrong with it.
  }
  capturedTables(signal).then((found) => {
    tables = found;
    table.suggest(tables.map(({ name }) => name));
    // Do not change a field that the user is typing into.
    const isWriting = [table.field, json].includes(document.activeElement);
    if (!table.field.value && !given && !isWriting) {
      table.field.value = tables.find(({ kind }) => kind !== "system")?.name ?? "";
      write(json, form.query(table.field.value));
    }
    columnsOf();
    if (given || parameters.get("table")) void run();
  }, () => undefined);
}

/** @param {any} field @param {any} query */
function write(field, query) {
  field.value = pretty(query);
}

/** @param {readonly any[]} rows */
function result(rows) {
  if (!rows.length) return h("p", { class: "empty" }, "No row matches now.");
  const names = Object.keys(rows[0]);
  return h("table", {},
    h("caption", { class: "hidden" }, "Rows"),
    h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col", class: isNumber(rows[0][name]) && "number" }, name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, names.map((name) =>
      h("td", { class: row[name] === null ? "null" : isNumber(row[name]) && "number" }, short(value(row[name]), CELL_MAX)))))),
  );
}

/** @param {any} item */
const isNumber = (item) => typeof item === "number" || typeof item === "bigint";

/** @type {Record<string, string>} */
const LEVELS = { enter: "good", match: "good", leave: "bad", unmatch: "bad", update: "accent", move: "accent", reset: "" };

/** @param {any} delta @param {any} batch @param {number} number */
function deltaItem(delta, batch, number) {
  const { delta: name, key, row, index, source, rows } = delta;
  const words = rows
    ? `to ${count(rows.length)} ${rows.length === 1 ? "row" : "rows"}`
    : source !== undefined ? `from place ${source + 1} to ${index + 1}` : index !== undefined ? `at place ${index + 1}` : "";
  return h("li", { class: number > 1 && "fresh" },
    h("div", { class: "change" },
      h("span", { class: `badge ${LEVELS[name] ?? ""}` }, name),
      key && h("strong", { class: "wrap" }, key.map(value).join(", ")),
      h("span", { class: "muted" }, words),
      batch.at && h("time", { class: "who", datetime: batch.at }, moment(batch.at)),
    ),
    row && h("details", {}, h("summary", {}, "Row"), h("pre", {}, pretty(row))),
  );
}

/** @param {any} explanation @param {any} query */
function explained(explanation, query) {
  const { filed, plan } = explanation;
  const filters = Boolean(Array.isArray(query.where) ? query.where.length : query.where);
  const route = filed === null
    ? `${filters ? "No condition can be indexed" : "There is no filter"}: every change of the table is compared with this query.`
    : filed.length ? `A change is compared with this query only if ${filed.length > 1 ? "one of these holds" : "this holds"}, before or after it:` : "No row can match, so no change is compared with it.";
  const facts = [
    ["Index", explanation.index ? h("code", {}, explanation.index) : "none is suitable"],
    filters && ["Serves the filter", explanation.serves_filter ? "yes" : "no: rows that do not match are read too"],
    ["Serves the order", explanation.serves_order ? "yes" : "no: rows are sorted"],
    ["Plan now", `${plan.scan}, about ${count(Math.round(plan.rows))} rows${plan.sorts ? ", then a sort" : ""}`],
  ].filter(Boolean);
  return [
    h("div", { class: "stack" },
      h("h3", {}, "Router"),
      h("p", {}, route),
      filed && filed.length > 0 && h("ul", { class: "actions" }, filed.map((/** @type {any} */ term) =>
        h("li", { class: "badge accent" }, `${term.index}: ${short(term.text, 60)}`))),
    ),
    h("div", { class: "stack" },
      h("h3", {}, "First read"),
      h("pre", {}, explanation.sql),
      explanation.values.length > 0 && h("p", { class: "muted mono wrap" }, explanation.values.map((/** @type {string} */ item, /** @type {number} */ i) => `$${i + 1} = ${short(item, 80)}`).join("   ")),
      h("dl", { class: "facts" }, facts.map(([name, item]) => [h("dt", {}, name), h("dd", {}, item)])),
      explanation.suggestion && h("div", { class: "note" }, h("p", {}, "This index would make the first read fast:"), h("pre", {}, explanation.suggestion)),
    ),
  ];
}
