/** Windows that slide: each slide ends with its own answer or error, and the last one counts. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { settled, until } from "./stage.js";
import { rows, wired } from "./wire.js";

const POSITION = "ab-1:1:";

/** @param {import("../src/index.js").Live} live */
const ids = (live) => live.value?.map(({ id }) => id);

/** @param {import("node:test").TestContext} t */
function windows(t) {
  const wire = wired(t);
  const { hw, next, deliver } = wire;
  let views = 0;
  const begin = async (/** @type {number[]} */ ...held) => {
    const { id, live } = await next("subscribe");
    const view = ++views;
    deliver({ type: "subscribed", id, view, key: ["id"] });
    deliver({ type: "snapshot", view, position: POSITION, rows: rows(...held) });
    return { id, view, live };
  };
  /** A live query with two rows. @param {string} table */
  const open = async (table) => {
    const live = hw.live({ table, limit: 2 });
    const { view } = await begin(1, 2);
    return { live, view };
  };
  const move = (/** @type {number} */ view, /** @type {number[]} */ ...held) =>
    deliver({ type: "reset", view, position: POSITION, reason: "window", rows: rows(...held) });
  const refuse = ({ request: id = "" }) =>
    deliver({ type: "error", id, code: "invalid_query", message: "after: expected 1 value" });
  const answer = ({ request: id = "" }) => deliver({ type: "answer", id, position: POSITION });
  return { ...wire, begin, open, move, refuse, answer };
}

test("an error reaches the slide that it is for", async (t) => {
  const { open, next, move, refuse } = windows(t);
  const [one, two] = [await open("a"), await open("b")];
  const [first, second] = [one.live.reanchor(["x"]), two.live.reanchor([2])];
  const asked = [await next("reanchor"), await next("reanchor")];
  refuse(asked[0]);
  await assert.rejects(first, { code: "invalid_query" });
  move(two.view, 3, 4);
  await second;
  assert.deepEqual([ids(one.live), ids(two.live)], [[1, 2], [3, 4]]);
  const again = one.live.reanchor([2]);
  await next("reanchor");
  move(one.view, 3);
  await again;
  assert.deepEqual(ids(one.live), [3]);
});

test("a slide before the subscription has begun waits for it", async (t) => {
  const { hw, sent, begin, next, move, lose } = windows(t);
  const live = hw.live({ table: "a", limit: 2 });
  const sliding = live.reanchor([2]);
  await settled(() => sent.length);
  assert.ok(!sent.some(({ type }) => type === "reanchor"));
  const { view } = await begin(1, 2);
  await next("reanchor");
  assert.deepEqual(ids(live), [1, 2]);
  move(view, 3, 4);
  await sliding;
  assert.deepEqual(ids(live), [3, 4]);
  lose();
  const again = live.reanchor([4]);
  const { live: asked, view: other } = await begin(3, 4);
  assert.deepEqual(asked.after, [2]);
  await next("reanchor");
  move(other, 5);
  await again;
  assert.deepEqual(ids(live), [5]);
});

test("a window that was closed meanwhile is not slid", async (t) => {
  const { open, sent, next, move } = windows(t);
  const { live, view } = await open("a");
  const first = live.reanchor([2]);
  const second = live.reanchor([4]);
  await next("reanchor");
  live.close();
  await assert.rejects(first, { code: "connection" });
  await assert.rejects(second, { code: "connection" });
  move(view, 3, 4);
  assert.ok(!sent.some(({ type }) => type === "reanchor"));
});

test("a slide to the present place needs no rows", async (t) => {
  const { open, next, answer, begin, lose } = windows(t);
  const { live } = await open("a");
  const sliding = live.reanchor(null);
  answer(await next("reanchor"));
  await sliding;
  assert.deepEqual(ids(live), [1, 2]);
  lose();
  assert.equal((await begin(1, 2)).live.after, null);
});

test("a slide interrupted by a lost connection is done on the next connection", async (t) => {
  const { open, next, begin, lose } = windows(t);
  const { live } = await open("a");
  const sliding = live.reanchor([2]);
  await next("reanchor");
  lose();
  assert.deepEqual((await begin(3, 4)).live.after, [2]);
  await sliding;
  assert.deepEqual(ids(live), [3, 4]);
});

test("of several slides of a shared window the last one counts", async (t) => {
  const { hw, open, next, deliver } = windows(t);
  const { live } = await open("a");
  hw.live({ table: "a", limit: 2 });
  const slides = [live.reanchor([2]), live.reanchor([4])];
  const [first, last] = [await next("subscribe"), await next("subscribe")];
  const come = ({ id = "" }, /** @type {number} */ view, /** @type {number[]} */ ...held) => {
    deliver({ type: "subscribed", id, view, key: ["id"] });
    deliver({ type: "snapshot", view, position: POSITION, rows: rows(...held) });
  };
  come(last, 8, 5, 6);
  await slides[1];
  come(first, 9, 3, 4);
  await slides[0];
  assert.deepEqual(ids(live), [5, 6]);
  assert.equal((await next("unsubscribe")).id, first.id);
});

test("the store of a row follows the window", async (t) => {
  const { hw, open, begin, deliver } = windows(t);
  const { live } = await open("a");
  hw.live({ table: "a", limit: 2 });
  const store = live.row([1]);
  let calls = 0;
  const end = store.subscribe(() => (calls += 1));
  const sliding = live.reanchor([0]);
  const { view } = await begin(1, 7);
  await sliding;
  await until(() => calls === 1);
  const update = { delta: "update", key: [1], row: { id: 1, x: 2 }, index: 0, cursor: [1] };
  deliver({ type: "deltas", view, position: "ab-3:3:", at: "", deltas: [update] });
  await until(() => calls === 2);
  assert.deepEqual(store.value, { id: 1, x: 2 });
  end();
});

test("a cursor is copied", async (t) => {
  const { open, next } = windows(t);
  const { live } = await open("a");
  const cursor = [2];
  live.reanchor(cursor).catch(() => {});
  cursor[0] = 3;
  assert.deepEqual((await next("reanchor")).after, [2]);
});
