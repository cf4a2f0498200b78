/**
 * The gateway is killed and started again, PostgreSQL too: nothing is missed, nothing comes twice.
 */

import assert from "node:assert/strict";
import { before, beforeEach, describe, test } from "node:test";

import { client, kill, reset, restartDatabase, sql, start, until, written } from "./stage.js";

for (const transport of /** @type {const} */ (["ws", "sse"])) {
  describe(`over ${transport}`, () => {
    /** @type {string} */
    let url;
    before(async () => (url = await reset()));
    beforeEach(() => written("truncate orders, readings restart identity"));

    test("a gateway that is killed and started again", async (t) => {
      await written("insert into orders (region, amount) values (7, 1), (7, 2)");
      const hw = client(t, url, { transport });
      const live = hw.live({ table: "orders" }, undefined, { verify: true });
      const whole = hw.subscribe("open_orders", { region: 7 });
      /** @type {number[]} */
      const inserted = [];
      const feed = hw.changes({ tables: ["orders"] }, ({ changes }) => {
        inserted.push(...changes.flatMap((change) => change.after?.id ?? []));
      });
      await Promise.all([live.ready, whole.ready, feed.ready]);
      await until(() => feed.position);
      const rows = live.value;
      await kill();
      await until(() => hw.status.value === "connecting");
      assert.deepEqual([live.status, whole.status, feed.status], ["stale", "stale", "stale"]);
      assert.equal(live.value, rows, "what was known is still shown");
      const asked = hw.query("count");
      await sql("insert into orders (region, amount) values (7, 3)");
      assert.equal(await start(), url);
      await until(() => live.value?.length === 3 && whole.value.length === 3);
      await until(() => inserted.includes(3));
      assert.equal(await asked, 3);
      assert.equal(live.value?.[0], rows?.[0], "rows that did not change are the same objects");
      assert.deepEqual([live.status, whole.status, feed.status], ["live", "live", "live"]);
      // Its position may be before delivered changes; nothing comes twice.
      assert.deepEqual(inserted, [1, 2, 3].slice(-inserted.length));
      assert.ok(hw.reconnects >= 1);
      assert.equal(hw.diverged, 0);
    });

    test("a mutation whose gateway is killed is sent again, and happens once", async (t) => {
      const hw = client(t, url, { transport });
      await hw.live("orders").ready;
      const slow = hw.mutate("place_slowly", { amount: 1 });
      // Its query is answered, so the mutation was sent.
      await hw.query("count");
      await kill();
      const later = hw.mutate("place_order", { region: 7, amount: 5 });
      await start();
      const values = [(await slow).value, (await later).value];
      const placed = await sql("select id::int from orders order by orders.amount");
      assert.deepEqual(
        placed.map(({ id }) => id),
        values,
      );
    });

    test("with the same key a mutation happens once, and the answer is the same", async (t) => {
      const hw = client(t, url, { transport });
      const order = { region: 7, amount: 5 };
      const options = { idempotencyKey: `order:${transport}` };
      const [one, other] = await Promise.all([
        hw.mutate("place_order", order, options),
        hw.mutate("place_order", { ...order }, options),
      ]);
      assert.equal(one.value, other.value);
      assert.equal(await hw.query("count"), 1);
      const reused = hw.mutate("place_order", { ...order, amount: 6 }, options);
      await assert.rejects(reused, { code: "idempotency_key_reused", retryable: false });
    });

    test("a database that crashes and comes back", async (t) => {
      const hw = client(t, url, { transport });
      const live = hw.live({ table: "orders" }, undefined, { verify: true });
      await live.ready;
      await hw.mutate("place_order", { region: 7, amount: 1 });
      await until(() => live.value?.length === 1);
      await sql("checkpoint");
      await restartDatabase();
      await until(async () => {
        try {
          await sql("insert into orders (region, amount) values (7, 2)");
          return true;
        } catch {
          return false;
        }
      });
      const expected = (await sql("select count(*)::int as n from orders"))[0].n;
      await until(() => live.value?.length === expected && live.status === "live");
      assert.equal(hw.diverged, 0);
    });
  });
}
