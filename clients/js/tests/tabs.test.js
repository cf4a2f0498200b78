/**
 * Tabs that share a connection. The tabs are clients in this process: Node has BroadcastChannel, and
 * `Locks` is a fake of the browser's. tests/browser has the same in Chromium.
 */

import assert from "node:assert/strict";
import { setMaxListeners } from "node:events";
import { test } from "node:test";

import { connect, HeadwaterError } from "../src/index.js";
import { groupOf, identityOf, sharedByTabs } from "../src/transports/shared-tabs.js";
import { Gateway } from "./gateway.js";
import { until } from "./stage.js";

/** Web Locks, as far as tabs need them. */
class Locks {
  /** @type {Map<string, {run: () => void, drop: (error: unknown) => void}[]>} */
  #queues = new Map();

  /** @param {string} name @param {any} options @param {any} [callback] @returns {Promise<any>} */
  request(name, options, callback) {
    return new Promise((resolve, reject) => {
      const queue = this.#queues.get(name) ?? [];
      this.#queues.set(name, queue);
      const leave = () => {
        const wasFirst = queue[0] === entry;
        if (queue.includes(entry)) queue.splice(queue.indexOf(entry), 1);
        if (wasFirst) queue[0]?.run();
      };
      let isHeld = false;
      const entry = {
        run: () => {
          isHeld = true;
          queueMicrotask(() => Promise.resolve(callback({})).finally(leave).then(resolve));
        },
        drop: reject,
      };
      if (options.signal) setMaxListeners(0, options.signal);
      options.signal?.addEventListener("abort", () => {
        if (isHeld) return;
        leave();
        reject(options.signal.reason);
      });
      if (options.steal) {
        const [holder] = queue.splice(0, 1);
        queue.unshift(entry);
        holder?.drop(new Error("stolen"));
        entry.run();
        return;
      }
      queue.push(entry);
      if (queue[0] === entry) entry.run();
    });
  }
}

/**
 * `count` tabs of one browser.
 *
 * @param {import("node:test").TestContext} t
 * @param {Gateway} gateway
 * @param {number} count
 */
function open(t, gateway, count) {
  const locks = new Locks();
  const transport = sharedByTabs(gateway.open, "test", locks, "ann");
  const another = () => {
    const tab = connect(`http://${t.name.replaceAll(" ", "-")}`, {
      transport,
      backoff: { seconds: [0.01, 0.05] },
      onError: () => {},
    });
    t.after(() => tab.close());
    return tab;
  };
  return { tabs: Array.from({ length: count }, another), another };
}

/** @param {import("../src/index.js").Live} live */
const ids = (live) => live.value?.map((row) => row.id);

test("tabs share one transport", async (t) => {
  const gateway = new Gateway();
  const { tabs } = open(t, gateway, 5);
  const lives = tabs.map((tab) => tab.live("orders"));
  await Promise.all(lives.map((live) => live.ready));
  assert.equal(gateway.transports.size, 1);
  const placed = await tabs[3].mutate("place", { id: 7 });
  assert.equal(placed.value, 7);
  await until(() => lives.every((live) => ids(live)?.length === 1));
  for (const live of lives) assert.deepEqual(ids(live), [7]);
});

test("the other tabs receive the position of a write", async (t) => {
  const gateway = new Gateway();
  const { tabs, another } = open(t, gateway, 3);
  await until(() => tabs.every((tab) => tab.status.value === "open"));
  const { position } = await tabs[1].mutate("place", { id: 1 });
  await until(() => tabs.every((tab) => tab.written.value === position));
  const late = another();
  await until(() => late.written.value === position);
});

test("another tab takes over when the leader closes", async (t) => {
  const gateway = new Gateway();
  const { tabs } = open(t, gateway, 4);
  const lives = tabs.map((tab) => tab.live("orders"));
  await Promise.all(lives.map((live) => live.ready));
  for (let round = 1; round < 4; round++) {
    // The first open tab leads: locks are granted in order.
    tabs[round - 1].close();
    await until(() => gateway.transports.size === 1 && gateway.opened === round + 1);
    gateway.place(round);
    const left = lives.slice(round);
    await until(() => left.every((live) => live.status === "live" && ids(live)?.length === round));
  }
  assert.deepEqual(ids(lives[3]), [1, 2, 3]);
});

test("the subscriptions of a tab end with it", async (t) => {
  const gateway = new Gateway();
  const { tabs } = open(t, gateway, 3);
  const lives = tabs.map((tab) => tab.live("orders"));
  await Promise.all(lives.map((live) => live.ready));
  assert.equal(gateway.subscriptions, 3);
  tabs[1].close();
  await until(() => gateway.subscriptions === 2);
});

test("a subscription that ends before it has begun does not end another", async (t) => {
  const gateway = new Gateway();
  const { tabs } = open(t, gateway, 2);
  const live = tabs[1].live("orders");
  await live.ready;
  tabs[1].live({ table: "orders", limit: 5 }).close();
  const last = tabs[1].live({ table: "orders", limit: 6 });
  await last.ready;
  gateway.place(1);
  await until(() => ids(last)?.length === 1);
  assert.deepEqual(ids(live), [1]);
});

