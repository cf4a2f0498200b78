/** What needs no gateway, or one in memory. */

import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { Backoff } from "../src/backoff.js";
import { crc32 } from "../src/crc32.js";
import { connectionFailed } from "../src/errors.js";
import { connect } from "../src/index.js";
import { compareKeys, compareText, parse, stringify } from "../src/json.js";
import { gatewayUrl } from "../src/links.js";
import { contains, covers, isBefore, parsePosition } from "../src/position.js";
import { Replica } from "../src/replica.js";
import { shared } from "../src/shared.js";
import { SseParser } from "../src/sse-parser.js";
import { Value } from "../src/store.js";
import { Gateway } from "./gateway.js";
import { until } from "./stage.js";

/**
 * @param {import("node:test").TestContext} t
 * @param {Gateway} gateway
 * @param {import("../src/index.js").Options} [options]
 */
function client(t, gateway, options = {}) {
  /** @type {import("../src/index.js").HeadwaterError[]} */
  const errors = [];
  const hw = connect("http://memory", {
    transport: gateway.open,
    backoff: { seconds: [0.001, 0.002] },
    onError: (error) => errors.push(error),
    ...options,
  });
  t.after(() => hw.close());
  return Object.assign(hw, { errors });
}

describe("JSON", () => {
  test("integers beyond a Number are BigInt, and nothing else is", () => {
    const text =
      '{"a":9007199254740993,"b":"9007199254740993","c":9007199254740991,' +
      '"d":1234567890123456.5,"e":-12345678901234567890,"f":"\\"12345678901234567","g":1e20}';
    const value = parse(text);
    assert.deepEqual(value, {
      a: 9007199254740993n,
      b: "9007199254740993",
      c: 9007199254740991,
      d: 1234567890123456.5,
      e: -12345678901234567890n,
      f: '"12345678901234567',
      g: 1e20,
    });
    const { g: _, ...others } = value;
    assert.deepEqual(parse(stringify(others)), others);
    assert.throws(() => parse("{"), SyntaxError);
  });

  test("a large text does not overflow", () => {
    const long = "\n\\\"".repeat(3_000_000);
    const text = `{"a":${JSON.stringify(long)},"b":12345678901234567}`;
    const { a, b } = parse(text);
    assert.ok(a === long && b === 12345678901234567n);
  });

  test("is written with names by code point", () => {
    const value = {
      "😀": 1,
      "\uffff": 2,
      b: [{ d: undefined, c: null }, undefined],
      a: new Date(0),
    };
    assert.equal(
      stringify(value, true),
      '{"a":"1970-01-01T00:00:00.000Z","b":[{"c":null},null],"\uffff":2,"😀":1}',
    );
  });

  test("texts and keys have Python's order", () => {
    assert.deepEqual(["😀", "\uffff", "a", "", "ab", "é"].sort(compareText), [
      "",
      "a",
      "ab",
      "é",
      "\uffff",
      "😀",
    ]);
    const keys = [
      [2, "b"],
      [10, "a"],
      [2, "a"],
      [9007199254740993n, ""],
    ];
    assert.deepEqual(keys.sort(compareKeys), [
      [2, "a"],
      [2, "b"],
      [10, "a"],
      [9007199254740993n, ""],
    ]);
  });

  test("CRC-32 is zlib's", () => {
    assert.equal(crc32(stringify([[1], { name: "a", id: 1 }], true)), 1897706822);
    assert.equal(crc32("lo", crc32("hel")), crc32("hello"));
  });
});

