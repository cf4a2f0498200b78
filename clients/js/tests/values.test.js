/** Values that are read, written and compared: JSON, hashes, positions, rows, events, URLs. */

import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { Backoff } from "../src/connection/backoff.js";
import { crc32 } from "../src/state/crc32.js";
import { connect } from "../src/index.js";
import { compareKeys, compareText, parse, stringify } from "../src/json.js";
import { gatewayUrl } from "../src/transports/transport.js";
import { contains, covers, isBefore, parsePosition } from "../src/state/position.js";
import { Replica } from "../src/state/replica.js";
import { reuseEqual } from "../src/state/structural-sharing.js";
import { SseParser } from "../src/transports/sse-parser.js";
import { ValueStore } from "../src/store.js";

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

test("equal parts keep their identity", () => {
  const before = [
    { id: 1, data: { a: [1] } },
    { id: 2, data: null },
    { id: 3, data: {} },
  ];
  const copy = structuredClone(before);
  assert.equal(reuseEqual(before, copy), before);
  const changed = [{ id: 0, data: 1 }, ...structuredClone(before).slice(0, 2)];
  const result = reuseEqual(before, changed);
  assert.deepEqual(result, changed);
  assert.equal(result[1], before[0]);
  assert.equal(result[2], before[1]);
  const inner = reuseEqual(before[0], { id: 9, data: { a: [1] } });
  assert.equal(inner.data, before[0].data);
  assert.deepEqual(reuseEqual({ a: 1 }, { a: 1, b: undefined }), { a: 1, b: undefined });
  assert.equal(reuseEqual([1], "text"), "text");
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

test("a parser of events, with whole texts and single characters", () => {
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

test("an event in pieces may be as large as a whole one", () => {
  const parser = new SseParser(100);
  const data = "x".repeat(60);
  assert.deepEqual(
    [`data: ${data}`, "\n", "\n"].flatMap((piece) => parser.feed(piece)),
    [data],
  );
});

test("pauses double, and then it gives up", () => {
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

test("listeners are called once for all changes", async () => {
  const value = new ValueStore(0);
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
