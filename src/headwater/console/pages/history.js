/** The history of a record: its versions, the newest first, with what changed in each. */

import { ask, exact } from "../api.js";
import { changeItem } from "../changes.js";
import { fill, h, head, labelled, setText, errorNote } from "../dom.js";
import { count, key as keyText, sameKey } from "../format.js";
import { tail } from "../subscriptions.js";
import { capturedTables, suggestField } from "../suggestions.js";
import { Rewind } from "../rewind.js";

/** The log is read when the feed has begun, or after this time. */
const FEED_MS = 3_000;

/** @param {HTMLElement} page @param {any} context */
export function open(page, context) {
  const { signal, parameters, refused } = context;
  const table = suggestField({ required: true, placeholder: "orders", value: parameters.get("table") ?? "" });
  const key = h("input", { type: "text", required: true, placeholder: "42, or 7,2026", autocomplete: "off", value: parameters.get("key") ?? "" });
  const list = h("ol", { class: "changes", "aria-label": "Versions" });
  const state = h("p", { class: "muted", role: "status" }, "Name a table and a key, or select a key in the change log.");
  const wrong = h("div");
  const older = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => readOlder() }, "Older changes");
  const lake = h("div");
  const rewind = new Rewind();
  /** Where the search for older versions continues. @type {string | null} */
  let before = null;
  /** @type {(() => void) | undefined} */
  let feed;
  let asked = 0;
  let path = "";
  /** The log numbers of the versions that are shown. @type {Set<string>} */
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
    setText(state, "Reading the log…");
    /** @type {any[]} */
    const received = [];
    const read = async () => {
      try {
        const found = await ask(path, {}, signal, exact);
        if (number !== asked) return;
        shown = new Set();
        fill(list);
        rewind.clear();
        addOlder(found.log);
        fill(lake, lakePart(path, found, signal, refused, rewind));
        received.forEach(add);
      } catch (error) {
        if (signal.aborted || number !== asked) return;
        refused(error);
        feed?.();
        setText(state, "");
        fill(wrong, errorNote(/** @type {any} */ (error)));
      }
    };
    listen(name, read, (change) => {
      if (number !== asked || !sameKey(keyText(change.key), id)) return;
      received.push(change);
      add(change);
    });
  }

  /** Add older versions at the end. @param {any} found */
  function addOlder(found) {
    for (const change of found.changes) {
      shown.add(change.cursor.split(".")[1]);
      list.append(changeItem(change, { linked: false, whole: true }));
      rewind.older(change);
    }
    before = found.before;
    older.hidden = !before;
    setText(state, words(list.children.length, before));
  }

  /** Search from where the last search ended. */
  async function readOlder() {
    const [number, from] = [asked, before];
    older.disabled = true;
    fill(wrong);
    setText(state, "Reading the log…");
    try {
      const found = await ask(path, { before: from }, signal, exact);
      if (number === asked && from === before) addOlder(found.log);
    } catch (error) {
      if (signal.aborted || number !== asked) return;
      refused(error);
      setText(state, words(list.children.length, before));
      fill(wrong, errorNote(/** @type {any} */ (error)));
    } finally {
      older.disabled = false;
    }
  }

  /**
   * Start a feed, then read the log: so no change between the two is missed. If the feed takes long
   * to begin, the log is read before that, and again after.
   *
   * @param {string} name @param {() => Promise<void>} read @param {(change: any) => void} change
   */
  function listen(name, read, change) {
    const number = asked;
    const timer = setTimeout(() => number === asked && !signal.aborted && void read(), FEED_MS);
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
      failed: () => {
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
    setText(state, words(list.children.length, before));
  }

  page.append(
    head("Record history", "Every version of a row in the log, with what changed and who changed it. Older versions are in the lake."),
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
  capturedTables(signal).then((tables) => table.suggest(tables.map(({ name }) => name)), () => undefined);
}

/** @param {number} versions @param {string | null} older */
function words(versions, older) {
  if (!versions) return older ? "Not among the newest changes; the log has more to search." : "The log has no change of this record.";
  return `${count(versions)} ${versions === 1 ? "version" : "versions"} in the log${older ? ", and maybe older ones" : ""}.`;
}

/**
 * @param {string} path @param {any} found @param {AbortSignal} signal @param {(error: any) => void} refused
 * @param {Rewind} rewind shows the versions of the lake when they have been read
 */
function lakePart(path, found, signal, refused, rewind) {
  const place = h("div", { class: "page" });
  const button = h("button", { type: "button", class: "quiet", onclick: read }, "Read the lake");
  fill(place, h("div", { class: "actions" }, button, h("span", { class: "muted" }, "All versions since the pipeline was first started.")));

  async function read() {
    button.disabled = true;
    setText(button, "Reading…");
    try {
      const { lake, lake_error: why } = await ask(path, { lake: true, log: false }, signal, exact);
      if (lake) {
        rewind.replace(lake);
        fill(place, h("h2", {}, `${count(lake.length)} versions in the lake`),
          h("ol", { class: "changes", "aria-label": "Versions in the lake" }, lake.map((/** @type {any} */ version) =>
            changeItem({ ...version, table: "" }, { linked: false, whole: true }))));
      } else fill(place, elsewhere(why, found.command));
    } catch (error) {
      if (signal.aborted) return;
      refused(error);
      fill(place, errorNote(/** @type {any} */ (error)));
    }
  }

  return place;
}

/** @param {string} why @param {string} command */
function elsewhere(why, command) {
  return h("div", { class: "note" },
    h("p", {}, `The lake cannot be read from here: ${why}.`),
    h("p", { class: "hint" }, "Run this command instead: ", h("code", {}, command)),
  );
}