test("positions", () => {
  const position = parsePosition("9f3a61c2-748:752:749,751");
  assert.deepEqual(
    [747, 749, 750, 752].map((xid) => contains(position, xid)),
    [true, false, true, false],
  );
  assert.equal(covers("a-5:9:5", "a-4:6:4,5"), true);
  assert.equal(covers("a-4:6:4,5", "a-5:9:5"), false);
  assert.equal(covers("b-9:9:", "a-4:6:"), false);
  assert.throws(() => parsePosition("yesterday"), /is not a position/);
  for (const [one, other, expected] of /** @type {const} */ ([
    ["a-4:4:", "a-9:9:", true],
    ["a-4:7:4", "a-4:9:4", true],
    ["a-9:9:", "a-9:9:", false],
    ["a-9:9:", "a-4:4:", false],
    ["b-4:4:", "a-9:9:", false],
    ["a-5:5:", "a-5:9:5", false], // rounded down, perhaps
    ["a-4:4:", "a-5:9:5", true],
  ])) {
    assert.equal(isBefore(one, other), expected, `${one} before ${other}`);
  }
  const marked = "9f3a61c2-748:752:749,751~750.31.2.0c55a1d2e3f4.746";
  assert.deepEqual(parsePosition(marked), position);
  assert.ok(covers(marked, "9f3a61c2-748:752:749,751"));
  assert.throws(() => parsePosition("9f3a61c2-748:752:~"), /is not a position/);
});

test("what is equal keeps its identity", () => {
  const before = [
    { id: 1, data: { a: [1] } },
    { id: 2, data: null },
    { id: 3, data: {} },
  ];
  const copy = structuredClone(before);
  assert.equal(shared(before, copy), before);
  const changed = [{ id: 0, data: 1 }, ...structuredClone(before).slice(0, 2)];
  const result = shared(before, changed);
  assert.deepEqual(result, changed);
  assert.equal(result[1], before[0]);
  assert.equal(result[2], before[1]);
  const inner = shared(before[0], { id: 9, data: { a: [1] } });
  assert.equal(inner.data, before[0].data);
  assert.deepEqual(shared({ a: 1 }, { a: 1, b: undefined }), { a: 1, b: undefined });
  assert.equal(shared([1], "text"), "text");
});

test("a batch that does not fit leaves the rows as they were", () => {
  const enter = (/** @type {number} */ id, /** @type {number} */ index) =>
    /** @type {const} */ ({ delta: "enter", key: [id], row: { id }, index, cursor: [id] });
  const replica = new Replica();
  replica.apply([{ delta: "reset", rows: [enter(2, 0), enter(1, 1)] }]);
  const { rows, keys } = replica;
  const leave = /** @type {const} */ ({ delta: "leave", key: [2], index: 0 });
  assert.throws(() => replica.apply([leave, leave]), { code: "diverged" });
  assert.throws(() => replica.apply([leave, enter(3, 0)], 7), { code: "diverged" });
  assert.throws(() => replica.apply([{ delta: "reset", rows: [enter(3, 9)] }]), /does not fit/);
  assert.equal(replica.rows, rows);
  assert.deepEqual(replica.keys, keys);
  replica.apply([leave]);
  assert.deepEqual(replica.rows, [{ id: 1 }]);
});

test("a parser of events, whole and by the character", () => {
  const text =
    ": hi\r\nevent: x\r\nid: 7\r\ndata: one\r\ndata:two\r\n\r\ndata: {}\r\rdata: 3\n\n\ndata: not yet";
  const expected = ["one\ntwo", "{}", "3"];
  assert.deepEqual(new SseParser().feed(text), expected);
  const parser = new SseParser();
  assert.deepEqual(
    [...text].flatMap((char) => parser.feed(char)),
    expected,
  );
  assert.throws(() => new SseParser(10).feed(`data: ${"x".repeat(20)}`), { code: "limit" });
});

test("an event that comes in pieces may be as large as one that comes whole", () => {
  const parser = new SseParser(100);
  const data = "x".repeat(60);
  assert.deepEqual(
    [`data: ${data}`, "\n", "\n"].flatMap((piece) => parser.feed(piece)),
    [data],
  );
});

