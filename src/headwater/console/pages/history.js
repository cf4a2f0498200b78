/** What became of a record: its versions, the newest first, with what changed in each. */

import { ask, exact } from "../api.js";
import { changeItem } from "../changes.js";
import { fill, h, head, labelled, say, trouble } from "../dom.js";
import { count, key as keyText, sameKey } from "../format.js";
import { tail } from "../live.js";
import { captured, suggesting } from "../names.js";
import { Rewind } from "../rewind.js";

/** The log is read when what comes next is heard, or after so long. */
const HEARING_MS = 3_000;

/** @param {HTMLElement} page @param {any} context */
export function open(page, context) {
  const { signal, parameters, refused } = context;
  const table = suggesting({ required: true, placeholder: "orders", value: parameters.get("table") ?? "" });
  const key = h("input", { type: "text", required: true, placeholder: "42, or 7,2026", autocomplete: "off", value: parameters.get("key") ?? "" });
  const list = h("ol", { class: "changes", "aria-label": "Versions" });
  const state = h("p", { class: "muted", role: "status" }, "Name a table and a key, or select a key in the change log.");
  const wrong = h("div");
  const older = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => goOn() }, "Older changes");
  const lake = h("div");
  const rewind = new Rewind();
  /** Where the search for older versions goes on. @type {string | null} */
  let before = null;
  /** @type {(() => void) | undefined} */
  let feed;
  let asked = 0;
  let path = "";
  /** Those that are shown, by their number in the log. @type {Set<string>} */
  let shown = new Set();

  function show() {
    const [name, id] = [table.field.value.trim(), key.value.trim()];
    path = `history/${encodeURIComponent(name)}/${encodeURIComponent(id)}`;
    const number = ++asked;
    fill(list);
    list.removeAttribute("data-live");
    rewind.clear();
    before = null;
    older.hidden = true;
    fill(wrong);
    fill(lake);
    say(state, "Reading the log…");
    /** @type {any[]} */
    const heard = [];
    const read = async () => {
      try {
        const found = await ask(path, {}, signal, exact);
        if (number !== asked) return;
        shown = new Set();
        fill(list);
        rewind.clear();
        take(found.log);
        fill(lake, lakePart(path, found, signal, refused, rewind));
        heard.forEach(add);
      } catch (error) {
        if (signal.aborted || number !== asked) return;
        refused(error);
        feed?.();
        say(state, "");
        fill(wrong, trouble(/** @type {any} */ (error)));
      }
    };
    listen(name, read, (change) => {
      if (number !== asked || !sameKey(keyText(change.key), id)) return;
      heard.push(change);
      add(change);
    });
  }

  /** Add what was found to the end. @param {any} found */
  function take(found) {
    for (const change of found.changes) {
      shown.add(change.cursor.split(".")[1]);
      list.append(changeItem(change, { linked: false, whole: true }));
      rewind.older(change);
    }
    before = found.before;
    older.hidden = !before;
    say(state, words(list.children.length, before));
  }

  /** Search on from where the last search ended. */
  async function goOn() {
    const [number, from] = [asked, before];
    older.disabled = true;
    fill(wrong);
    say(state, "Reading the log…");
    try {
      const found = await ask(path, { before: from }, signal, exact);
      if (number === asked && from === before) take(found.log);
    } catch (error) {
      if (signal.aborted || number !== asked) return;
      refused(error);
      say(state, words(list.children.length, before));
      fill(wrong, trouble(/** @type {any} */ (error)));
    } finally {
      older.disabled = false;
    }
  }

  /**
   * Hear of what comes, and read the log from then on: so nothing between is missed. Where that
   * takes long the log is read at once, and again when it has begun.
   *
   * @param {string} name @param {() => Promise<void>} read @param {(change: any) => void} change
   */
  function listen(name, read, change) {
    const number = asked;
    const timer = setTimeout(() => number === asked && !signal.aborted && void read(), HEARING_MS);
    const settled = () => {
      clearTimeout(timer);
      if (number === asked && !signal.aborted) void read();
    };
    feed?.();
    feed = tail(context, name, {
      change,
      begun: () => {
        if (number === asked) list.setAttribute("data-live", "");
        settled();
      },
      over: () => {
        if (number === asked) list.removeAttribute("data-live");
        settled();
      },
    });
  }

  /** @param {any} change */
  function add(change) {
    const seq = String(change.seq);
    if (shown.has(seq)) return;
    shown.add(seq);
    const item = changeItem(change, { linked: false, whole: true });
    item.classList.add("fresh");
    list.prepend(item);
    rewind.newer(change);
    say(state, words(list.children.length, before));
  }

  page.append(
    head("Record history", "What became of a row: every version that the log has, with what changed and by whom. What is older is in the lake."),
    h("section", { class: "card" },
      h("form", { onsubmit: (/** @type {Event} */ event) => { event.preventDefault(); show(); } },
        h("div", { class: "fields" },
          labelled("Table", [table.field, table.list]), labelled("Key", key),
          h("div", { class: "actions" }, h("button", {}, "Show")),
        ),
      ),
    ),
    h("section", { class: "card" }, state, rewind.element, list, wrong, h("div", {}, older), lake),
  );
  if (table.field.value && key.value) show();
  captured(signal).then((tables) => table.suggest(tables.map(({ name }) => name)), () => undefined);
}

/** @param {number} versions @param {string | null} older */
function words(versions, older) {
  if (!versions) return older ? "Not among the newest changes; the log has more to look at." : "The log has no change of this record.";
  return `${count(versions)} ${versions === 1 ? "version" : "versions"} in the log${older ? ", and maybe older ones" : ""}.`;
}

/**
 * @param {string} path @param {any} found @param {AbortSignal} signal @param {(error: any) => void} refused
 * @param {Rewind} rewind goes through what the lake has, once that is known
 */
function lakePart(path, found, signal, refused, rewind) {
  const place = h("div", { class: "page" });
  const button = h("button", { type: "button", class: "quiet", onclick: read }, "Ask the lake");
  fill(place, h("div", { class: "actions" }, button, h("span", { class: "muted" }, "All versions since the pipeline began.")));

  async function read() {
    button.disabled = true;
    say(button, "Asking…");
    try {
      const { lake, trouble: why } = await ask(path, { lake: true, log: false }, signal, exact);
      if (lake) {
        rewind.replace(lake);
        fill(place, h("h2", {}, `${count(lake.length)} versions in the lake`),
          h("ol", { class: "changes", "aria-label": "Versions in the lake" }, lake.map((/** @type {any} */ version) =>
            changeItem({ ...version, table: "" }, { linked: false, whole: true }))));
      } else fill(place, elsewhere(why, found.command));
    } catch (error) {
      if (signal.aborted) return;
      refused(error);
      fill(place, trouble(/** @type {any} */ (error)));
    }
  }

  return place;
}

/** @param {string} why @param {string} command */
function elsewhere(why, command) {
  return h("div", { class: "note" },
    h("p", {}, `The lake cannot be asked from here: ${why}.`),
    h("p", { class: "hint" }, "This command asks it: ", h("code", {}, command)),
  );
}
