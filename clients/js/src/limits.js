/**
 * Every bound that the client keeps; docs/reference/limits.md says the same of the Python one.
 */

/** First and longest pause before the next connection, in seconds; doubled in between. */
export const BACKOFF_SECONDS = /** @type {const} */ ([1, 30]);

/** Failures in a row after which it gives up; any message begins the count again. */
export const FAILURES_MAX = 10;

/** How long a gateway may take to let us in and to greet. */
export const CONNECT_SECONDS = 10;

/** How long the tab that leads may take to react; then another takes over, in time to greet. */
export const LEADER_SECONDS = 4;

/** How long a gateway may take to confirm that a WebSocket is closed; then Node hangs up. */
export const CLOSE_SECONDS = 1;

/**
 * Over SSE, a request that is not answered for this many keepalive intervals is sent again (a query
 * or a mutation), or ends the connection.
 */
export const REQUEST_KEEPALIVES = /** @type {const} */ ({ call: 2, session: 4 });

/** Requests under way over SSE; more wait for one to be answered. */
export const REQUESTS_AT_ONCE = 16;

/** Queries, mutations and waits under way; more wait for one to be answered. */
export const CALLS_AT_ONCE = 32;

/**
 * Calls of all tabs under way on a connection that they share; more wait for one to be answered.
 * The gateway takes 64 of a session.
 */
export const SHARED_CALLS_AT_ONCE = 60;

/** How often a call is asked whose connection is lost each time. */
export const CALL_ATTEMPTS_MAX = 10;

/** How long a mutation is asked again that is refused for now. */
export const REFUSED_SECONDS_MAX = 30;

/**
 * How long after its first attempt a mutation is repeated, and a message to a channel. Gateways
 * store their keys longer: at least two hours, and 10 minutes.
 */
export const REPEAT_SECONDS_MAX = 3_600;
export const PUBLISH_SECONDS_MAX = 300;

/** How often a new subscription is asked for that is refused for now. */
export const SUBSCRIBE_ATTEMPTS_MAX = 3;

/** Deltas that may arrive between the parts of a result. */
export const BATCHES_MAX = 1_000;

/** Transactions that wait for the callback of a feed; beyond that the feed is left for a while. */
export const TRANSACTIONS_MAX = 1_000;

/** Transactions beyond its position that a feed remembers, so as not to deliver them twice. */
export const DELIVERED_MAX = 100_000;

/** A result that diverges so often in a row, each time from a fresh snapshot, has failed. */
export const DIVERGED_MAX = 3;

/** A token is renewed so long before it ends, or when half of its time is left. */
export const REFRESH_SECONDS = 30;

/** The largest message that is taken over SSE, in characters. */
export const MESSAGE_CHARS_MAX = 64 * 1024 * 1024;

/** Rows of one table that a topic holds; the oldest are forgotten first. */
export const TOPIC_ROWS_MAX = 10_000;

/** Messages of a channel that are remembered, so as not to deliver them twice. */
export const MESSAGES_SEEN_MAX = 1_000;

/** How long a subscription is kept after the last component that used it. */
export const LINGER_SECONDS = 2;

/** How long a value stands still below an optimistic patch whose mutation is under way. */
export const HOLD_SECONDS = 1;