test("pauses double, and end", () => {
  const backoff = new Backoff({ failuresMax: 5 });
  assert.deepEqual(
    [1, 0, 1, 1, 1].map((chance) => backoff.failed(chance)),
    [1, 1, 4, 8, null],
  );
  backoff.succeeded();
  assert.equal(backoff.failed(1), 1);
  assert.equal(new Backoff().failed(0, 7), 7);
  const usual = new Backoff();
  assert.deepEqual(
    Array.from({ length: 10 }, () => usual.failed(1)),
    [1, 2, 4, 8, 16, 30, 30, 30, 30, null],
  );
});

test("URLs of gateways", () => {
  assert.equal(gatewayUrl("https://shop.example/data/", "ws"), "wss://shop.example/data/v1");
  assert.throws(() => gatewayUrl("localhost:8484", "http"), { code: "config" });
  assert.throws(() => connect(), { code: "config" });
  assert.throws(() => connect("http://x", { transport: /** @type {any} */ ("pigeon") }), {
    code: "config",
  });
});

test("listeners are called once for all that changed", async () => {
  const value = new Value(0);
  /** @type {number[]} */
  const seen = [];
  const end = value.subscribe(() => seen.push(value.value));
  value.set(1);
  value.set(2);
  value.set(2);
  assert.deepEqual(seen, []);
  await Promise.resolve();
  assert.deepEqual(seen, [2]);
  end();
  value.set(3);
  await Promise.resolve();
  assert.deepEqual(seen, [2]);
});

