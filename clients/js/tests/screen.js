/**
 * A page without a browser, to render components into.
 */

import { Window } from "happy-dom";
import { createElement, StrictMode } from "react";

const window = new Window();
Object.assign(globalThis, { window, document: window.document });
// Node has one since version 21.
globalThis.navigator ??= /** @type {any} */ ({ userAgent: "" });
// React looks for them when it is loaded.
const { createRoot } = await import("react-dom/client");
const { HeadwaterProvider } = await import("../src/react.js");

/**
 * Render a component below a provider, as an application does in development: React mounts
 * everything twice. Returns the text of the page, and a function that shows other components.
 *
 * @param {import("node:test").TestContext} test
 * @param {import("../src/index.js").Client} client
 * @param {import("react").ReactNode} children
 */
export function render(test, client, children) {
  const element = document.createElement("div");
  const root = createRoot(element);
  const show = (/** @type {import("react").ReactNode} */ shown) =>
    root.render(
      createElement(StrictMode, null, createElement(HeadwaterProvider, { client }, shown)),
    );
  show(children);
  test.after(() => root.unmount());
  return {
    show,
    get text() {
      return element.textContent;
    },
  };
}
