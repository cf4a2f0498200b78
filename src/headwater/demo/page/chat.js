/**
 * The chat. What the assistant says is a row of the table messages that grows while it speaks: a
 * text stream writes it, and every tab that follows the topic of the room is sent it as it is.
 */

import { byId, complain, element, mark, write } from "./dom.js";
import { draw } from "./frames.js";

/** Each of the shop's people has a room with their name, which nobody else may follow. */
const ROOM = "Mira";
const ASKS = ["How many orders?", "Which region leads?", "How does this work?"];
const KEPT = 40;

/** @param {any} hw */
export function showChat(hw) {
  /** By id. @type {Map<number, any>} */
  const rows = new Map();
  const show = () => showMessages(rows);

  /** What was said before the topic was followed. What it has told since is newer. */
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
    else read().catch(complain);
  });
  topic.ready.then(read).catch(complain);

  const say = (text) => hw.mutate("say", { text }).catch(complain);
  const form = byId("say");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = form.elements.text.value.trim();
    if (text) say(text);
    form.reset();
  });
  for (const text of ASKS) {
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
  for (const id of ids.splice(0, ids.length - KEPT)) rows.delete(id);
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
    write(line, row.content);
    mark(line, "writing", row.state === "streaming");
    shown.set(id, { line, row });
    if (!known) list.insertBefore(line, list.children[place] ?? null);
  });
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}