describe("a client", () => {
  test("gives up after ten failures in a row, and tells everybody why", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    const live = hw.live("orders");
    await live.ready;
    gateway.isUp = false;
    for (const link of gateway.links) link.cut();
    const asked = hw.query("count");
    await assert.rejects(asked, {
      code: "connection",
      message: /gave up after 10 failures in a row: nobody is there/,
    });
    assert.equal(hw.status.value, "failed");
    assert.equal(live.status, "failed");
    assert.equal(live.error, hw.error);
    assert.deepEqual(live.value, [], "what was known is still shown");
    assert.equal(hw.errors.length, 10);
    await assert.rejects(hw.mutate("place"), { code: "connection" });
    await assert.rejects(hw.live("orders").ready, { code: "connection" });
  });

  test("any message begins the count again", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway, { backoff: { seconds: [0.03, 0.03] } });
    for (let round = 1; round <= 3; round++) {
      await until(() => hw.status.value === "open");
      gateway.isUp = false;
      for (const link of [...gateway.links]) link.cut();
      const { length } = hw.errors;
      await until(() => hw.errors.length >= length + 6);
      gateway.isUp = true;
    }
    await until(() => hw.status.value === "open");
    assert.equal(hw.reconnects, 3);
  });

  test("asks for queries and mutations again; a mutation has the same key each time", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    const cut = new Set();
    gateway.instead = (message, link) => {
      if (cut.has(message.type)) return false;
      cut.add(message.type);
      link.cut();
      return true;
    };
    assert.equal(await hw.query("count"), 0);
    assert.equal((await hw.mutate("place", { id: 1 })).value, 1);
    assert.equal((await hw.mutate("place", { id: 2 })).value, 2);
    const told = gateway.heard.map((message) => message.type);
    assert.deepEqual(told, ["query", "query", "mutate", "mutate", "mutate"]);
    const [first, second, third] = gateway.heard
      .filter((message) => message.type === "mutate")
      .map((message) => message.idempotency_key);
    assert.match(first, /^[0-9a-f]{32}$/);
    assert.equal(first, second);
    assert.notEqual(second, third);
  });

  test("a program may give a key of its own", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    await hw.mutate("place", { id: 1 }, { idempotencyKey: "order:7" });
    assert.equal(gateway.heard[0].idempotency_key, "order:7");
    for (const idempotencyKey of ["", "x".repeat(129), "ä", "a\nb", /** @type {any} */ (7)]) {
      const refused = hw.mutate("place", { id: 1 }, { idempotencyKey });
      await assert.rejects(refused, { code: "config" });
    }
    assert.equal(gateway.heard.length, 1);
  });

  describe("the outcome of a mutation that was sent is unknown", () => {
    const unanswered = async (/** @type {import("node:test").TestContext} */ t) => {
      const gateway = new Gateway();
      gateway.instead = (message) => message.type === "mutate";
      const hw = client(t, gateway);
      const sent = hw.mutate("place", { id: 1 });
      await until(() => gateway.heard.length === 1);
      return { gateway, hw, sent };
    };

    test("when no gateway can be reached again; of one that was not sent it is known", async (t) => {
      const { gateway, hw, sent } = await unanswered(t);
      gateway.isUp = false;
      for (const link of [...gateway.links]) link.cut();
      await until(() => hw.status.value === "connecting");
      const unsent = hw.mutate("place", { id: 2 });
      await Promise.all([
        assert.rejects(sent, { code: "outcome_unknown", retryable: false, message: /gave up/ }),
        assert.rejects(unsent, { code: "connection" }),
      ]);
    });

    test("when the client is closed", async (t) => {
      const { hw, sent } = await unanswered(t);
      hw.close();
      await assert.rejects(sent, { code: "outcome_unknown", message: /closed/ });
    });

    test("when its connection is lost each time", async (t) => {
      const { gateway, sent } = await unanswered(t);
      gateway.instead = (message, link) => message.type === "mutate" && (link.cut(), true);
      for (const link of [...gateway.links]) link.cut();
      await assert.rejects(sent, { code: "outcome_unknown", message: /lost 10 times/ });
      assert.equal(gateway.heard.length, 10);
    });

    test("when the gateway may have forgotten its key", async (t) => {
      const { gateway, sent } = await unanswered(t);
      t.mock.timers.enable({ apis: ["Date"], now: Date.now() + 24 * 3_600_000 });
      for (const link of [...gateway.links]) link.cut();
      await assert.rejects(sent, { code: "outcome_unknown", message: /for too long/ });
      assert.equal(gateway.heard.length, 1);
    });

    test("when it is then refused before its key is looked up; but not when it has run", async (t) => {
      for (const [code, expected] of [
        ["token_expired", "outcome_unknown"],
        ["invalid_query", "outcome_unknown"],
        ["mutation_unknown", "outcome_unknown"],
        ["internal", "outcome_unknown"],
        ["nothing", "nothing"],
        ["timed_out", "timed_out"],
        ["idempotency_key_reused", "idempotency_key_reused"],
      ]) {
        const { gateway, sent } = await unanswered(t);
        gateway.instead = ({ type, id }, link) => {
          const retryable = code === "timed_out";
          if (type === "mutate") link.say({ type: "error", id, code, message: "no", retryable });
          return true;
        };
        for (const link of [...gateway.links]) link.cut();
        await assert.rejects(sent, { code: expected });
      }
    });
  });

  test("a mutation that is refused for now is asked again, with its key, for a while", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    let refusals = 3;
    gateway.instead = (message, link) => {
      if (message.type !== "mutate" || !refusals--) return false;
      const fields = [
        { code: "unavailable", retryable: true },
        { code: "outcome_unknown" },
        { code: "limit", retryable: true, retry_after_secs: 0.01 },
      ][refusals];
      link.say({ type: "error", id: message.id, message: "later", ...fields });
      return true;
    };
    assert.equal((await hw.mutate("place", { id: 1 })).value, 1);
    assert.equal(new Set(gateway.heard.map((message) => message.idempotency_key)).size, 1);
    assert.equal(gateway.heard.length, 4);
    refusals = 1;
    gateway.instead = ({ id }, link) => {
      const later = { code: "limit", message: "later", retryable: true, retry_after_secs: 3600 };
      link.say({ type: "error", id, ...later });
      return true;
    };
    await assert.rejects(hw.mutate("place", { id: 2 }), { code: "limit", retryAfter: 3600 });
    gateway.instead = ({ id }, link) => {
      link.say({ type: "error", id, code: "conflict", message: "x", retryable: true });
      return true;
    };
    await assert.rejects(hw.mutate("place", { id: 3 }), { code: "conflict" });
  });

  test("a mutation whose first attempt still runs is asked again with its key", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    const refusals = ["lost", "still_running", "still_running"];
    gateway.instead = (message, link) => {
      const code = message.type === "mutate" && refusals.shift();
      if (!code) return false;
      if (code === "lost") link.cut();
      else link.say({ type: "error", id: message.id, code, message: "x", retryable: true });
      return true;
    };
    assert.equal((await hw.mutate("place", { id: 1 })).value, 1);
    assert.equal(gateway.heard.length, 4);
    assert.equal(new Set(gateway.heard.map((message) => message.idempotency_key)).size, 1);
    gateway.instead = ({ id }, link) => {
      const running = { code: "still_running", message: "x", retryable: true };
      link.say({ type: "error", id, ...running, retry_after_secs: 3600 });
      return true;
    };
    const sent = hw.mutate("place", { id: 2 });
    await assert.rejects(sent, { code: "outcome_unknown", retryable: false });
  });

  test("resumes from its position, under another id", async (t) => {
    const gateway = new Gateway();
    gateway.place(1);
    const hw = client(t, gateway);
    const live = hw.live("orders");
    await live.ready;
    const { position } = live;
    for (const link of gateway.links) link.cut();
    await until(() => gateway.opened === 2 && live.status === "live");
    const [first, second] = gateway.heard.filter((message) => message.type === "subscribe");
    assert.equal(first.since, undefined);
    assert.equal(second.since, position);
    assert.notEqual(first.id, second.id);
  });

  test("reads anew what does not fit, and fails what never does", async (t) => {
    const gateway = new Gateway();
    gateway.place(1);
    const hw = client(t, gateway);
    const live = hw.live("orders");
    const rows = await live.ready;
    const misfit = () => {
      const [link] = gateway.links;
      const [view] = link.views.values();
      const deltas = [{ delta: "leave", key: [9], index: 0 }];
      link.say({ type: "deltas", view, position: "ab-200:200:", at: "", deltas });
    };
    /** @type {any[]} */
    const shown = [];
    const end = live.subscribe(() => {
      if (live.status === "stale") shown.push([live.value, live.keys, live.row([1]).value]);
    });
    misfit();
    await until(() => hw.diverged === 1 && live.status === "live");
    end();
    assert.deepEqual(shown, [[rows, [[1]], { id: 1 }]]);
    assert.equal(live.value, rows);
    misfit();
    await until(() => hw.diverged === 2 && live.status === "live");
    misfit();
    await until(() => live.status === "failed");
    assert.equal(live.error?.code, "diverged");
  });

  test("a subscription that is left and asked for again in one breath goes on", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    const first = hw.live("orders");
    await first.ready;
    first.close();
    const second = hw.live("orders");
    assert.deepEqual(second.value, []);
    await hw.query("count");
    assert.equal(gateway.heard.filter((message) => message.type === "subscribe").length, 1);
    second.close();
    await until(() => gateway.subscriptions === 0);
  });

  test("a new subscription that is refused for now is asked for three times", async (t) => {
    const gateway = new Gateway();
    gateway.instead = (message, link) => {
      if (message.type !== "subscribe") return false;
      link.say({
        type: "error",
        id: message.id,
        code: "limit",
        message: "later",
        retryable: true,
        retry_after_secs: 0,
      });
      return true;
    };
    const hw = client(t, gateway);
    const live = hw.live("orders");
    await assert.rejects(live.ready, { code: "limit" });
    assert.equal(gateway.heard.length, 3);
    assert.equal(live.status, "failed");
  });

  test("a token that cannot be had is a failure like others", async (t) => {
    const gateway = new Gateway();
    let calls = 0;
    const hw = client(t, gateway, {
      token: () => {
        calls += 1;
        if (calls < 3) throw new Error("offline");
        return "t";
      },
    });
    await until(() => hw.status.value === "open");
    assert.equal([...gateway.links][0].token, "t");
    assert.match(hw.errors[0].message, /a token could not be had: Error: offline/);
  });

  test("what was refused before a connection was lost is no reason to stay away", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    const live = hw.live("orders");
    await live.ready;
    const [link] = gateway.links;
    link.say({ type: "error", code: "subscription_unknown", message: "no subscription '7'" });
    await until(() => hw.errors.length === 1);
    link.cut();
    await until(() => gateway.opened === 2 && live.status === "live");
  });

  test("what the gateway ends a connection for tells more than that it hung up", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    await until(() => hw.status.value === "open");
    const [link] = gateway.links;
    link.say({ type: "error", code: "token_expired", message: "the token has expired" });
    await until(() => hw.errors.length === 1);
    link.cut();
    await until(() => gateway.opened === 2 && hw.status.value === "open");
    assert.deepEqual(
      hw.errors.map(({ code }) => code),
      ["token_expired", "token_expired"],
    );
  });

  test("closed by who hears of an error, it asks for no other token", async (t) => {
    t.mock.timers.enable({ apis: ["setTimeout"] });
    let tokens = 0;
    const hw = connect("http://memory", {
      token: () => `t${++tokens}`,
      transport: (_url, _token, { onClose }) => {
        queueMicrotask(() => onClose(connectionFailed("nobody is there")));
        return { send() {} };
      },
      onError: () => hw.close(),
    });
    while (hw.status.value !== "closed") await new Promise(setImmediate);
    t.mock.timers.tick(60_000);
    await new Promise(setImmediate);
    assert.equal(tokens, 1);
  });

  test("closing ends all of it", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    const live = hw.live("orders");
    await live.ready;
    const waiting = hw.live("others");
    hw.close();
    assert.deepEqual([live.status, hw.status.value], ["closed", "closed"]);
    await assert.rejects(waiting.ready, { code: "connection" });
    await assert.rejects(hw.query("count"), {
      code: "connection",
      message: "the connection was closed",
    });
    await until(() => gateway.links.size === 0);
  });
});

