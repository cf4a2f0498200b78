/** Subscriptions that several share, and mistakes of a program, with a gateway in memory. */

import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { parse, stringify } from "../src/json.js";
import { reuseEqual } from "../src/state/structural-sharing.js";
import { client, Gateway } from "./gateway.js";
import { until } from "./stage.js";

describe("mistakes of a program do not break the client", () => {
  test("an argument that is not JSON is refused, and the client continues", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    /** @type {any} */
    const endless = {};
    endless.self = endless;
    await assert.rejects(hw.mutate("place", endless), { code: "config" });
    assert.throws(() => hw.subscribe("count", endless), { code: "config" });
    await until(() => hw.status.value === "open");
    for (const transport of [...gateway.transports]) transport.cut();
    assert.equal(await hw.query("count"), 0);
    assert.equal(gateway.opened, 2);
  });

  test("invalid arguments are refused at once", async (t) => {
    const hw = client(t, new Gateway());
    const [none, list, number] = /** @type {any[]} */ ([null, [1], 42]);
    await assert.rejects(hw.mutate("place", none), { code: "config" });
    await assert.rejects(hw.query("count", list), { code: "config" });
    await assert.rejects(hw.query(number), { code: "config" });
    await assert.rejects(hw.waitFor(none), { code: "config" });
    assert.throws(() => hw.subscribe("count", none), { code: "config" });
    assert.throws(() => hw.topic(number), { code: "config" });
    assert.throws(() => hw.channel(number), { code: "config" });
  });

  test("an argument that is changed after the call is sent unchanged", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    const args = { id: 7, at: new Date(0) };
    const placed = hw.mutate("place", args);
    args.id = 8;
    assert.equal((await placed).value, 7);
    const [{ args: sent }] = gateway.received;
    assert.deepEqual(sent, { id: 7, at: "1970-01-01T00:00:00.000Z" });
  });

  test("an onError that throws does not end the connection", async (t) => {
    const gateway = new Gateway();
    /** @type {any[]} */
    const thrown = [];
    // A page would report this as an uncaught error; here it would end the process.
    t.mock.method(globalThis, "queueMicrotask", (/** @type {() => void} */ task) =>
      Promise.resolve().then(task).catch((error) => thrown.push(error.message)),
    );
    const onError = () => {
      throw new Error("mine");
    };
    const hw = client(t, gateway, { onError });
    await until(() => hw.status.value === "open");
    for (const transport of [...gateway.transports]) transport.cut();
    await until(() => gateway.opened === 2 && hw.status.value === "open");
    assert.deepEqual(thrown, ["mine"]);
  });
});

describe("rows with several handles", () => {
  test("both stores of a row call their listeners", async (t) => {
    const gateway = new Gateway();
    gateway.ids = [1];
    const live = client(t, gateway).live("orders");
    await live.ready;
    const calls = [0, 0];
    const stores = [live.row([1]), live.row([1])];
    stores.forEach((store, i) => store.subscribe(() => (calls[i] += 1)));
    const update = { delta: "update", key: [1], row: { id: 1, z: 2 }, index: 0, cursor: [1] };
    for (const transport of gateway.transports) {
      for (const view of transport.views.values()) {
        transport.deliver({ type: "deltas", view, position: "ab-200:200:", at: "", deltas: [update] });
      }
    }
    await until(() => calls[0] === 1 && calls[1] === 1);
  });

  test("closing a handle twice does not close another", async (t) => {
    const gateway = new Gateway();
    gateway.ids = [1];
    const live = client(t, gateway).live("orders");
    await live.ready;
    const end = live.row([1]).subscribe(() => {});
    end();
    let calls = 0;
    live.row([1]).subscribe(() => (calls += 1));
    end();
    const [transport] = gateway.transports;
    const [view] = transport.views.values();
    const deltas = [{ delta: "leave", key: [1], index: 0 }];
    transport.deliver({ type: "deltas", view, position: "ab-200:200:", at: "", deltas });
    await until(() => calls === 1);
  });

  test("a listener removed before the first call is not called", async (t) => {
    const live = client(t, new Gateway()).live("orders");
    await live.ready;
    /** @type {string[]} */
    const calls = [];
    live.onValue(() => calls.push("ended"))();
    live.onValue(() => calls.push("active"));
    await until(() => calls.length);
    assert.deepEqual(calls, ["active"]);
  });

  test("a shared window that one handle slides stays for the other", async (t) => {
    const gateway = new Gateway();
    gateway.ids = [1, 2];
    const hw = client(t, gateway);
    /** @type {number[]} */
    const shown = [];
    const one = hw.live("orders", (rows) => shown.push(rows.length));
    const two = hw.live("orders");
    await two.ready;
    await until(() => shown.length === 1);
    gateway.ids = [2];
    await one.reanchor([1]);
    await until(() => shown.length === 2);
    assert.deepEqual([shown, two.value?.length], [[2, 1], 2]);
    const three = hw.live("orders");
    const sliding = three.reanchor([1, 2]);
    three.close();
    await sliding;
    await until(() => gateway.subscriptions === 2);
    assert.deepEqual([one.status, two.status], ["live", "live"]);
  });

  test("a column may be named like a property of every object", () => {
    const text = (/** @type {number} */ x) => `{"a":1,"data":{"__proto__":{"admin":true},"x":${x}}}`;
    const merged = reuseEqual(parse(text(1)), parse(text(2)));
    assert.equal(stringify(merged), text(2));
    assert.equal(/** @type {any} */ (merged).data.admin, undefined);
  });
});
