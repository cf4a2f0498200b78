/** Topics, channels and change feeds, with a gateway in memory. */

import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { client, Gateway } from "./gateway.js";
import { until } from "./stage.js";

describe("a topic", () => {
  test("applies operations to the rows that were read", async (t) => {
    const gateway = new Gateway();
    gateway.instead = (message, transport) => {
      if (message.type === "subscribe") transport.deliver({ type: "subscribed", id: message.id, view: 1 });
      return message.type === "subscribe";
    };
    const hw = client(t, gateway);
    /** @type {string[][]} */
    const batches = [];
    const topic = hw.topic("chat:1", (ops) => batches.push(ops.map(({ op }) => op)));
    await topic.ready;
    const [transport] = gateway.transports;
    const at = "2026-01-31T12:00:00Z";
    const deliver = (/** @type {any[]} */ ops) =>
      transport.deliver({ type: "topic", view: 1, position: "ab-1:1:", at, ops });
    const upsert = (/** @type {number} */ id, /** @type {string} */ text) => ({
      op: "upsert",
      entity: "messages",
      key: [id],
      row: { id, text },
    });
    deliver([]);
    deliver([upsert(2, "b"), upsert(3, "c")]);
    await until(() => batches.length === 1);
    const [second] = topic.value?.messages ?? [];
    topic.fill("messages", [
      { id: 1, text: "a" },
      { id: 2, text: "old" },
    ]);
    assert.deepEqual(
      topic.value?.messages.map((row) => row.text),
      ["a", "b", "c"],
    );
    assert.equal(topic.value?.messages[1], second);
    deliver([{ op: "remove", entity: "messages", key: [3] }]);
    transport.deliver({ type: "poke", view: 1, position: "ab-2:2:", at });
    transport.deliver({ type: "gap", view: 1, position: "ab-3:3:", since: null, reason: "resync" });
    await until(() => batches.length === 4);
    assert.deepEqual(batches, [["upsert", "upsert"], ["remove"], ["poke"], ["gap"]]);
    assert.deepEqual(
      topic.value?.messages.map((row) => row.id),
      [1, 2],
    );
    assert.equal(topic.position, "ab-3:3:");
  });
});

describe("a channel", () => {
  test("has members, delivers messages once, and publishes", async (t) => {
    const gateway = new Gateway();
    const ann = { member: "m1", user: "ann", state: { name: "Ann" } };
    const old = {
      type: "message",
      view: 1,
      id: "a:1",
      data: "hi",
      at: "",
      user: "ann",
      member: "m1",
    };
    gateway.instead = (message, transport) => {
      if (message.type === "subscribe") {
        transport.deliver({ type: "subscribed", id: message.id, view: 1, member: "m1" });
        transport.deliver({ type: "presence", view: 1, joined: [ann], whole: true });
        transport.deliver(old);
      }
      if (message.type === "publish") {
        transport.deliver({ ...old, id: "a:2", data: message.data });
        transport.deliver({ type: "answer", id: message.request, position: "" });
      }
      if (message.type === "state") transport.deliver({ type: "answer", id: message.request, position: "" });
      return true;
    };
    const hw = client(t, gateway);
    /** @type {any[]} */
    const received = [];
    const room = hw.channel("room:1", {
      state: { name: "Ann" },
      onMessage: ({ data }) => received.push(data),
    });
    await room.ready;
    assert.deepEqual([room.member, room.members.value], ["m1", [ann]]);
    await room.publish({ text: "hello" });
    await room.setState({ name: "Ann", typing: true });
    assert.deepEqual(received, ["hi", { text: "hello" }]);
    const [{ state }] = room.members.value;
    for (const transport of gateway.transports) transport.cut();
    await until(() => gateway.opened === 2 && room.status === "live");
    assert.equal(room.members.value[0].state, state);
    const [first, second] = gateway.received.filter((message) => message.type === "subscribe");
    assert.deepEqual(first.channel, { name: "room:1", present: true, state: { name: "Ann" } });
    assert.deepEqual(second.channel.state, { name: "Ann", typing: true });
    await until(() => received.length >= 2);
    assert.deepEqual(received, ["hi", { text: "hello" }]);
  });

  test("unanswered messages are sent again after a lost connection: in order, with their keys", async (t) => {
    const gateway = new Gateway();
    let views = 0;
    /** @type {any[]} */
    const passed = [];
    let isDeaf = true;
    gateway.instead = (message, transport) => {
      const { type, id, request } = message;
      if (type === "subscribe") {
        transport.deliver({ type: "subscribed", id, view: ++views });
        transport.deliver({ type: "presence", view: views, whole: true });
      } else if (!isDeaf && request) {
        passed.push(message);
        transport.deliver({ type: "answer", id: request, position: "" });
      }
      return true;
    };
    const hw = client(t, gateway);
    const room = hw.channel("room:1");
    await room.ready;
    const [one, two] = [room.publish("one"), room.publish("two")];
    await until(() => gateway.received.length === 3);
    isDeaf = false;
    for (const transport of [...gateway.transports]) transport.cut();
    const three = room.publish("three");
    await Promise.all([one, two, three]);
    assert.deepEqual(
      passed.map(({ data }) => data),
      ["one", "two", "three"],
    );
    const before = gateway.received.slice(1, 3);
    assert.deepEqual(
      passed.slice(0, 2).map((message) => message.idempotency_key),
      before.map((message) => message.idempotency_key),
    );
    assert.notEqual(passed[0].id, before[0].id);
    isDeaf = true;
    const [sent, { length }] = [room.publish("four"), gateway.received];
    await until(() => gateway.received.length > length);
    hw.close();
    await assert.rejects(sent, { code: "outcome_unknown" });
  });
});

