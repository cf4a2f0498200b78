/**
 * The newest position that a client has seen, on any connection: no subscription begins before it,
 * no older data is shown, and `waitFor` waits for every subscription.
 */

import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { settled, until } from "./stage.js";
import { rows, wired } from "./wire.js";

/** @param {number} n */
const at = (n) => `ab-${n}:${n}:`;

/** A live query that has begun. @param {ReturnType<typeof wired>} wire */
async function begun({ hw, next, deliver }, view = 1, position = at(10)) {
  const live = hw.live({ table: `t${view}` });
  const { id } = await next("subscribe");
  deliver({ type: "subscribed", id, view, key: ["id"] });
  deliver({ type: "snapshot", view, position, rows: rows(1, 2) });
  await live.ready;
  return live;
}

/** @param {import("../src/index.js").Live} live */
const ids = (live) => live.value?.map(({ id }) => id);

describe("a subscription does not begin before a position that was seen", () => {
  test("in any message, on any connection", async (t) => {
    const wire = wired(t);
    const { hw, next, deliver, lose } = wire;
    await begun(wire);
    const seen = [at(10)];
    const check = async () => {
      const feed = hw.changes({ tables: ["a"] }, () => {});
      assert.equal((await next("subscribe")).after, seen.at(-1));
      feed.close();
    };
    await check();
    deliver({ type: "deltas", view: 1, position: at(12), at: "", deltas: [] });
    seen.push(at(12));
    await check();
    deliver({ type: "deltas", view: 1, position: at(11), at: "", deltas: [] });
    await check();
    const mutating = hw.mutate("place");
    deliver({ type: "answer", id: (await next("mutate")).id, position: at(15), value: 1 });
    await mutating;
    seen.push(at(15));
    await check();
    lose();
    assert.equal((await next("subscribe")).after, at(15));
    const { length } = wire.sent;
    hw.channel("room:1");
    await until(() => wire.sent.length > length);
    const channel = wire.sent.find((message) => message.channel);
    assert.ok(!("after" in channel), "a channel has no positions");
  });

  test("a feed is ready when it has a position", async (t) => {
    const { hw, next, deliver, lose, errors } = wired(t);
    /** @type {number[]} */
    const got = [];
    const feed = hw.changes({ tables: ["a"] }, ({ xid }) => void got.push(xid));
    deliver({ type: "subscribed", id: (await next("subscribe")).id, view: 1 });
    assert.equal(feed.status, "waiting");
    lose();
    const again = await next("subscribe");
    assert.equal(again.changes.since, undefined);
    deliver({ type: "subscribed", id: again.id, view: 2 });
    deliver({ type: "changes", view: 2, position: at(10), transactions: [] });
    await feed.ready;
    deliver({
      type: "changes",
      view: 2,
      position: at(10),
      transactions: [{ xid: 11, at: "", changes: [{ seq: 1 }] }],
    });
    assert.deepEqual([got, errors], [[11], ["connection"]]);
  });

  test("positions of a history that the database has lost are forgotten", async (t) => {
    const wire = wired(t);
    const live = await begun(wire);
    wire.lose();
    const { id, after } = await wire.next("subscribe");
    assert.equal(after, at(10));
    wire.deliver({ type: "subscribed", id, view: 2, key: ["id"], lost: true });
    wire.deliver({ type: "snapshot", view: 2, position: at(5), rows: rows(7) });
    await until(() => live.status === "live");
    assert.deepEqual(ids(live), [7]);
    wire.hw.live({ table: "b" });
    assert.equal((await wire.next("subscribe")).after, at(5));
  });

  test("the client leaves a gateway that is behind for another, if there is one", async (t) => {
    for (const urls of [["http://a"], ["http://a", "http://b"]]) {
      /** @type {string[]} */
      const opened = [];
      const wire = wired(t, { urls, onOpen: (url) => opened.push(url) });
      const live = await begun(wire);
      wire.lose();
      const refused = await wire.next("subscribe");
      const { length } = opened;
      const behind = { code: "behind", message: "later", retryable: true, retry_after_secs: 0.01 };
      wire.deliver({ type: "error", id: refused.id, ...behind });
      const { id } = await wire.next("subscribe");
      assert.equal(live.status, "stale");
      assert.equal(opened.length, urls.length > 1 ? length + 1 : length);
      wire.deliver({ type: "subscribed", id, view: 2, resumed: true });
      await until(() => live.status === "live");
    }
  });
});

