/** The hooks, message by message: what is shown after each message of the gateway. */

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";
import { createElement, useState } from "react";

import { render } from "./screen.js";
import { until } from "./stage.js";
import { wired } from "./wire.js";
import { cacheOf } from "../src/hooks/subscription-cache.js";
import { mutateOptimistically } from "../src/hooks/optimistic-updates.js";
import { liveRequest } from "../src/hooks/subscription-requests.js";
import { useLiveQuery, useMutation, usePresence, useTopic } from "../src/react.js";

/** @typedef {import("../src/hooks/optimistic-updates.js").OptimisticUpdates} OptimisticUpdates */

const $ = createElement;
/** @param {number} n */
const position = (n) => `1-${n}:${n}:`;
const at = "2026-01-31T12:00:00Z";
/** @param {number} id @param {number} index */
const enter = (id, index) => ({ delta: "enter", key: [id], row: { id }, index, cursor: [id] });
const ids = (/** @type {readonly any[]} */ rows = []) => rows.map(({ id }) => id).join(" ");

/** A list with one row, to which a mutation adds another. @param {import("node:test").TestContext} t */
async function list(t) {
  const wire = wired(t);
  /** @type {any} */
  let add;
  /** @type {string[]} */
  const shown = [];
  const List = () => {
    const optimistic = (/** @type {any} */ local, /** @type {any} */ { id }) =>
      local.live("rows", (/** @type {any[]} */ rows) => [...rows, { id }]);
    const [mutate, { pending }] = useMutation("add", { optimistic });
    add = mutate;
    const text = ids(useLiveQuery("rows").rows);
    if (shown.at(-1) !== text) shown.push(text);
    return `${text}${pending ? " …" : ""}`;
  };
  const page = render(t, wire.hw, $(List));
  const { id } = await wire.next("subscribe");
  wire.deliver({ type: "subscribed", id, view: 1, key: ["id"] });
  wire.deliver({ type: "snapshot", view: 1, position: position(10), rows: [enter(1, 0)] });
  await until(() => page.text === "1");
  shown.splice(0, shown.length, "1");
  const deltas = (/** @type {number} */ n, /** @type {any[]} */ ...deltas) =>
    wire.deliver({ type: "deltas", view: 1, position: position(n), at, deltas });
  const answer = ({ id = "" }, /** @type {number} */ n) =>
    wire.deliver({ type: "answer", id, position: position(n), value: null });
  return { ...wire, page, shown, add: (/** @type {string} */ id) => add({ id }), deltas, answer };
}

test("a patch that throws later does not stop the removal of another", async (t) => {
  /** @type {any[]} */
  const thrown = [];
  const { hw, next, deliver } = wired(t);
  const local = (/** @type {any} */ change) => (/** @type {OptimisticUpdates} */ each) => {
    for (const table of ["a", "b"]) each.table(table, change);
  };
  const cached = ["a", "b"].map((table) => cacheOf(hw).hold(hw, liveRequest(table)));
  for (const view of [1, 2]) {
    const { id } = await next("subscribe");
    deliver({ type: "subscribed", id, view, key: ["id"] });
    deliver({ type: "snapshot", view, position: position(10), rows: [enter(1, 0)] });
  }
  const shown = () => cached.map(({ shown }) => ids(shown.value));
  await until(() => shown().join() === "1,1");
  // A page would report this as an uncaught error; here it would end the process.
  t.mock.method(globalThis, "queueMicrotask", (/** @type {() => void} */ task) =>
    Promise.resolve().then(task).catch((error) => thrown.push(error.message)),
  );
  const draft = local((/** @type {any[]} */ rows) => [...rows, { id: "draft" }]);
  const good = mutateOptimistically(hw, "good", {}, draft);
  const needy = local((/** @type {any[]} */ rows) => {
    if (rows.length < 2) throw new Error("the row is gone");
    return rows;
  });
  mutateOptimistically(hw, "needy", {}, needy).catch(() => {});
  assert.deepEqual(shown(), ["1 draft", "1 draft"]);
  const { id } = await next("mutate");
  deliver({ type: "error", id, code: "sold_out", message: "none is left" });
  await assert.rejects(good, { code: "sold_out" });
  assert.deepEqual(shown(), ["1", "1"]);
  assert.deepEqual(new Set(thrown), new Set(["the row is gone"]));
});

test("the row comes before the answer", async (t) => {
  const { page, shown, add, next, deltas, answer } = await list(t);
  add("new");
  const mutate = await next("mutate");
  deltas(12, enter(2, 1));
  await until(() => page.text === "1 new …");
  answer(mutate, 12);
  await until(() => page.text === "1 2");
  assert.deepEqual(shown, ["1", "1 new", "1 2"]);
});

test("the answer comes before the row, and rows of other clients before both", async (t) => {
  const { page, shown, add, next, deltas, answer } = await list(t);
  add("new");
  answer(await next("mutate"), 12);
  await until(() => page.text === "1 new");
  deltas(11, enter(3, 1));
  deltas(12, enter(2, 1));
  await until(() => page.text === "1 2 3");
  assert.deepEqual(shown, ["1", "1 new", "1 2 3"]);
});