test("messages while there is no connection are sent on the next", async (t) => {
  const gateway = new Gateway();
  gateway.instead = ({ type, id, request }, transport) => {
    if (type === "subscribe") {
      transport.deliver({ type: "subscribed", id, view: 1, member: "m1" });
      transport.deliver({ type: "presence", view: 1, whole: true });
    }
    if (request) transport.deliver({ type: "answer", id: request, position: "" });
    return true;
  };
  const room = client(t, gateway).channel("room:1");
  await room.ready;
  // It is not a member, and a state does not make it one.
  await room.setState(undefined);
  for (const transport of [...gateway.transports]) transport.cut();
  await until(() => room.status === "stale");
  await room.publish("after");
  const of = (/** @type {string} */ type) => gateway.received.filter((each) => each.type === type);
  assert.deepEqual(
    of("publish").map(({ id, data }) => [id, data]),
    [[of("subscribe")[1].id, "after"]],
  );
  assert.deepEqual(of("subscribe")[1].channel, { name: "room:1" });
  assert.equal(of("state")[0].state, null);
  room.close();
  await until(() => of("unsubscribe").length);
  await assert.rejects(room.publish("too late"), { code: "connection" });
});

test("a feed waits for any promise", async (t) => {
  const gateway = new Gateway();
  gateway.instead = ({ type, id }, transport) => {
    if (type !== "subscribe") return false;
    transport.deliver({ type: "subscribed", id, view: 1 });
    transport.deliver({ type: "changes", view: 1, position: "ab-1:1:", transactions: [] });
    return true;
  };
  /** @type {number[]} */
  const begun = [];
  /** @type {(() => void)[]} */
  const done = [];
  const feed = client(t, gateway).changes({ tables: ["orders"] }, ({ xid }) => {
    begun.push(xid);
    return { then: (/** @type {() => void} */ resolve) => void done.push(resolve) };
  });
  await feed.ready;
  const [transport] = gateway.transports;
  const transactions = [1, 2].map((xid) => ({ xid, at: "", changes: [{ seq: xid }] }));
  transport.deliver({ type: "changes", view: 1, position: "ab-3:3:", transactions });
  await until(() => done.length === 1);
  assert.deepEqual(begun, [1]);
  done[0]();
  await until(() => begun.length === 2);
});