describe("a topic", () => {
  test("folds what it is told, beside what was read", async (t) => {
    const gateway = new Gateway();
    gateway.instead = (message, link) => {
      if (message.type === "subscribe") link.say({ type: "subscribed", id: message.id, view: 1 });
      return message.type === "subscribe";
    };
    const hw = client(t, gateway);
    /** @type {string[][]} */
    const told = [];
    const topic = hw.topic("chat:1", (ops) => told.push(ops.map(({ op }) => op)));
    await topic.ready;
    const [link] = gateway.links;
    const at = "2026-01-31T12:00:00Z";
    const say = (/** @type {any[]} */ ops) =>
      link.say({ type: "topic", view: 1, position: "ab-1:1:", at, ops });
    const upsert = (/** @type {number} */ id, /** @type {string} */ text) => ({
      op: "upsert",
      entity: "messages",
      key: [id],
      row: { id, text },
    });
    say([]);
    say([upsert(2, "b"), upsert(3, "c")]);
    await until(() => told.length === 1);
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
    say([{ op: "remove", entity: "messages", key: [3] }]);
    link.say({ type: "poke", view: 1, position: "ab-2:2:", at });
    link.say({ type: "gap", view: 1, position: "ab-3:3:", since: null, reason: "resync" });
    await until(() => told.length === 4);
    assert.deepEqual(told, [["upsert", "upsert"], ["remove"], ["poke"], ["gap"]]);
    assert.deepEqual(
      topic.value?.messages.map((row) => row.id),
      [1, 2],
    );
    assert.equal(topic.position, "ab-3:3:");
  });
});