test("the position of the answer is after the row: the wait says when it has arrived", async (t) => {
  const { page, shown, add, next, deltas, answer } = await list(t);
  add("new");
  answer(await next("mutate"), 13);
  deltas(12, enter(2, 1));
  const wait = await next("wait");
  assert.equal(wait.position, position(13));
  assert.equal(page.text, "1 new");
  answer(wait, 13);
  await until(() => page.text === "1 2");
  assert.deepEqual(shown, ["1", "1 new", "1 2"]);
});

test("two mutations, one of them refused", async (t) => {
  const { page, shown, add, next, deltas, answer, deliver } = await list(t);
  add("new");
  const first = await next("mutate");
  add("newer").catch(() => {});
  const second = await next("mutate");
  await until(() => page.text === "1 new newer …");
  deliver({ type: "error", id: second.id, code: "refused", message: "no" });
  await until(() => page.text === "1 new …");
  deltas(12, enter(2, 1));
  answer(first, 12);
  await until(() => page.text === "1 2");
  assert.deepEqual(shown, ["1", "1 new", "1 new newer", "1 new", "1 2"]);
});

test("a topic, and its flushes", async (t) => {
  const { hw, next, deliver } = wired(t);
  /** @type {any[]} */
  const flushes = [];
  const Topic = () => {
    const { status, value } = useTopic("chat:1", { onOps: (ops) => flushes.push(ops) });
    return `${status} ${ids(value?.messages)}`;
  };
  const page = render(t, hw, $(Topic));
  const { id, topic } = await next("subscribe");
  assert.equal(topic, "chat:1");
  deliver({ type: "subscribed", id, view: 1 });
  await until(() => page.text === "live ");
  const ops = [{ op: "upsert", entity: "messages", key: [7], row: { id: 7 } }];
  deliver({ type: "topic", view: 1, position: position(11), at, ops });
  await until(() => page.text === "live 7");
  assert.deepEqual(flushes, [ops]);
});

test("presence: the members, the own state, and messages", async (t) => {
  const { hw, sent, next, deliver } = wired(t);
  /** @type {any} */
  let hook;
  /** @type {any} */
  let set;
  /** @type {any[]} */
  const received = [];
  const Room = () => {
    const [state, setState] = useState({ typing: false });
    set = setState;
    // Another object each time, with the same state.
    hook = usePresence("room:1", { ...state }, { onMessage: ({ data }) => received.push(data) });
    return hook.members.map((/** @type {any} */ each) => `${each.user}:${each.state.typing}`).join(" ");
  };
  const page = render(t, hw, $(Room));
  const { id, channel } = await next("subscribe");
  assert.deepEqual(channel, { name: "room:1", present: true, state: { typing: false } });
  deliver({ type: "subscribed", id, view: 1 });
  const ann = { member: "a", user: "ann", state: { typing: false } };
  const bob = { member: "b", user: "bob", state: { typing: true } };
  deliver({ type: "presence", view: 1, joined: [ann, bob], whole: true });
  await until(() => page.text === "ann:false bob:true");
  assert.deepEqual(sent, [], "the state is known");
  set({ typing: true });
  const sentState = await next("state");
  assert.deepEqual(sentState.state, { typing: true });
  deliver({ type: "answer", id: sentState.request, position: position(11) });
  deliver({ type: "presence", view: 1, joined: [{ ...ann, state: { typing: true } }], left: ["b"] });
  await until(() => page.text === "ann:true");
  const published = hook.publish("hello");
  const publish = await next("publish");
  assert.equal(publish.data, "hello");
  deliver({ type: "answer", id: publish.request, position: position(11) });
  await published;
  deliver({ type: "message", view: 1, id: "m1", data: "hi", at });
  await until(() => received.length);
  assert.deepEqual(received, ["hi"]);
  assert.deepEqual(sent, [], "nothing more was said");
});

test("every hook is in the reference, and the examples are those of the application", async () => {
  const root = new URL("../../../", import.meta.url);
  const read = (/** @type {string} */ path) => readFile(new URL(path, root), "utf8");
  const reference = await read("docs/reference/react.md");
  const modules = [await import("../src/react.js"), await import("../src/tanstack.js")];
  for (const name of modules.flatMap(Object.keys)) assert.match(reference, new RegExp(`\`<?${name}\\b`));
  const sources = ["main.jsx", "App.jsx", "Board.jsx", "PlaceOrder.jsx", "orders.js"];
  const files = await Promise.all(sources.map((name) => read(`examples/react/src/${name}`)));
  const known = new Set(files.join("\n").split("\n"));
  const examples = [...(await read("docs/howto/react.md")).matchAll(/^```jsx example\n(.*?)^```/gms)];
  const lines = examples.flatMap(([, text]) => text.split("\n")).filter((line) => !known.has(line));
  assert.deepEqual(lines, []);
  assert.ok(examples.length > 5);
});
