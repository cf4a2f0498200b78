/**
 * The chat. An answer of the assistant is a row of the table messages that grows while it is written:
 * a text stream writes it, and every tab that follows the topic of the room receives the whole row.
 */

import { byId, showError, element, toggleClass, setText } from "./dom.js";
import { draw } from "./frames.js";

/** Each of the shop's people has a room with their name, which no other person may follow. */
const ROOM = "Mira";
const EXAMPLES = ["How many orders?", "Which region leads?", "How does this work?"];
const MESSAGES_MAX = 40;

/** @param {any} hw */
export function showChat(hw) {
  /** By id. @type {Map<number, any>} */
  const rows = new Map();
  const show = () => showMessages(rows);

  /** Read the messages from before the topic began. Those that it has sent since are newer. */
  async function read() {
    for (const row of await hw.query("said_before")) {
      if (!rows.has(row.id)) rows.set(row.id, row);
    }
    draw(show);
  }

  const topic = hw.topic(`chat:${ROOM}`, (ops) => {
    for (const { op, row } of ops) {
      if (op === "upsert") rows.set(row.id, row);
      else rows.clear();
    }
    if (rows.size) draw(show);
    else read().catch(showError);
  });
  topic.ready.then(read).catch(showError);

  const say = (text) => hw.mutate("say", { text }).catch(showError);
  const form = byId("say");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = form.elements.text.value.trim();
    if (text) say(text);
    form.reset();
  });
  for (const text of EXAMPLES) {
    const button = element("button.ask", { type: "button" }, text);
    button.addEventListener("click", () => say(text));
    byId("asks").append(button);
  }
}

/** @type {Map<number, {line: HTMLElement, row: any}>} */
const shown = new Map();

/** @param {Map<number, any>} rows */
function showMessages(rows) {
  const ids = [...rows.keys()].sort((a, b) => a - b);
  for (const id of ids.splice(0, ids.length - MESSAGES_MAX)) rows.delete(id);
  const list = byId("messages");
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  for (const [id, { line }] of shown) {
    if (rows.has(id)) continue;
    line.remove();
    shown.delete(id);
  }
  ids.forEach((id, place) => {
    const row = rows.get(id);
    const known = shown.get(id);
    if (known?.row === row) return;
    const line = known?.line ?? element("p", { class: `message ${row.author}` });
    setText(line, row.content);
    toggleClass(line, "writing", row.state === "streaming");
    shown.set(id, { line, row });
    if (!known) list.insertBefore(line, list.children[place] ?? null);
  });
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}