describe("a channel", () => {
  test("has members, messages once, and says things", async (t) => {
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
    gateway.instead = (message, link) => {
      if (message.type === "subscribe") {
        link.say({ type: "subscribed", id: message.id, view: 1, member: "m1" });
        link.say({ type: "presence", view: 1, joined: [ann], whole: true });
        link.say(old);
      }
      if (message.type === "publish") {
        link.say({ ...old, id: "a:2", data: message.data });
        link.say({ type: "answer", id: message.request, position: "" });
      }
      if (message.type === "state") link.say({ type: "answer", id: message.request, position: "" });
      return true;
    };
    const hw = client(t, gateway);
    /** @type {any[]} */
    const heard = [];
    const room = hw.channel("room:1", {
      state: { name: "Ann" },
      onMessage: ({ data }) => heard.push(data),
    });
    await room.ready;
    assert.deepEqual([room.member, room.members.value], ["m1", [ann]]);
    await room.publish({ text: "hello" });
    await room.setState({ name: "Ann", typing: true });
    assert.deepEqual(heard, ["hi", { text: "hello" }]);
    const [{ state }] = room.members.value;
    for (const link of gateway.links) link.cut();
    await until(() => gateway.opened === 2 && room.status === "live");
    assert.equal(room.members.value[0].state, state);
    const [first, second] = gateway.heard.filter((message) => message.type === "subscribe");
    assert.deepEqual(first.channel, { name: "room:1", present: true, state: { name: "Ann" } });
    assert.deepEqual(second.channel.state, { name: "Ann", typing: true });
    await until(() => heard.length >= 2);
    assert.deepEqual(heard, ["hi", { text: "hello" }]);
  });

  test("what is said is said again after a lost connection: in order, with its keys", async (t) => {
    const gateway = new Gateway();
    let views = 0;
    /** @type {any[]} */
    const passed = [];
    let isDeaf = true;
    gateway.instead = (message, link) => {
      const { type, id, request } = message;
      if (type === "subscribe") {
        link.say({ type: "subscribed", id, view: ++views });
        link.say({ type: "presence", view: views, whole: true });
      } else if (!isDeaf && request) {
        passed.push(message);
        link.say({ type: "answer", id: request, position: "" });
      }
      return true;
    };
    const hw = client(t, gateway);
    const room = hw.channel("room:1");
    await room.ready;
    const [one, two] = [room.publish("one"), room.publish("two")];
    await until(() => gateway.heard.length === 3);
    isDeaf = false;
    for (const link of [...gateway.links]) link.cut();
    const three = room.publish("three");
    await Promise.all([one, two, three]);
    assert.deepEqual(
      passed.map(({ data }) => data),
      ["one", "two", "three"],
    );
    const before = gateway.heard.slice(1, 3);
    assert.deepEqual(
      passed.slice(0, 2).map((message) => message.idempotency_key),
      before.map((message) => message.idempotency_key),
    );
    assert.notEqual(passed[0].id, before[0].id);
    isDeaf = true;
    const [sent, { length }] = [room.publish("four"), gateway.heard];
    await until(() => gateway.heard.length > length);
    hw.close();
    await assert.rejects(sent, { code: "outcome_unknown" });
  });
});