describe("older data than the shown data is ignored", () => {
  for (const kind of ["rows", "deltas", "value"]) {
    test(`of ${kind}`, async (t) => {
      const wire = wired(t);
      const { hw, next, deliver, lose } = wire;
      const delta = kind === "deltas";
      const shown = kind === "rows" ? hw.live("a") : hw.subscribe("q", {}, undefined, { delta });
      const send = (/** @type {number} */ view, /** @type {string} */ position, id = 0) =>
        kind === "value"
          ? deliver({ type: "result", view, position, value: id })
          : deliver({ type: "snapshot", view, position, rows: rows(id) });
      const value = () => (kind === "value" ? shown.value : shown.value?.[0].id);
      const begin = async (/** @type {number} */ view) => {
        const { id } = await next("subscribe");
        deliver({ type: "subscribed", id, view, key: ["id"] });
        return id;
      };
      await begin(1);
      send(1, at(146), 146);
      await shown.ready;
      lose();
      const wireId = await begin(2);
      send(2, at(27), 27);
      assert.equal((await next("unsubscribe")).id, wireId);
      assert.deepEqual([value(), shown.status], [146, "stale"]);
      await begin(3);
      send(3, at(146), 146);
      await until(() => shown.status === "live");
      deliver({ type: "reset", view: 3, position: at(27), reason: "drift", rows: rows(27) });
      send(3, at(150), 150);
      if (kind !== "value") {
        await begin(4);
        send(4, at(150), 150);
      }
      await until(() => shown.status === "live" && value() === 150);
    });
  }
});

describe("waitFor waits for", () => {
  test("a subscription that is refused temporarily", async (t) => {
    const wire = wired(t);
    const { hw, next, deliver, sent } = wire;
    await begun(wire);
    const late = hw.live("late");
    const refused = await next("subscribe");
    const limit = { code: "limit", message: "later", retryable: true, retry_after_secs: 0.05 };
    deliver({ type: "error", id: refused.id, ...limit });
    let isOver = false;
    const waiting = hw.waitFor(at(20)).then(() => (isOver = true));
    const { id } = await next("subscribe");
    assert.ok(!sent.some(({ type }) => type === "wait"), "the gateway could not know of it");
    deliver({ type: "subscribed", id, view: 2, key: ["id"] });
    deliver({ type: "snapshot", view: 2, position: at(20), rows: rows(1) });
    const wait = await next("wait");
    assert.ok(!isOver);
    assert.deepEqual(ids(late), [1]);
    deliver({ type: "answer", id: wait.id, position: at(20) });
    await waiting;
  });

  test("a subscription that is opened again meanwhile, of every kind", async (t) => {
    const wire = wired(t);
    const { hw, next, deliver, lose } = wire;
    await begun(wire);
    const begin = async (/** @type {number} */ view, isResumed = false) => {
      const { id, topic, changes } = await next("subscribe");
      deliver({ type: "subscribed", id, view, resumed: isResumed, key: ["id"] });
      if (topic) deliver({ type: "topic", view, position: at(12), at: "", ops: [] });
      if (changes) deliver({ type: "changes", view, position: at(12), transactions: [] });
    };
    const [topic, feed] = [hw.topic("x"), hw.changes({}, () => {})];
    await begin(2);
    await begin(3);
    await Promise.all([topic.ready, feed.ready]);
    let isOver = false;
    const waiting = hw.waitFor(at(20)).then(() => (isOver = true));
    await next("wait");
    lose();
    const again = await next("wait");
    deliver({ type: "answer", id: again.id, position: at(20) });
    for (const view of [4, 5, 6]) {
      await settled(() => wire.sent.length);
      assert.ok(!isOver);
      await begin(view, true);
    }
    const last = await next("wait");
    assert.ok(!isOver);
    deliver({ type: "answer", id: last.id, position: at(20) });
    await waiting;
  });
});