test("a subscription before the hello of a new leader is not sent twice", async (t) => {
  const gateway = new Gateway();
  const { tabs } = open(t, gateway, 3);
  await until(() => tabs.every((tab) => tab.status.value === "open"));
  /** @type {import("../src/index.js").Live[]} */
  const lives = [];
  tabs[0].close();
  while (gateway.opened < 2 || tabs[2].reconnects < 1) {
    lives.push(tabs[2].live(`table${lives.length}`));
    await new Promise(setImmediate);
  }
  await Promise.all(lives.map((live) => live.ready));
  assert.equal(gateway.subscriptions, lives.length);
});

test("tabs that slide at the same time each get their own answer", async (t) => {
  const gateway = new Gateway();
  gateway.ids = [1, 2, 3];
  const { tabs } = open(t, gateway, 3);
  const lives = tabs.map((tab) => tab.live("orders"));
  await Promise.all(lives.map((live) => live.ready));
  const slides = [lives[1].reanchor(["x"]), lives[2].reanchor([2])];
  await assert.rejects(slides[0], { code: "invalid_query" });
  await slides[1];
  // As reactive frameworks wrap every object.
  await lives[1].reanchor(new Proxy([1], {}));
  assert.deepEqual(lives.map(ids), [[1, 2, 3], [2, 3], [3]]);
});

test("when the transport is lost all tabs connect again, over one", async (t) => {
  const gateway = new Gateway();
  const { tabs } = open(t, gateway, 4);
  const lives = tabs.map((tab) => tab.live("orders"));
  await Promise.all(lives.map((live) => live.ready));
  for (const transport of [...gateway.transports]) transport.cut();
  await until(() => tabs.every((tab) => tab.reconnects === 1));
  await until(() => lives.every((live) => live.status === "live"));
  assert.equal(gateway.transports.size, 1);
  gateway.place(1);
  await until(() => lives.every((live) => ids(live)?.length === 1));
});

test("a leader that does not respond is replaced, by one of the tabs", { timeout: 20_000 }, async (t) => {
  const gateway = new Gateway();
  const locks = new Locks();
  const transport = sharedByTabs(gateway.open, "test", locks, "ann");
  const name = groupOf("test", "http://frozen", undefined, "ann");
  /** @type {unknown} */
  let stolen;
  // A tab that holds the lock and sends nothing.
  locks.request(name, {}, () => new Promise(() => {})).catch((error) => (stolen = error));
  // The others time out in the same moment.
  const tabs = [1, 2, 3].map(() => connect("http://frozen", { transport, onError: () => {} }));
  t.after(() => tabs.forEach((tab) => tab.close()));
  const lives = tabs.map((tab) => tab.live("orders"));
  await Promise.all(lives.map((live) => live.ready));
  assert.ok(stolen);
  assert.equal(gateway.opened, 1);
});

test("tabs of other users have another connection", async () => {
  const token = (/** @type {object} */ claims) =>
    ["e30", Buffer.from(JSON.stringify(claims)).toString("base64url"), "x"].join(".");
  const ann = identityOf(token({ sub: "änn", exp: 1, iat: 2 }));
  assert.equal(ann, identityOf(token({ exp: 7, sub: "änn", jti: "z" })));
  assert.notEqual(ann, identityOf(token({ sub: "ben", exp: 1 })));
  assert.equal(identityOf("opaque"), "opaque");
  assert.equal(identityOf(undefined), "");
});

test("without an identity tabs share nothing: the user of a cookie may have changed", async (t) => {
  const gateway = new Gateway();
  const transport = sharedByTabs(gateway.open, "test", new Locks());
  const tabs = [1, 2].map(() => connect("http://cookie", { transport, onError: () => {} }));
  t.after(() => tabs.forEach((tab) => tab.close()));
  await until(() => gateway.transports.size === 2);
  assert.notEqual(
    groupOf("test", "http://cookie", undefined, "ann"),
    groupOf("test", "http://cookie", undefined, "ben"),
  );
});

test("where locks are refused a tab connects alone", async (t) => {
  const gateway = new Gateway();
  const locks = { request: () => Promise.reject(new Error("denied")) };
  const transport = sharedByTabs(gateway.open, "test", /** @type {any} */ (locks), "ann");
  const hw = connect("http://denied", { transport, onError: () => {} });
  t.after(() => hw.close());
  assert.equal((await hw.mutate("place", { id: 7 })).value, 7);
});

test("closing a tab does not close the transport while changes are under way", async (t) => {
  const gateway = new Gateway();
  const { tabs } = open(t, gateway, 3);
  const lives = tabs.map((tab) => tab.live("orders"));
  await Promise.all(lives.map((live) => live.ready));
  gateway.instead = (message) => message.type === "unsubscribe";
  tabs[1].close();
  await until(() => gateway.received.some((message) => message.type === "unsubscribe"));
  gateway.place(1);
  await until(() => ids(lives[0])?.length === 1 && ids(lives[2])?.length === 1);
  assert.equal(gateway.opened, 1);
});