describe("what a program does wrong harms nobody", () => {
  test("an argument that is no JSON is refused, and the client goes on", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    /** @type {any} */
    const endless = {};
    endless.self = endless;
    await assert.rejects(hw.mutate("place", endless), { code: "config" });
    assert.throws(() => hw.subscribe("count", endless), { code: "config" });
    await until(() => hw.status.value === "open");
    for (const link of [...gateway.links]) link.cut();
    assert.equal(await hw.query("count"), 0);
    assert.equal(gateway.opened, 2);
  });

  test("arguments that are none are refused at once", async (t) => {
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

  test("what is changed after it was passed is sent as it was", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    const args = { id: 7, at: new Date(0) };
    const placed = hw.mutate("place", args);
    args.id = 8;
    assert.equal((await placed).value, 7);
    const [{ args: sent }] = gateway.heard;
    assert.deepEqual(sent, { id: 7, at: "1970-01-01T00:00:00.000Z" });
  });

  test("an onError that throws does not end the connection", async (t) => {
    const gateway = new Gateway();
    /** @type {any[]} */
    const thrown = [];
    // What throws there is the page's to hear of; here it would end the process.
    t.mock.method(globalThis, "queueMicrotask", (/** @type {() => void} */ task) =>
      Promise.resolve().then(task).catch((error) => thrown.push(error.message)),
    );
    const onError = () => {
      throw new Error("mine");
    };
    const hw = client(t, gateway, { onError });
    await until(() => hw.status.value === "open");
    for (const link of [...gateway.links]) link.cut();
    await until(() => gateway.opened === 2 && hw.status.value === "open");
    assert.deepEqual(thrown, ["mine"]);
  });
});

