/**
 * The page: two people look at one table, each through a connection of their own, with a token of
 * their own. What they may see is decided by the database.
 */

import { connect } from "/client/index.js";

import { Board } from "./board.js";
import { showChat } from "./chat.js";
import { byId, complain, say, soon, write } from "./dom.js";
import { showByHand } from "./hand.js";
import { tokenOf } from "./people.js";
import { showRevenue } from "./revenue.js";

/** So many rows are written by a burst, and so many of them in each transaction. */
const [BURST, TOGETHER] = [1000, 5];
const number = (count) => count.toLocaleString("en");

const LINKS = {
  connecting: "Connecting",
  open: "Live",
  closed: "Closed",
  failed: "Lost",
};

/** A client of one of the shop's people; the token is asked for anew before it ends. */
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
  write(byId("least"), tools.elements.least.value);
  later();
});
const later = soon(40, showBoards);
tools.addEventListener("submit", (event) => event.preventDefault());

for (const [name, hw] of Object.entries(people)) {
  const button = byId(name).querySelector("button");
  button.addEventListener("click", () => hw.mutate("place_order").catch(complain));
}

// ---------------------------------------------------------------- a burst

const burst = byId("burst");

burst.addEventListener("click", async () => {
  burst.disabled = true;
  const began = performance.now();
  let written = 0;
  const trade = async () => {
    const { value } = await people.manager.mutate("trade", { writes: TOGETHER });
    written += value;
    write(burst, `${number(written)} written`);
  };
  try {
    await Promise.all(Array.from({ length: BURST / TOGETHER }, trade));
    const seconds = ((performance.now() - began) / 1000).toFixed(1);
    say(`${number(written)} rows written, ${TOGETHER} in a transaction, in ${seconds} s`);
  } catch (error) {
    complain(error);
  }
  write(burst, `${number(BURST)} writes`);
  burst.disabled = false;
});

// ---------------------------------------------------------------- the connection

function showLink() {
  const states = Object.values(people).map((hw) => hw.status.value);
  const bad = ["failed", "closed", "connecting"];
  const worst = bad.find((state) => states.includes(state)) ?? "open";
  const link = byId("link");
  link.dataset.state = worst;
  write(link.lastElementChild, LINKS[worst]);
  byId("again").hidden = worst !== "failed";
}
for (const hw of Object.values(people)) hw.status.subscribe(showLink);
// A client that has given up stays so; the page begins anew when the visitor says so.
byId("again").addEventListener("click", () => location.reload());

showLink();
showBoards();
showChat(people.manager);
const about = await (await fetch("/demo/about")).json();
showRevenue(people.manager, about);
showByHand(about);
