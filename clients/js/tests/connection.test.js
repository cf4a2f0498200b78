/** Connections that fail, calls that are repeated, and closing, with a gateway in memory. */

import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { connectionFailed } from "../src/errors.js";
import { connect } from "../src/index.js";
import { client, Gateway } from "./gateway.js";
import { until } from "./stage.js";

describe("a client", () => {
  test("gives up after ten failures in a row, and every call and subscription fails with the reason", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    const live = hw.live("orders");
    await live.ready;
    gateway.isUp = false;
    for (const transport of gateway.transports) transport.cut();
    const asked = hw.query("count");
    await assert.rejects(asked, {
      code: "connection",
      message: /gave up after 10 failures in a row: the gateway is down/,
    });
    assert.equal(hw.status.value, "failed");
    assert.equal(live.status, "failed");
    assert.equal(live.error, hw.error);
    assert.deepEqual(live.value, [], "what was known is still shown");
    assert.equal(hw.errors.length, 10);
    await assert.rejects(hw.mutate("place"), { code: "connection" });
    await assert.rejects(hw.live("orders").ready, { code: "connection" });
  });

  test("any message resets the count", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway, { backoff: { seconds: [0.03, 0.03] } });
    for (let round = 1; round <= 3; round++) {
      await until(() => hw.status.value === "open");
      gateway.isUp = false;
      for (const transport of [...gateway.transports]) transport.cut();
      const { length } = hw.errors;
      await until(() => hw.errors.length >= length + 6);
      gateway.isUp = true;
    }
    await until(() => hw.status.value === "open");
    assert.equal(hw.reconnects, 3);
  });

  test("sends queries and mutations again; a mutation has the same key each time", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    const cut = new Set();
    gateway.instead = (message, transport) => {
      if (cut.has(message.type)) return false;
      cut.add(message.type);
      transport.cut();
      return true;
    };
    assert.equal(await hw.query("count"), 0);
    assert.equal((await hw.mutate("place", { id: 1 })).value, 1);
    assert.equal((await hw.mutate("place", { id: 2 })).value, 2);
    const types = gateway.received.map((message) => message.type);
    assert.deepEqual(types, ["query", "query", "mutate", "mutate", "mutate"]);
    const [first, second, third] = gateway.received
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
    assert.equal(gateway.received[0].idempotency_key, "order:7");
    for (const idempotencyKey of ["", "x".repeat(129), "ä", "a\nb", /** @type {any} */ (7)]) {
      const refused = hw.mutate("place", { id: 1 }, { idempotencyKey });
      await assert.rejects(refused, { code: "config" });
    }
    assert.equal(gateway.received.length, 1);
  });

  describe("the outcome of a mutation that was sent is unknown", () => {
    const unanswered = async (/** @type {import("node:test").TestContext} */ t) => {
      const gateway = new Gateway();
      gateway.instead = (message) => message.type === "mutate";
      const hw = client(t, gateway);
      const sent = hw.mutate("place", { id: 1 });
      await until(() => gateway.received.length === 1);
      return { gateway, hw, sent };
    };

    test("when no gateway can be reached again; it is known for a mutation that was not sent", async (t) => {
      const { gateway, hw, sent } = await unanswered(t);
      gateway.isUp = false;
      for (const transport of [...gateway.transports]) transport.cut();
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
      gateway.instead = (message, transport) => message.type === "mutate" && (transport.cut(), true);
      for (const transport of [...gateway.transports]) transport.cut();
      await assert.rejects(sent, { code: "outcome_unknown", message: /lost 10 times/ });
      assert.equal(gateway.received.length, 10);
    });

    test("when the gateway may have forgotten its key", async (t) => {
      const { gateway, sent } = await unanswered(t);
      t.mock.timers.enable({ apis: ["Date"], now: Date.now() + 24 * 3_600_000 });
      for (const transport of [...gateway.transports]) transport.cut();
      await assert.rejects(sent, { code: "outcome_unknown", message: /lost for more than 3600 seconds/ });
      assert.equal(gateway.received.length, 1);
    });

    test("when a repetition is refused before its key is looked up; but not when it has run", async (t) => {
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
        gateway.instead = ({ type, id }, transport) => {
          const retryable = code === "timed_out";
          if (type === "mutate") transport.deliver({ type: "error", id, code, message: "no", retryable });
          return true;
        };
        for (const transport of [...gateway.transports]) transport.cut();
        await assert.rejects(sent, { code: expected });
      }
    });
  });

  test("a mutation that is refused temporarily is sent again, with its key, for a while", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    let refusals = 3;
    gateway.instead = (message, transport) => {
      if (message.type !== "mutate" || !refusals--) return false;
      const fields = [
        { code: "unavailable", retryable: true },
        { code: "outcome_unknown" },
        { code: "limit", retryable: true, retry_after_secs: 0.01 },
      ][refusals];
      transport.deliver({ type: "error", id: message.id, message: "later", ...fields });
      return true;
    };
    assert.equal((await hw.mutate("place", { id: 1 })).value, 1);
    assert.equal(new Set(gateway.received.map((message) => message.idempotency_key)).size, 1);
    assert.equal(gateway.received.length, 4);
    refusals = 1;
    gateway.instead = ({ id }, transport) => {
      const later = { code: "limit", message: "later", retryable: true, retry_after_secs: 3600 };
      transport.deliver({ type: "error", id, ...later });
      return true;
    };
    await assert.rejects(hw.mutate("place", { id: 2 }), { code: "limit", retryAfter: 3600 });
    gateway.instead = ({ id }, transport) => {
      transport.deliver({ type: "error", id, code: "conflict", message: "x", retryable: true });
      return true;
    };
    await assert.rejects(hw.mutate("place", { id: 3 }), { code: "conflict" });
  });

  test("a mutation whose first attempt still runs is sent again with its key", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    const refusals = ["lost", "still_running", "still_running"];
    gateway.instead = (message, transport) => {
      const code = message.type === "mutate" && refusals.shift();
      if (!code) return false;
      if (code === "lost") transport.cut();
      else transport.deliver({ type: "error", id: message.id, code, message: "x", retryable: true });
      return true;
    };
    assert.equal((await hw.mutate("place", { id: 1 })).value, 1);
    assert.equal(gateway.received.length, 4);
    assert.equal(new Set(gateway.received.map((message) => message.idempotency_key)).size, 1);
    gateway.instead = ({ id }, transport) => {
      const running = { code: "still_running", message: "x", retryable: true };
      transport.deliver({ type: "error", id, ...running, retry_after_secs: 3600 });
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
    for (const transport of gateway.transports) transport.cut();
    await until(() => gateway.opened === 2 && live.status === "live");
    const [first, second] = gateway.received.filter((message) => message.type === "subscribe");
    assert.equal(first.since, undefined);
    assert.equal(second.since, position);
    assert.notEqual(first.id, second.id);
  });

  test("reads rows again after a delta that does not fit, and fails after several", async (t) => {
    const gateway = new Gateway();
    gateway.place(1);
    const hw = client(t, gateway);
    const live = hw.live("orders");
    const rows = await live.ready;
    const misfit = () => {
      const [transport] = gateway.transports;
      const [view] = transport.views.values();
      const deltas = [{ delta: "leave", key: [9], index: 0 }];
      transport.deliver({ type: "deltas", view, position: "ab-200:200:", at: "", deltas });
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

  test("a subscription that is closed and opened again in one task continues", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    const first = hw.live("orders");
    await first.ready;
    first.close();
    const second = hw.live("orders");
    assert.deepEqual(second.value, []);
    await hw.query("count");
    assert.equal(gateway.received.filter((message) => message.type === "subscribe").length, 1);
    second.close();
    await until(() => gateway.subscriptions === 0);
  });

  test("a new subscription that is refused temporarily is tried three times", async (t) => {
    const gateway = new Gateway();
    gateway.instead = (message, transport) => {
      if (message.type !== "subscribe") return false;
      transport.deliver({
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
    assert.equal(gateway.received.length, 3);
    assert.equal(live.status, "failed");
  });

  test("a token function that fails is a failure like others", async (t) => {
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
    assert.equal([...gateway.transports][0].token, "t");
    assert.match(hw.errors[0].message, /the token function failed: Error: offline/);
  });

  test("a refusal before a lost connection does not prevent a reconnect", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    const live = hw.live("orders");
    await live.ready;
    const [transport] = gateway.transports;
    transport.deliver({ type: "error", code: "subscription_unknown", message: "no subscription '7'" });
    await until(() => hw.errors.length === 1);
    transport.cut();
    await until(() => gateway.opened === 2 && live.status === "live");
  });

  test("the last error of the gateway is reported instead of the closed connection", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway);
    await until(() => hw.status.value === "open");
    const [transport] = gateway.transports;
    transport.deliver({ type: "error", code: "token_expired", message: "the token has expired" });
    await until(() => hw.errors.length === 1);
    transport.cut();
    await until(() => gateway.opened === 2 && hw.status.value === "open");
    assert.deepEqual(
      hw.errors.map(({ code }) => code),
      ["token_expired", "token_expired"],
    );
  });

  test("a token that is a text and was refused is not sent again", async (t) => {
    const gateway = new Gateway();
    const hw = client(t, gateway, { token: "t" });
    await until(() => hw.status.value === "open");
    const [transport] = gateway.transports;
    transport.deliver({ type: "error", code: "token_expired", message: "the token has expired" });
    await until(() => hw.errors.length === 1);
    transport.cut();
    await until(() => hw.status.value === "failed");
    assert.equal(gateway.opened, 1);
    const last = hw.errors[hw.errors.length - 1];
    assert.equal(last.code, "token_expired");
    assert.match(last.hint ?? "", /function that returns a new token/);
  });

  test("a function is called for another token, once", async (t) => {
    const gateway = new Gateway();
    let tokens = 0;
    const hw = client(t, gateway, { token: () => `t${++tokens}` });
    for (const time of [1, 2]) {
      await until(() => gateway.opened === time && hw.status.value === "open");
      const [transport] = gateway.transports;
      const received = hw.errors.length;
      transport.deliver({ type: "error", code: "token_expired", message: "the token has expired" });
      await until(() => hw.errors.length > received);
      transport.cut();
    }
    await until(() => hw.status.value === "failed");
    assert.equal(tokens, 2);
  });

  test("closed in onError, it calls no token function again", async (t) => {
    t.mock.timers.enable({ apis: ["setTimeout"] });
    let tokens = 0;
    const hw = connect("http://memory", {
      token: () => `t${++tokens}`,
      transport: (_url, _token, { onClose }) => {
        queueMicrotask(() => onClose(connectionFailed("the gateway is down")));
        return { send() {} };
      },
      onError: () => hw.close(),
    });
    while (hw.status.value !== "closed") await new Promise(setImmediate);
    t.mock.timers.tick(60_000);
    await new Promise(setImmediate);
    assert.equal(tokens, 1);
  });

  test("closing ends every subscription and call", async (t) => {
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
      message: "the client was closed",
    });
    await until(() => gateway.transports.size === 0);
  });
});
