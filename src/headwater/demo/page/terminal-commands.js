/** Commands that a visitor can run in a terminal. */

import { byId, element, setText } from "./dom.js";

const ORDER =
  "insert into orders (item, customer, region, status, amount)" +
  " values ('Samovar', 'You', 'north', 'new', 420);";
const MOMENT_EVERY_MS = 10_000;

/** @param {{psql: string, tail: string, as_of: string | null}} about */
export function showTerminalCommands(about) {
  const list = byId("hand");
  list.append(
    entry("Open psql", about.psql),
    entry("Place an order", ORDER),
    entry("Follow the changes", about.tail),
  );
  if (!about.as_of) return;
  const asOf = entry("Read the orders of a minute ago", "");
  const code = asOf.querySelector("code");
  const show = () => setText(code, about.as_of.replace("{moment}", minuteAgo()));
  show();
  setInterval(show, MOMENT_EVERY_MS);
  list.append(asOf);
}

const minuteAgo = () =>
  new Date(Date.now() - 60_000).toISOString().slice(0, 19).replace("T", " ");

function entry(why, line) {
  const button = element("button.button.small", { type: "button" }, "Copy");
  const code = element("code", { tabindex: "0" }, line);
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(code.textContent);
    setText(button, "Copied");
    setTimeout(() => setText(button, "Copy"), 1500);
  });
  return element("li", null, element("span.quiet", why), code, button);
}
