/** The change log: a search, newest first, and new changes while the page is open. */

import { ask, exact } from "../api.js";
import { changeItem } from "../changes.js";
import { fill, h, head, labelled, setText, errorNote } from "../dom.js";
import { count, key as keyText, moment, sameKey, value } from "../format.js";
import { tail as tailOf } from "../subscriptions.js";
import { capturedTables, suggestField } from "../suggestions.js";

const PART = 50;
const SHOWN_MAX = 500;
const OPS = ["insert", "update", "delete", "truncate", "reset"];

/** @param {HTMLElement} page @param {any} context */
export function open(page, context) {
  const { signal, parameters, refused } = context;
  const table = suggestField({ placeholder: "any", value: parameters.get("table") ?? "" });
  const op = h("select", {}, ["", ...OPS].map((name) => h("option", { value: name, selected: name === parameters.get("op") }, name || "any")));
  const key = h("input", { type: "text", placeholder: "42", autocomplete: "off", value: parameters.get("key") ?? "" });
  const user = h("input", { type: "text", placeholder: "any", autocomplete: "off", value: parameters.get("user") ?? "" });
  const text = h("input", { type: "search", placeholder: "anywhere in the row", value: parameters.get("text") ?? "" });
  const list = h("ol", { class: "changes", "aria-label": "Changes" });
  const state = h("p", { class: "muted", role: "status" });
  const wrong = h("div");
  const older = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => search(true) }, "Older changes");
  const tail = h("button", { type: "button", class: "quiet", "aria-pressed": "false", onclick: () => follow(!feed) }, "Follow");
  const filters = () => ({ table: table.field.value.trim(), op: op.value, key: key.value.trim(), user: user.value.trim(), text: text.value.trim() });
  /** @type {(() => void) | undefined} */
  let feed;
  /** @type {string | null} */
  let before = null;
  /** The filters of the last search: the fields may have changed since. */
  let searched = filters();
  let asked = 0;

  async function search(/** @type {boolean} */ more) {
    const number = ++asked;
    if (!more) [before, searched] = [null, filters()];
    const lastState = more ? state.textContent : "";
    setText(state, "Searching…");
    fill(wrong);
    try {
      const found = await ask("log", { ...searched, before, limit: PART }, signal, exact);
      if (number !== asked) return;
      const items = found.changes.map((/** @type {any} */ change) => changeItem(change));
      if (more) list.append(...items);
      else fill(list, items);
      before = found.before;
      older.hidden = !before;
      setText(state, summary(found, list.children.length));
    } catch (error) {
      if (signal.aborted || number !== asked) return;
      refused(error);
      setText(state, lastState);
      if (!more) {
        fill(list);
        older.hidden = true;
      }
      fill(wrong, errorNote(/** @type {any} */ (error)));
    }
  }

  function follow(/** @type {boolean} */ on) {
    feed?.();
    feed = undefined;
    tail.setAttribute("aria-pressed", String(on));
    setText(tail, on ? "Starting…" : "Follow");
    if (!on) return;
    const wanted = filters();
    feed = tailOf(context, wanted.table, {
      change: (change) => matches(change, wanted) && add(change),
      begun: () => setText(tail, "Following"),
      failed: (error) => {
        follow(false);
        list.prepend(h("li", {}, errorNote(error)));
      },
    });
  }

  /** @param {any} change */
  function add(change) {
    const item = changeItem(change);
    item.classList.add("fresh");
    list.prepend(item);
    while (list.children.length > SHOWN_MAX) list.lastElementChild.remove();
  }

  page.append(
    head("Change log", "Every committed change of every captured table, with the row before and after, and who made it."),
    h("section", { class: "card" },
      h("form", { onsubmit: (/** @type {Event} */ event) => { event.preventDefault(); void search(false); if (feed) follow(true); } },
        h("div", { class: "fields" },
          labelled("Table", [table.field, table.list]), labelled("Operation", op, "half"), labelled("Key", key, "half"),
          labelled("By user", user, "half"), labelled("Text", text, "wide"),
          h("div", { class: "actions" }, h("button", {}, "Search"), tail),
        ),
      ),
    ),
    h("section", { class: "card" }, state, list, wrong, h("div", {}, older)),
  );
  void search(false);
  capturedTables(signal).then((tables) => table.suggest(tables.map(({ name }) => name)), () => undefined);
}

/** @param {any} found @param {number} shown */
function summary(found, shown) {
  if (found.before && found.searched_to && !found.changes.length) return `No match since ${moment(found.searched_to)}; the log has more to search.`;
  if (!shown) return "No change in the log matches.";
  return `${count(shown)} ${shown === 1 ? "change" : "changes"}, the newest first${found.before ? "" : "; there are no more"}.`;
}

/** Whether a change of the feed matches the filters. @param {any} change @param {any} wanted */
function matches(change, wanted) {
  const rows = `${value(change.before)}${value(change.after)}`.toLowerCase();
  return (
    (!wanted.op || wanted.op === change.op) &&
    (!wanted.key || sameKey(wanted.key, keyText(change.key))) &&
    (!wanted.user || wanted.user === change.user) &&
    (!wanted.text || rows.includes(wanted.text.toLowerCase()))
  );
}
