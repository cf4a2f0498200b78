/**
 * A client releases what it has opened: connections that do not answer any more while it continues,
 * and everything when it is closed. A process that has closed its client ends by itself.
 */

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { createServer } from "node:net";
import { test } from "node:test";

import { until } from "./stage.js";

const HELLO = { type: "hello", session: "s", version: 1, keepalive: 0.1 };

/**
 * A gateway that sends a hello, and whose connections then stay half-open: it sends nothing, and never
 * confirms that one is closed.
 *
 * @param {import("node:test").TestContext} t
 * @param {(head: string) => string | undefined} [answer] to a request of SSE
 */
async function halfOpen(t, answer = () => undefined) {
  /** @type {Set<import("node:net").Socket>} */
  const open = new Set();
  /** @type {string[]} */
  const heads = [];
  const server = createServer({ allowHalfOpen: true }, (socket) => {
    open.add(socket);
    socket.on("error", () => {});
    // Ended by the client, or reset: gone in either case.
    for (const event of ["end", "close"]) socket.on(event, () => open.delete(socket));
    let isGreeted = false;
    socket.on("data", (data) => {
      if (isGreeted) return;
      const head = data.toString();
      heads.push(head);
      const key = /sec-websocket-key: (.*)\r\n/i.exec(head)?.[1];
      if (key) socket.write(Buffer.concat([upgrade(key), frame(HELLO)]));
      else if (head.startsWith("GET /v1/stream")) socket.write(stream(HELLO));
      else return void socket.write(answer(head) ?? "");
      isGreeted = true;
    });
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", () => resolve(undefined)));
  t.after(() => {
    server.close();
    for (const socket of open) socket.destroy();
  });
  const { port } = /** @type {import("node:net").AddressInfo} */ (server.address());
  return { url: `http://127.0.0.1:${port}`, open, heads };
}

/** @param {string} key */
function upgrade(key) {
  const guid = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
  const accept = createHash("sha1").update(key + guid).digest("base64");
  return Buffer.from(
    `HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n` +
      `Sec-WebSocket-Accept: ${accept}\r\n\r\n`,
  );
}

/** @param {object} message */
function frame(message) {
  const text = Buffer.from(JSON.stringify(message));
  return Buffer.concat([Buffer.from([0x81, text.length]), text]);
}

/** @param {object} message */
function stream(message) {
  const event = `data: ${JSON.stringify(message)}\n\n`;
  const size = Buffer.byteLength(event).toString(16);
  return (
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" +
    `${size}\r\n${event}\r\n`
  );
}

/**
 * A program with a client, in a process of its own: how it ended and what it wrote.
 *
 * @param {string} url
 * @param {"ws" | "sse"} transport
 * @param {string} program
 */
async function run(url, transport, program) {
  const text = `
    import { connect } from ${JSON.stringify(new URL("../src/index.js", import.meta.url))};
    const backoff = { seconds: [0.01, 0.02], failuresMax: 1000 };
    const options = { transport: "${transport}", backoff, onError() {} };
    const hw = connect("${url}", options);
    const until = async (holds) => {
      while (!holds()) await new Promise((resolve) => setTimeout(resolve, 5));
    };
    ${program}`;
  const flags = ["--experimental-websocket", "--no-warnings", "--input-type=module", "-e", text];
  const child = spawn(process.execPath, flags, { stdio: ["ignore", "pipe", "inherit"] });
  let said = "";
  child.stdout.on("data", (data) => (said += data));
  const timer = setTimeout(() => child.kill(), 15_000);
  const code = await new Promise((resolve) => child.on("close", resolve));
  clearTimeout(timer);
  return { code, said };
}

for (const transport of /** @type {const} */ (["ws", "sse"])) {
  test(`over ${transport}: half-open connections are released, and the process ends`, async (t) => {
    const gateway = await halfOpen(t);
    let most = 0;
    const look = setInterval(() => (most = Math.max(most, gateway.open.size)), 20);
    const { code, said } = await run(
      gateway.url,
      transport,
      `await until(() => hw.reconnects >= 8);
       hw.close();
       console.log("closed");`,
    );
    clearInterval(look);
    assert.deepEqual([code, said], [0, "closed\n"]);
    assert.ok(gateway.heads.length >= 9, `${gateway.heads.length} connections`);
    // Each has a second to confirm that it is closed; so they do not pile up.
    assert.ok(most < 8, `${most} connections at once`);
    await until(() => gateway.open.size === 0);
  });

  test(`over ${transport}: closed before the hello`, async (t) => {
    const gateway = await halfOpen(t);
    const { code, said } = await run(
      gateway.url,
      transport,
      `await new Promise((resolve) => setTimeout(resolve, 1));
       hw.close();
       console.log("closed");`,
    );
    assert.deepEqual([code, said], [0, "closed\n"]);
    await until(() => gateway.open.size === 0);
  });
}

test("over sse: an unsubscribe is not repeated once the client is closed", async (t) => {
  const later = { code: "limit", message: "later", retryable: true, retry_after_secs: 3600 };
  const gateway = await halfOpen(t, (head) => {
    if (!head.startsWith("DELETE")) return response(200, {});
    return response(429, { error: later });
  });
  HELLO.keepalive = 60;
  t.after(() => (HELLO.keepalive = 0.1));
  const { code, said } = await run(
    gateway.url,
    "sse",
    `await until(() => hw.status.value === "open");
     const fetched = fetch;
     let answered;
     globalThis.fetch = async (url, options) => {
       const response = await fetched(url, options);
       if (options.method === "DELETE") answered = response.status;
       return response;
     };
     hw.live("orders").close();
     await until(() => answered === 429);
     await new Promise((resolve) => setTimeout(resolve, 50));
     hw.close();
     await new Promise(setImmediate);
     console.log(process.getActiveResourcesInfo().filter((name) => name === "Timeout").length);`,
  );
  assert.deepEqual([code, said], [0, "0\n"]);
});

/** @param {number} status @param {object} body */
function response(status, body) {
  const text = JSON.stringify(body);
  return `HTTP/1.1 ${status} X\r\nContent-Type: application/json\r\nContent-Length: ${text.length}\r\n\r\n${text}`;
}