describe("rows that several look at", () => {
  test("two stores of a row are both told", async (t) => {
    const gateway = new Gateway();
    gateway.ids = [1];
    const live = client(t, gateway).live("orders");
    await live.ready;
    const told = [0, 0];
    const stores = [live.row([1]), live.row([1])];
    stores.forEach((store, i) => store.subscribe(() => (told[i] += 1)));
    const update = { delta: "update", key: [1], row: { id: 1, z: 2 }, index: 0, cursor: [1] };
    for (const link of gateway.links) {
      for (const view of link.views.values()) {
        link.say({ type: "deltas", view, position: "ab-200:200:", at: "", deltas: [update] });
      }
    }
    await until(() => told[0] === 1 && told[1] === 1);
  });

  test("one that is ended twice ends no other", async (t) => {
    const gateway = new Gateway();
    gateway.ids = [1];
    const live = client(t, gateway).live("orders");
    await live.ready;
    const end = live.row([1]).subscribe(() => {});
    end();
    let told = 0;
    live.row([1]).subscribe(() => (told += 1));
    end();
    const [link] = gateway.links;
    const [view] = link.views.values();
    const deltas = [{ delta: "leave", key: [1], index: 0 }];
    link.say({ type: "deltas", view, position: "ab-200:200:", at: "", deltas });
    await until(() => told === 1);
  });

  test("what is ended before the first call is not called", async (t) => {
    const live = client(t, new Gateway()).live("orders");
    await live.ready;
    /** @type {string[]} */
    const calls = [];
    live.onValue(() => calls.push("ended"))();
    live.onValue(() => calls.push("kept"));
    await until(() => calls.length);
    assert.deepEqual(calls, ["kept"]);
  });

  test("a shared window that one slides stays where it is for the other", async (t) => {
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

  test("a name that objects have of themselves is a name like others", () => {
    const text = (/** @type {number} */ x) => `{"a":1,"data":{"__proto__":{"admin":true},"x":${x}}}`;
    const merged = shared(parse(text(1)), parse(text(2)));
    assert.equal(stringify(merged), text(2));
    assert.equal(/** @type {any} */ (merged).data.admin, undefined);
  });
});

test("what is said on a channel while there is no connection goes to the next", async (t) => {
  const gateway = new Gateway();
  gateway.instead = ({ type, id, request }, link) => {
    if (type === "subscribe") {
      link.say({ type: "subscribed", id, view: 1, member: "m1" });
      link.say({ type: "presence", view: 1, whole: true });
    }
    if (request) link.say({ type: "answer", id: request, position: "" });
    return true;
  };
  const room = client(t, gateway).channel("room:1");
  await room.ready;
  // It is there unseen, and no state makes it a member.
  await room.setState(undefined);
  for (const link of [...gateway.links]) link.cut();
  await until(() => room.status === "stale");
  await room.publish("after");
  const of = (/** @type {string} */ type) => gateway.heard.filter((each) => each.type === type);
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

test("a feed waits for whatever can be waited for", async (t) => {
  const gateway = new Gateway();
  gateway.instead = ({ type, id }, link) => {
    if (type === "subscribe") link.say({ type: "subscribed", id, view: 1, resumed: true });
    return type === "subscribe";
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
  const [link] = gateway.links;
  const transactions = [1, 2].map((xid) => ({ xid, at: "", changes: [{ seq: xid }] }));
  link.say({ type: "changes", view: 1, position: "ab-3:3:", transactions });
  await until(() => done.length === 1);
  assert.deepEqual(begun, [1]);
  done[0]();
  await until(() => begun.length === 2);
});
