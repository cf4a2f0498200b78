/** Everything that a client does, against a real gateway, over each transport. */

import assert from "node:assert/strict";
import { createHmac } from "node:crypto";
import { before, beforeEach, describe, test } from "node:test";
import { isDeepStrictEqual } from "node:util";

import { client, metric, reset, sql, start, until, written } from "./stage.js";

const TRUTH = `select id::int, region, status, amount::text from orders where region = 7
  order by orders.amount desc, id limit 10`;
const TOP = {
  table: "orders",
  where: [["region", "=", 7]],
  order: [["amount", "desc"]],
  limit: 10,
};

for (const transport of /** @type {const} */ (["ws", "sse"])) {
  describe(`over ${transport}`, () => {
    /** @type {string} */
    let url;
    before(async () => (url = await reset()));
    beforeEach(() => written("truncate orders, readings restart identity"));

    test("a live query follows the table", async (t) => {
      await written("insert into orders (region, amount) values (7, 10), (7, 30), (8, 99)");
      const hw = client(t, url, { transport });
      /** @type {any[]} */
      const seen = [];
      const live = hw.live(
        { ...TOP, limit: 2 },
        (rows) => seen.push(rows.map((row) => row.amount)),
        { verify: true },
      );
      assert.equal(live.value, undefined);
      assert.equal(live.status, "waiting");
      const rows = await live.ready;
      assert.equal(rows, live.value);
      assert.deepEqual(live.keyColumns, ["id"]);
      assert.deepEqual(live.keys, [[2], [1]]);
      assert.equal(live.status, "live");
      await sql("insert into orders (region, amount) values (7, 20)");
      await until(() => live.value?.[1].amount === "20.00");
      assert.deepEqual(seen, [
        ["30.00", "10.00"],
        ["30.00", "20.00"],
      ]);
      assert.equal(live.value?.[0], rows[0], "the row that did not change is the same object");
      assert.ok(live.position);
      live.close();
      assert.equal(live.status, "closed");
    });

    test("deltas, single rows and another window", async (t) => {
      await written("insert into orders (region, amount) select 7, n from generate_series(1, 5) n");
      const hw = client(t, url, { transport });
      const live = hw.live({ ...TOP, limit: 2 });
      await live.ready;
      /** @type {string[][]} */
      const batches = [];
      live.deltas(({ deltas }) => batches.push(deltas.map((delta) => delta.delta)));
      const [first, second] = [live.row([5]), live.row([4])];
      let firstChanged = 0;
      let secondChanged = 0;
      first.subscribe(() => (firstChanged += 1));
      second.subscribe(() => (secondChanged += 1));
      await sql("update orders set status = 'paid' where id = 5");
      await until(() => first.value?.status === "paid");
      assert.deepEqual([firstChanged, secondChanged], [1, 0]);
      assert.deepEqual(batches, [["reset"], ["update"]]);
      await live.reanchor(live.cursor([4]) ?? null);
      assert.deepEqual(live.keys, [[3], [2]]);
      assert.equal(first.value, undefined);
      await assert.rejects(live.reanchor(["no cursor"]), { code: "invalid_query" });
      assert.deepEqual(live.keys, [[3], [2]]);
      await live.reanchor(null);
      assert.deepEqual(live.keys, [[5], [4]]);
      await live.reanchor(null); // it is there already
      assert.deepEqual(live.keys, [[5], [4]]);
    });

    test("handles of the same query share a subscription", async (t) => {
      const hw = client(t, url, { transport });
      const [one, other] = [hw.live(TOP), hw.live({ ...TOP })];
      await other.ready;
      assert.equal(one.value, other.value);
      assert.equal(await metric("headwater_subscriptions", { kind: "live" }), 1);
      one.close();
      await sql("insert into orders (region, amount) values (7, 1)");
      await until(() => other.value?.length === 1);
      // Another window is only for the handle that requested it.
      const third = hw.live(TOP);
      await third.reanchor(other.cursor([1]) ?? null);
      assert.deepEqual([third.value?.length, other.value?.length], [0, 1]);
      other.close();
      third.close();
      await until(async () => (await metric("headwater_subscriptions", { kind: "live" })) === 0);
    });

    test("values beyond a Number, floats, nested JSON: the hash agrees", async (t) => {
      await written(`insert into readings (id, value, data) values
        (9007199254740993, 1.0, '{"z": 1.50, "ä": [1e-7, 1e21], "😀": 1, "\uffff": null}'),
        (2, 1e16, '[12345678901234567890]'), (3, '-0', null), (4, 'NaN', '"x"'), (5, 0.1, '{}')`);
      const hw = client(t, url, { transport });
      const live = hw.live({ table: "readings", order: [["id", "asc"]] }, undefined, {
        verify: true,
      });
      await live.ready;
      await sql("update readings set value = value + 0.5 where id = 5");
      await until(() => live.value?.[3].value === 0.6);
      assert.equal(hw.diverged, 0);
      assert.deepEqual(live.keys.at(-1), [9007199254740993n]);
      assert.deepEqual(live.value?.[0].data, [12345678901234567890n]);
      assert.equal(live.value?.[2].value, "NaN");
      await live.reanchor(live.cursor([5]) ?? null);
      assert.deepEqual(live.keys, [[9007199254740993n]]);
      const again = hw.live({ table: "readings", where: [["id", "=", 9007199254740993n]] });
      assert.equal((await again.ready).length, 1);
    });

    test("query, mutate, subscribe and waitFor", async (t) => {
      const hw = client(t, url, { transport });
      const orders = hw.subscribe("open_orders", { region: 7 });
      const deltas = hw.subscribe("open_orders", { region: 7 }, undefined, { delta: true });
      assert.deepEqual(await orders.ready, []);
      for (let n = 1; n <= 5; n++) {
        const before = orders.value;
        const placed = await hw.mutate("place_order", { region: 7, amount: n });
        assert.equal(placed.value, n);
        assert.equal((await hw.query("open_orders", { region: 7 })).length, n);
        await hw.waitFor(placed.position);
        assert.equal(orders.value.length, n);
        assert.deepEqual(deltas.value, orders.value);
        // The new row is the first: the others are the same objects.
        assert.deepEqual(
          orders.value
            .slice(1)
            .map((/** @type {any} */ row, /** @type {number} */ i) => row === before[i]),
          Array(n - 1).fill(true),
        );
      }
      assert.equal(await hw.query("echo", { value: 9007199254740993n }), 9007199254740993n);
    });

    test("errors name the mistake", async (t) => {
      const hw = client(t, url, { transport });
      const nothing = hw.mutate("place_order", { region: 7, amount: -1 });
      await assert.rejects(nothing, {
        code: "nothing",
        hint: "Order something.",
        retryable: false,
      });
      await assert.rejects(hw.query("open_orders", { region: "north" }), { code: "invalid_query" });
      await assert.rejects(hw.query("closed_orders"), { code: "query_unknown" });
      await assert.rejects(hw.live("nowhere").ready, { code: "capture" });
      await assert.rejects(hw.waitFor("ab-7:7:"), { code: "resync" });
      const unknown = hw.subscribe("closed_orders");
      await until(() => unknown.status === "failed");
      assert.equal(unknown.error?.code, "query_unknown");
      assert.throws(() => hw.live(/** @type {any} */ ({})), { code: "config" });
    });

    test("a query that fails and recovers is stale in between", async (t) => {
      const hw = client(t, url, { transport });
      const ratio = hw.subscribe("ratio");
      assert.equal(await ratio.ready, 0);
      await hw.mutate("place_order", { region: 7, amount: 0 });
      await until(() => ratio.status === "stale");
      assert.equal(ratio.error?.code, "function_failed");
      assert.equal(ratio.value, 0);
      await sql("update orders set amount = 50");
      await until(() => ratio.value === 2);
      assert.deepEqual([ratio.status, ratio.error], ["live", undefined]);
    });

    test("a change feed delivers every transaction once and in order", async (t) => {
      const hw = client(t, url, { transport });
      /** @type {any[]} */
      const got = [];
      const feed = hw.changes(
        { tables: ["orders"], where: ["region", "=", 7] },
        async (transaction) => {
          await new Promise((resolve) => setTimeout(resolve, 1));
          got.push(...transaction.changes.map((change) => change.after.id));
        },
      );
      await feed.ready;
      for (let n = 0; n < 20; n++)
        await sql("insert into orders (region, amount) values (7, 1), (8, 1)");
      await until(() => got.length === 20);
      assert.deepEqual(
        got,
        Array.from({ length: 20 }, (_, n) => 2 * n + 1),
      );
      await until(() => feed.position);
      feed.close();
      await sql("insert into orders (region, amount) values (7, 1)");
      const again = hw.changes({ tables: ["orders"], since: feed.position }, ({ changes }) => {
        got.push(...changes.map((change) => change.after.id));
      });
      await until(() => got.includes(41));
      again.close(); // before the next test empties the table
    });

    test("a topic sends rows, also those that the client missed", async (t) => {
      await written("insert into orders (region, amount) values (7, 1), (7, 2)");
      const hw = client(t, url, { transport });
      /** @type {string[]} */
      const batches = [];
      const topic = hw.topic("region:7", (ops) => batches.push(...ops.map(({ op }) => op)));
      await topic.ready;
      await until(() => topic.position);
      topic.fill("orders", await sql("select id::int, region, amount::text from orders"));
      await sql("insert into orders (region, amount) values (7, 3), (8, 1)");
      await until(() => topic.value?.orders.length === 3);
      const [first] = topic.value?.orders ?? [];
      await sql("update orders set region = 8 where id = 2");
      await until(() => topic.value?.orders.length === 2);
      assert.equal(topic.value?.orders[0], first);
      assert.deepEqual(
        topic.value?.orders.map((row) => row.id),
        [1, 3],
      );
      assert.deepEqual(batches, ["upsert", "remove"]);
    });

    test("a channel has members, who receive each other’s messages", async (t) => {
      const [ann, ben] = [client(t, url, { transport }), client(t, url, { transport })];
      /** @type {any[]} */
      const received = [];
      const first = ann.channel("room:1", { state: { name: "Ann" } });
      await first.ready;
      const second = ben.channel("room:1", {
        present: true,
        onMessage: ({ data }) => received.push(data),
      });
      await second.ready;
      await until(() => first.members.value.length === 2);
      await first.publish({ text: "hello" });
      await first.setState({ name: "Ann", typing: true });
      await until(() => received.length === 1);
      const states = () => second.members.value.map((each) => each.state);
      await until(() => states().some((state) => state?.typing));
      assert.deepEqual(received, [{ text: "hello" }]);
      assert.ok(second.members.value.some((each) => each.member === second.member));
      await assert.rejects(first.publish("x".repeat(100_000)), { code: "invalid_query" });
      first.close();
      await until(() => second.members.value.length === 1);
    });

    test("after random writes the rows equal the database", async (t) => {
      const hw = client(t, url, { transport });
      const live = hw.live(TOP, undefined, { verify: true });
      const streamed = hw.live({ table: "orders", mode: "streamed" });
      const whole = hw.subscribe("open_orders", { region: 7 });
      await Promise.all([live.ready, streamed.ready, whole.ready]);
      const ids = Array.from({ length: 40 }, (_, n) => n + 1);
      let seed = 8;
      const random = (/** @type {number} */ most) => (seed = (seed * 48271) % 2147483647) % most;
      for (let n = 0; n < 60; n++) {
        const id = ids[random(40)];
        const row = `(${id}, ${7 + random(2)}, ${random(50)})`;
        await sql(
          random(4)
            ? `insert into orders (id, region, amount) values ${row} on conflict (id)
          do update set region = excluded.region, amount = excluded.amount`
            : `delete from orders where id = ${id}`,
        );
      }
      const truth = await sql(TRUTH);
      const count = (await sql("select count(*)::int as n from orders"))[0].n;
      await until(() => isDeepStrictEqual(live.value, truth), "the rows are true");
      await until(() => streamed.value?.length === count);
      await until(() => whole.value.length === live.value?.length || whole.value.length >= 10);
      assert.equal(hw.diverged, 0);
      assert.deepEqual(hw.errors, []);
    });

    test("a token is sent, renewed, and requested again", async (t) => {
      const secret = "a secret that is long enough for SHA-256 and more";
      const secured = await start({ auth_secret: secret, auth_leeway: "0 seconds" });
      t.after(() => start());
      const hour = Date.now() / 1000 + 3600;
      const hw = client(t, secured, {
        transport,
        token: signed(secret, { sub: "ann", exp: hour }),
      });
      await hw.live("orders").ready;
      let calls = 0;
      const renewing = client(t, secured, {
        transport,
        token: async () => {
          calls += 1;
          return signed(secret, { sub: "ann", exp: Date.now() / 1000 + (calls === 1 ? 3 : 3600) });
        },
      });
      const live = renewing.live("orders");
      await live.ready;
      await until(() => calls === 2);
      // Longer than the first token is valid.
      await new Promise((resolve) => setTimeout(resolve, 3000));
      await sql("insert into orders (region, amount) values (7, 1)");
      await until(() => live.value?.length === 1);
      assert.equal(renewing.reconnects, 0);
      const stranger = client(t, secured, { transport });
      await until(() => stranger.status.value === "failed");
      assert.equal(stranger.error?.code, "token_missing");
      const forger = client(t, secured, {
        transport,
        token: signed("x", { sub: "ann", exp: hour }),
      });
      await assert.rejects(forger.live("orders").ready, { code: "token_signature" });
    });
  });
}

/** A token. @param {string} secret @param {object} claims */
function signed(secret, claims) {
  const part = (/** @type {object} */ value) =>
    Buffer.from(JSON.stringify(value)).toString("base64url");
  const text = `${part({ alg: "HS256", typ: "JWT" })}.${part(claims)}`;
  return `${text}.${createHmac("sha256", secret).update(text).digest("base64url")}`;
}
