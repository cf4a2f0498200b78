/**
 * A client that works while its connection is damaged, in Node and in a browser. It records what its
 * callers got, what each subscription showed, and which of them `waitFor` did not wait for;
 * tests/support/generators/faults.py compares that with the database. It stops on request.
 *
 * @typedef {import("../src/index.js").Options} Options
 */

const CHANNEL = "room:faults";

/**
 * @param {(url: string | string[] | undefined, options: Options) =>
 *   import("../src/client.js").Client} connect
 * @param {{url?: string | string[], transport: "ws" | "sse", name: string,
 *   tabs?: string | boolean, writes?: boolean, onReady: () => void, isOver: () => boolean}} options
 *   `onReady` is called when every subscription has begun
 */
export async function work(connect, options) {
  const { url, transport, name, tabs = false, writes = true, onReady, isOver } = options;
  /** @type {[string, string][]} */
  const errors = [];
  const hw = connect(url, {
    transport,
    tabs,
    backoff: { seconds: [0.05, 0.2], failuresMax: 1000 },
    onError: ({ code, message }) => void errors.push([code, message]),
  });
  const seen = follow(hw);
  /** @type {[string, any, string][]} */
  const results = [];
  /** @type {string[]} */
  const published = [];
  /** @type {string[]} */
  const received = [];
  /** @type {string[]} */
  const early = [];
  const room = hw.channel(CHANNEL, { onMessage: ({ data }) => void received.push(data) });
  await Promise.all([seen.ready, room.ready]);
  onReady();
  if (!writes) {
    while (!isOver()) await pause(20);
    hw.close();
    return { backwards: seen.backwards };
  }
  let number = 0;
  const caller = async (/** @type {boolean} */ waits) => {
    while (!isOver()) {
      const business = `${name}.${++number}`;
      try {
        const { value, position } = await hw.mutate("record", { business });
        results.push([business, value, position]);
        if (waits && (await waited(hw, position))) early.push(...seen.older(value));
      } catch (error) {
        results.push([business, String(/** @type {any} */ (error).code), ""]);
      }
      await pause(5);
    }
  };
  const speaker = async () => {
    while (!isOver()) {
      const said = `${name}.said.${++number}`;
      await room.publish(said).then(
        () => published.push(said),
        () => {},
      );
      await pause(20);
    }
  };
  await Promise.all([caller(true), caller(false), speaker()]);
  const last = await hw.mutate("record", { business: `${name}.last` });
  results.push([`${name}.last`, last.value, last.position]);
  await hw.waitFor(last.position);
  early.push(...seen.older(last.value));
  const shown = seen.now();
  const { reconnects, diverged } = hw;
  hw.close();
  const { backwards } = seen;
  return { results, published, received, early, errors, shown, reconnects, diverged, backwards };
}

/**
 * Follow the counter with every kind of subscription, and record each time it goes back.
 *
 * @param {import("../src/client.js").Client} hw
 */
function follow(hw) {
  /** @type {string[]} */
  const backwards = [];
  /** @type {Record<string, number>} */
  const highest = {};
  const saw = (/** @type {string} */ what, /** @type {number | undefined} */ n) => {
    if (n === undefined) return;
    if (n < (highest[what] ?? 0)) backwards.push(`${what}: ${highest[what]}, then ${n}`);
    highest[what] = n;
  };
  /** @type {number[]} */
  const fed = [];
  const counter = hw.live({ table: "counters" }, (rows) => saw("live", rows[0]?.n), {
    verify: true,
  });
  const latest = hw.live(
    { table: "executed", order: [["n", "desc"]], limit: 5 },
    (rows) => saw("window", rows[0]?.n),
    { verify: true },
  );
  const streamed = hw.live({ table: "executed", mode: "streamed", where: [["n", "<=", 20]] });
  const total = hw.subscribe("total", {}, (value) => saw("query", value));
  const several = hw.subscribe("latest", {}, (rows) => saw("rows", rows[0]?.n), { delta: true });
  const topic = hw.topic("counter:all", () => saw("topic", topic.value?.counters?.[0]?.n));
  const feed = hw.changes({ tables: ["executed"] }, ({ changes }) => {
    for (const change of changes) fed.push(change.after.n);
  });
  /** The value of the counter in each subscription. @returns {Record<string, number>} */
  const newest = () => ({
    live: counter.value?.[0]?.n,
    window: latest.value?.[0]?.n,
    query: total.value,
    rows: several.value?.[0]?.n,
    topic: topic.value?.counters?.[0]?.n,
    feed: Math.max(...fed),
  });
  return {
    backwards,
    /** The subscriptions that do not show this yet. @param {number} n */
    older: (n) =>
      Object.entries(newest())
        .filter(([, shown]) => !(shown >= n))
        .map(([what, shown]) => `${what}: ${shown} instead of ${n}`),
    ready: Promise.all([counter, latest, streamed, total, several, topic, feed].map(readyOf)),
    now: () => ({
      live: counter.value,
      window: latest.value,
      streamed: streamed.value,
      query: total.value,
      rows: several.value,
      topic: topic.value,
      fed,
    }),
  };
}

/**
 * Whether the wait for a position succeeded. The gateway may be behind, or cut off, for longer than a
 * wait lasts.
 *
 * @param {import("../src/client.js").Client} hw
 * @param {string} position
 */
const waited = (hw, position) =>
  hw.waitFor(position).then(
    () => true,
    () => false,
  );

/** @param {import("../src/subscriptions/handles.js").Subscription<any>} subscription */
const readyOf = (subscription) => subscription.ready;

/** @param {number} milliseconds */
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
