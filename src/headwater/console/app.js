/**
 * The console: pages in one frame, with one connection for all of them. A page is closed when another
 * is opened, so that its subscriptions exist only while it is visible. A tab in the background closes
 * its page too: gateways report their activity only while a page shows it.
 */

import { ask, open as connectToGateway, token, wantsToken } from "./api.js";
import { fill, h, head, errorNote } from "./dom.js";

const PAGES = [
  ["overview", "Overview"],
  ["tables", "Tables"],
  ["sources", "Sources"],
  ["views", "Subscriptions"],
  ["sessions", "Sessions"],
  ["log", "Change log"],
  ["history", "Record history"],
  ["pipeline", "Pipeline"],
  ["playground", "Playground"],
];
const HIDDEN_MS = 30_000;

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const nav = /** @type {HTMLElement} */ (document.getElementById("pages"));
const link = /** @type {HTMLElement} */ (document.getElementById("link"));
const menu = /** @type {HTMLElement} */ (document.getElementById("menu"));

/** @type {any} */
let client;
/** Ends the open page. @type {(() => void) | undefined} */
let leave;
let opened = 0;

// ------------------------------------------------------------------ pages

function requestedPage() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const name = PAGES.some(([known]) => known === path) ? path : "overview";
  return { name, parameters: new URLSearchParams(query) };
}

async function show() {
  const number = ++opened;
  close();
  const { name, parameters } = requestedPage();
  const title = PAGES.find(([known]) => known === name)?.[1] ?? "";
  document.title = `${title} · Headwater`;
  for (const each of nav.querySelectorAll("a")) {
    if (each.dataset.page === name) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  openMenu(false);
  try {
    const info = await ask("overview");
    if (number !== opened) return;
    if (client?.status.value === "failed") client = undefined; // It gave up: connect again.
    client ??= newClient();
    const { open } = await import(`./pages/${name}.js`);
    if (number !== opened) return;
    const page = h("div", { class: "page", "data-page": name });
    const ending = new AbortController();
    const refused = (/** @type {any} */ error) => {
      if (number === opened && wantsToken(error)) askForToken(error);
    };
    fill(main, page);
    leave = () => ending.abort();
    open(page, { client, info, parameters, signal: ending.signal, refused });
    main.setAttribute("data-ready", name);
  } catch (error) {
    if (number !== opened) return;
    if (wantsToken(error)) askForToken(error);
    else fill(main, h("div", { class: "page" }, head(title, null), errorNote(/** @type {any} */ (error)), again()));
  }
}

function close() {
  leave?.();
  leave = undefined;
  main.removeAttribute("data-ready");
}

function again() {
  return h("p", {}, h("button", { type: "button", onclick: show }, "Try again"));
}

// ------------------------------------------------------------------ token

/** @param {any} error */
function askForToken(error) {
  opened += 1;
  close();
  client?.close();
  client = undefined;
  if (token.page && error.code !== "admin_only") {
    location.replace(token.page + location.hash);
    return;
  }
  const field = h("input", { type: "password", autocomplete: "off", required: true, spellcheck: "false", "aria-describedby": "token-why" });
  const form = h(
    "form",
    {
      onsubmit: (/** @type {Event} */ event) => {
        event.preventDefault();
        token.value = field.value.trim();
        void show();
      },
    },
    h("label", {}, "Token", field),
    h("div", { class: "actions" }, h("button", {}, "Open the console")),
    h("p", { class: "muted", id: "token-why" }, "The token is stored in this tab only, until the tab is closed."),
  );
  const first = error.code === "token_missing";
  fill(
    main,
    h(
      "div",
      { class: "page", "data-page": "token" },
      head("A token is needed", "The console is for admins: paste a token with the admin claim (headwater_admin, unless the setting [auth] admin_claim names another)."),
      !first && errorNote(error),
      h("section", { class: "card" }, form),
    ),
  );
  token.value = undefined;
  fill(link);
  field.focus();
}

/** @type {Record<string, string>} */
const STATES = { open: "Connected", connecting: "Connecting…", failed: "Disconnected", closed: "" };

function newClient() {
  const made = connectToGateway((error) => {
    if (wantsToken(error) && client === made) askForToken(error);
  });
  const showStatus = () => {
    if (client !== made) return;
    const state = made.status.value;
    link.dataset.state = state;
    fill(link, h("span", { class: "wide" }, STATES[state] ?? state));
  };
  made.status.subscribe(showStatus);
  queueMicrotask(showStatus);
  return made;
}

// ------------------------------------------------------------------ frame

function drawNav() {
  const links = PAGES.map(([name, title]) => h("a", { href: `#/${name}`, "data-page": name }, title));
  fill(nav, h("ul", {}, links.map((each) => h("li", {}, each))));
  nav.addEventListener("keydown", (event) => {
    const at = links.indexOf(document.activeElement);
    const step = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: links.length - 1 }[event.key];
    if (at < 0 || step === undefined) return;
    event.preventDefault();
    links[(step + links.length) % links.length].focus();
  });
  menu.addEventListener("click", () => openMenu(!nav.hasAttribute("data-open")));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !nav.hasAttribute("data-open")) return;
    openMenu(false);
    menu.focus();
  });
}

/** @param {boolean} isOpen */
function openMenu(isOpen) {
  nav.toggleAttribute("data-open", isOpen);
  menu.setAttribute("aria-expanded", String(isOpen));
}

const THEME = "headwater.theme";
const THEMES = ["system", "light", "dark"];

function drawTheme() {
  const button = /** @type {HTMLElement} */ (document.getElementById("theme"));
  const set = (/** @type {string} */ theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    fill(button, "Theme", h("span", { class: "wide" }, `: ${theme}`));
    button.setAttribute("aria-label", `Theme: ${theme}`);
    localStorage.setItem(THEME, theme);
  };
  const now = () => localStorage.getItem(THEME) ?? "system";
  button.addEventListener("click", () => set(THEMES[(THEMES.indexOf(now()) + 1) % THEMES.length]));
  set(THEMES.includes(now()) ? now() : "system");
}

/** @type {ReturnType<typeof setTimeout> | undefined} */
let hiding;
function closeWhileHidden() {
  clearTimeout(hiding);
  if (document.visibilityState === "hidden") hiding = setTimeout(close, HIDDEN_MS);
}
closeWhileHidden(); // A tab may be opened in the background.
document.addEventListener("visibilitychange", () => {
  closeWhileHidden();
  if (document.visibilityState === "hidden") return;
  if (!leave && client) void show();
});

document.querySelector(".skip")?.addEventListener("click", (event) => {
  event.preventDefault(); // The address after # names a page.
  main.focus();
});
window.addEventListener("hashchange", async () => {
  await show();
  window.scrollTo(0, 0);
});
drawTheme();
drawNav();
void show();