test("mutations are sent again through the next leader, each with its key", async (t) => {
  const gateway = new Gateway();
  const { tabs } = open(t, gateway, 2);
  await until(() => tabs.every((tab) => tab.status.value === "open"));
  gateway.instead = (message) => message.type === "mutate";
  const ids = Array.from({ length: 40 }, (_, id) => id);
  const outcomes = ids.map((id) => tabs[1].mutate("place", { id }));
  const sent = () => gateway.received.filter(({ type }) => type === "mutate");
  await until(() => sent().length === 32);
  gateway.instead = () => false;
  tabs[0].close();
  const values = (await Promise.all(outcomes)).map(({ value }) => value);
  assert.deepEqual(values, ids, "each caller has its own result");
  assert.equal(sent().length, 32 + 40);
  const keys = new Set(sent().map((message) => `${message.args.id} ${message.idempotency_key}`));
  assert.equal(keys.size, 40);
});

test("a leader that freezes after its hello is replaced", { timeout: 30_000 }, async (t) => {
  const gateway = new Gateway();
  const locks = new Locks();
  const transport = sharedByTabs(gateway.open, "test", locks, "ann");
  const group = groupOf("test", "http://freezes", undefined, "ann");
  locks.request(group, {}, () => new Promise(() => {})).catch(() => {});
  const room = new BroadcastChannel(group);
  t.after(() => room.close());
  let greeted = 0;
  // It sends a hello, and nothing after that.
  room.onmessage = (/** @type {any} */ { data }) => {
    if (greeted++) return;
    const inbox = new BroadcastChannel(`${group} ${data.from}`);
    const message = { type: "hello", session: "s", version: 1, keepalive: 600 };
    inbox.postMessage({ leader: "frozen", message });
    inbox.close();
  };
  const hw = connect("http://freezes", { transport, onError: () => {} });
  t.after(() => hw.close());
  await hw.live("orders").ready;
  assert.equal(gateway.opened, 1);
});

test("tabs together have no more calls under way than a session may", async (t) => {
  const gateway = new Gateway();
  const { tabs } = open(t, gateway, 3);
  await until(() => tabs.every((tab) => tab.status.value === "open"));
  /** @type {(() => void)[]} */
  const held = [];
  gateway.instead = ({ type, id }, transport) =>
    type === "query" &&
    held.push(() => transport.deliver({ type: "answer", id, position: gateway.position, value: 1 }));
  const asked = tabs.flatMap((tab) => Array.from({ length: 30 }, () => tab.query("count")));
  await until(() => held.length === 60);
  await tabs[1].live("orders").ready;
  assert.equal(held.length, 60);
  for (const answer of held.splice(0)) answer();
  await until(() => held.length === 30);
  for (const answer of held) answer();
  assert.equal((await Promise.all(asked)).length, 90);
});

test("following tabs send the same messages as the leader", async (t) => {
  const gateway = new Gateway();
  const { tabs } = open(t, gateway, 2);
  await until(() => tabs.every((tab) => tab.status.value === "open"));
  const money = { cents: 1250, toJSON: () => "12.50" };
  for (const tab of tabs) await tab.mutate("place", { id: 1, money, f: () => {} });
  const sent = gateway.received.map(({ args }) => args);
  assert.deepEqual(sent, [1, 2].map(() => ({ id: 1, money: "12.50" })));
});

test("a tab whose token has expired does not end the others", async (t) => {
  const gateway = new Gateway();
  const token = (/** @type {object} */ claims) =>
    ["e30", Buffer.from(JSON.stringify(claims)).toString("base64url"), "x"].join(".");
  const [old, fresh] = [1, 2].map((exp) => token({ sub: "ann", exp }));
  const refusal = new HeadwaterError("token_expired", "it has ended");
  let hasEnded = false;
  /** @type {import("../src/transports/transport.js").OpenTransport} */
  const opener = (url, own, handlers) => {
    if (!hasEnded || own !== old) return gateway.open(url, own, handlers);
    setTimeout(() => handlers.signal.aborted || handlers.onClose(refusal), 20);
    return { send() {} };
  };
  const transport = sharedByTabs(opener, "test", new Locks());
  const [first, second] = [old, fresh].map((own) => {
    const backoff = { seconds: /** @type {[number, number]} */ ([0.001, 0.002]) };
    const hw = connect("http://ended", { transport, token: own, backoff, onError: () => {} });
    t.after(() => hw.close());
    return hw;
  });
  await until(() => [first, second].every((tab) => tab.status.value === "open"));
  hasEnded = true;
  for (const transport of [...gateway.transports]) transport.cut(refusal);
  await until(() => gateway.opened >= 2 && second.status.value === "open");
  assert.equal((await second.mutate("place", { id: 7 })).value, 7);
});
