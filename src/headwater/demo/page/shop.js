/**
 * The page: two people see one table, each with their own connection and token. The database decides
 * which rows each of them may see.
 */

import { connect } from "/client/index.js";

import { Board } from "./board.js";
import { showChat } from "./chat.js";
import { byId, showError, showNote, debounce, setText } from "./dom.js";
import { showTerminalCommands } from "./terminal-commands.js";
import { tokenOf } from "./tokens.js";
import { showRevenue } from "./revenue.js";

/** The rows that a burst writes, and the rows of each transaction. */
const [BURST, PER_TRANSACTION] = [1000, 5];
const number = (count) => count.toLocaleString("en");

const STATES = {
  connecting: "Connecting",
  open: "Live",
  closed: "Closed",
  failed: "Lost",
};

/** A client of one of the shop's people; the token is renewed before it expires. */
const as = (person) => connect(location.origin, { token: () => tokenOf(person) });

const people = { manager: as("manager"), clerk: as("clerk") };
const boards = Object.entries(people).map(([name, hw]) => new Board(hw, byId(name)));

// ---------------------------------------------------------------- what the boards show

const tools = byId("tools");

function query() {
  const chosen = Object.fromEntries(new FormData(tools));
  const where = [];
  if (chosen.status) where.push(["status", "=", chosen.status]);
  if (chosen.region) where.push(["region", "=", chosen.region]);
  if (Number(chosen.least)) where.push(["amount", ">=", Number(chosen.least)]);
  const [column, direction = "asc"] = chosen.order.split(" ");
  return { table: "orders", where, order: [[column, direction]], limit: Number(chosen.limit) };
}

function showBoards() {
  for (const board of boards) board.show(query());
}

tools.addEventListener("input", () => {
  setText(byId("least"), tools.elements.least.value);
  later();
});
const later = debounce(40, showBoards);
tools.addEventListener("submit", (event) => event.preventDefault());

for (const [name, hw] of Object.entries(people)) {
  const button = byId(name).querySelector("button");
  button.addEventListener("click", () => hw.mutate("place_order").catch(showError));
}

// ---------------------------------------------------------------- a burst

const burst = byId("burst");

burst.addEventListener("click", async () => {
  burst.disabled = true;
  const began = performance.now();
  let written = 0;
  const trade = async () => {
    const { value } = await people.manager.mutate("trade", { writes: PER_TRANSACTION });
    written += value;
    setText(burst, `${number(written)} written`);
  };
  try {
    await Promise.all(Array.from({ length: BURST / PER_TRANSACTION }, trade));
    const seconds = ((performance.now() - began) / 1000).toFixed(1);
    showNote(`${number(written)} rows written, ${PER_TRANSACTION} in a transaction, in ${seconds} s`);
  } catch (error) {
    showError(error);
  }
  setText(burst, `${number(BURST)} writes`);
  burst.disabled = false;
});

// ---------------------------------------------------------------- the connection

function showConnection() {
  const states = Object.values(people).map((hw) => hw.status.value);
  const bad = ["failed", "closed", "connecting"];
  const worst = bad.find((state) => states.includes(state)) ?? "open";
  const link = byId("link");
  link.dataset.state = worst;
  setText(link.lastElementChild, STATES[worst]);
  byId("again").hidden = worst !== "failed";
}
for (const hw of Object.values(people)) hw.status.subscribe(showConnection);
// A client that gave up does not connect again: the visitor reloads the page.
byId("again").addEventListener("click", () => location.reload());

showConnection();
showBoards();
showChat(people.manager);
const about = await (await fetch("/demo/about")).json();
showRevenue(people.manager, about);
showTerminalCommands(about);
