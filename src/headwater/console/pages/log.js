/** The change log: a search, newest first, and what comes while one looks. */

import { ask, exact } from "../api.js";
import { changeItem } from "../changes.js";
import { fill, h, head, labelled, say, trouble } from "../dom.js";
import { count, key as keyText, moment, sameKey, value } from "../format.js";
import { tail as tailOf } from "../live.js";
import { captured, suggesting } from "../names.js";

const PART = 50;
const SHOWN_MAX = 500;
const OPS = ["insert", "update", "delete", "truncate", "reset"];

/** @param {HTMLElement} page @param {any} context */
export function open(page, context) {
  const { signal, parameters, refused } = context;
  const table = suggesting({ placeholder: "any", value: parameters.get("table") ?? "" });
  const op = h("select", {}, ["", ...OPS].map((name) => h("option", { value: name, selected: name === parameters.get("op") }, name || "any")));
  const key = h("input", { type: "text", placeholder: "42", autocomplete: "off", value: parameters.get("key") ?? "" });
  const user = h("input", { type: "text", placeholder: "any", autocomplete: "off", value: parameters.get("user") ?? "" });
  const text = h("input", { type: "search", placeholder: "anywhere in the row", value: parameters.get("text") ?? "" });
  const list = h("ol", { class: "changes", "aria-label": "Changes" });
  const state = h("p", { class: "muted", role: "status" });
  const wrong = h("div");
  const older = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => search(true) }, "Older changes");
  const tail = h("button", { type: "button", class: "quiet", "aria-pressed": "false", onclick: () => follow(!feed) }, "Follow");
  const wish = () => ({ table: table.field.value.trim(), op: op.value, key: key.value.trim(), user: user.value.trim(), text: text.value.trim() });
  /** @type {(() => void) | undefined} */
  let feed;
  /** @type {string | null} */
  let before = null;
  /** What was searched for: the fields may say something else by now. */
  let searched = wish();
  let asked = 0;

  async function search(/** @type {boolean} */ more) {
    const number = ++asked;
    if (!more) [before, searched] = [null, wish()];
    const said = more ? state.textContent : "";
    say(state, "Searching…");
    fill(wrong);
    try {
      const found = await ask("log", { ...searched, before, limit: PART }, signal, exact);
      if (number !== asked) return;
      const items = found.changes.map((/** @type {any} */ change) => changeItem(change));
      if (more) list.append(...items);
      else fill(list, items);
      before = found.before;
      older.hidden = !before;
      say(state, summary(found, list.children.length));
    } catch (error) {
      if (signal.aborted || number !== asked) return;
      refused(error);
      say(state, said);
      if (!more) {
        fill(list);
        older.hidden = true;
      }
      fill(wrong, trouble(/** @type {any} */ (error)));
    }
  }

  function follow(/** @type {boolean} */ on) {
    feed?.();
    feed = undefined;
    tail.setAttribute("aria-pressed", String(on));
    say(tail, on ? "Beginning…" : "Follow");
    if (!on) return;
    const wanted = wish();
    feed = tailOf(context, wanted.table, {
      change: (change) => fits(change, wanted) && add(change),
      begun: () => say(tail, "Following"),
      over: (error) => {
        follow(false);
        list.prepend(h("li", {}, trouble(error)));
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
  captured(signal).then((tables) => table.suggest(tables.map(({ name }) => name)), () => undefined);
}

/** @param {any} found @param {number} shown */
function summary(found, shown) {
  if (found.before && found.searched_to && !found.changes.length) return `Nothing since ${moment(found.searched_to)}; there is more to look at.`;
  if (!shown) return "Nothing in the log fits.";
  return `${count(shown)} ${shown === 1 ? "change" : "changes"}, the newest first${found.before ? "" : "; these are all"}.`;
}

/** Whether what a feed brings is what was searched for. @param {any} change @param {any} wish */
function fits(change, wish) {
  const rows = `${value(change.before)}${value(change.after)}`.toLowerCase();
  return (
    (!wish.op || wish.op === change.op) &&
    (!wish.key || sameKey(wish.key, keyText(change.key))) &&
    (!wish.user || wish.user === change.user) &&
    (!wish.text || rows.includes(wish.text.toLowerCase()))
  );
}
