/**
 * The types of the messages that docs/reference/protocol.md describes. No code.
 *
 * @typedef {any} Json what JSON can hold; integers beyond 2⁵³ are BigInt
 * @typedef {Record<string, any>} Row
 * @typedef {readonly any[]} Key
 * @typedef {readonly any[]} Cursor
 *
 * @typedef {{delta: "enter", key: Key, row: Row, index: number, cursor?: Cursor}} Enter
 * @typedef {{delta: "leave", key: Key, index: number}} Leave
 * @typedef {{delta: "move", key: Key, row: Row, source: number, index: number,
 *   cursor?: Cursor}} Move
 * @typedef {{delta: "update", key: Key, row: Row, index?: number | null,
 *   cursor?: Cursor | null}} Update
 * @typedef {{delta: "match", key: Key, row: Row}} Match
 * @typedef {{delta: "unmatch", key: Key}} Unmatch
 * @typedef {{delta: "reset", rows: readonly Enter[]}} ResetDelta
 * @typedef {Enter | Leave | Move | Update | Match | Unmatch} Step
 * @typedef {Step | ResetDelta} Delta
 *
 * @typedef {{type: "hello", session: string, version: number, keepalive: number,
 *   expires_at?: string | null}} Hello
 * @typedef {{type: "subscribed", id: string, view: number, resumed?: boolean, lost?: boolean,
 *   key?: readonly string[], member?: string | null}} Subscribed
 * @typedef {{type: "unsubscribed", id: string}} Unsubscribed
 * @typedef {{type: "snapshot", view: number, position: string, rows: readonly (Enter | Match)[],
 *   more?: boolean, hash?: number | null}} Snapshot
 * @typedef {{type: "deltas", view: number, position: string, at: string, deltas: readonly Step[],
 *   hash?: number | null}} Deltas
 * @typedef {{type: "reset", view: number, position: string, reason: string,
 *   rows?: readonly (Enter | Match)[], more?: boolean, hash?: number | null}} Reset
 * @typedef {{type: "gap", view: number, position: string, since: string | null,
 *   reason: "overflow" | "resync"}} Gap
 * @typedef {{source: string, position?: string | null, committed_at?: string | null,
 *   kind?: string | null}} Origin
 * @typedef {{seq: number, table: string, op: string, key?: Row | null, before?: Row | null,
 *   after?: Row | null, changed?: string[] | null, user_id?: string | null,
 *   function_name?: string | null, trace_id?: string | null, origin?: Origin | null}} Change
 * @typedef {{xid: number, at: string, changes: any[], complete?: boolean}} WireTransaction
 * @typedef {{type: "changes", view: number, position: string,
 *   transactions: readonly WireTransaction[]}} Changes
 * @typedef {{type: "result", view: number, position: string, value?: Json}} Result
 * @typedef {{type: "failed", view: number, position: string, code: string, message: string,
 *   hint?: string | null, retryable?: boolean}} Failed
 * @typedef {{type: "answer", id: string, position: string, value?: Json}} Answer
 * @typedef {{op: "upsert", entity: string, key: Key, row: Row}} Upsert
 * @typedef {{op: "remove", entity: string, key: Key}} Remove
 * @typedef {{type: "topic", view: number, position: string, at: string,
 *   ops: readonly (Upsert | Remove)[]}} TopicMessage
 * @typedef {{type: "poke", view: number, position: string, at: string}} Poke
 * @typedef {{type: "message", view: number, id: string, data: Json, at: string,
 *   user?: string | null, member?: string | null}} ChannelMessage
 * @typedef {{member: string, user?: string | null, state?: Json}} Member
 * @typedef {{type: "presence", view: number, joined?: readonly Member[], left?: readonly string[],
 *   whole?: boolean, missed?: boolean}} Presence
 * @typedef {{type: "error"} & import("./errors.js").Refusal} ErrorMessage
 * @typedef {{type: "keepalive"}} Keepalive
 * @typedef {{type: "authenticated", expires_at?: string | null}} Authenticated
 * @typedef {{type: "written", position: string}} Written a mutation of another tab; never on the wire
 *
 * @typedef {Snapshot | Deltas | Reset | Gap | Changes | Result | Failed | TopicMessage | Poke
 *   | ChannelMessage | Presence} ViewMessage about one subscription, by its view
 * @typedef {Hello | Subscribed | Unsubscribed | ViewMessage | Answer | ErrorMessage | Keepalive
 *   | Authenticated | Written} ServerMessage
 *
 * @typedef {{table: string, where?: Json, order?: Json, limit?: number, after?: Cursor | null,
 *   columns?: readonly string[] | null, mode?: "maintained" | "streamed"}} LiveQuery
 * @typedef {{tables?: readonly string[], where?: Json, since?: string | null,
 *   format?: "headwater" | "debezium"}} ChangesQuery
 * @typedef {{name: string, args: Record<string, Json>, delta?: boolean}} QueryCall
 * @typedef {{name: string, present?: boolean, state?: Json}} ChannelCall
 * @typedef {{type: "subscribe", id: string, live?: LiveQuery, query?: QueryCall,
 *   changes?: ChangesQuery, topic?: string, channel?: ChannelCall, since?: string,
 *   after?: string, verify?: boolean}} Subscribe
 * @typedef {{type: "unsubscribe", id: string}} Unsubscribe
 * @typedef {{type: "reanchor", id: string, after: Cursor | null, request: string}} Reanchor
 * @typedef {{type: "authenticate", token: string}} Authenticate
 * @typedef {{type: "query", id: string, name: string, args: Record<string, Json>,
 *   after?: string}} Ask
 * @typedef {{type: "mutate", id: string, name: string, args: Record<string, Json>,
 *   idempotency_key: string}} Mutate
 * @typedef {{type: "wait", id: string, position: string}} Wait
 * @typedef {{type: "publish", id: string, data: Json, request?: string,
 *   idempotency_key: string}} Publish
 * @typedef {{type: "state", id: string, state: Json, request?: string}} SetState
 * @typedef {Subscribe | Unsubscribe | Reanchor | Authenticate | Ask | Mutate | Wait | Publish
 *   | SetState} ClientMessage
 */

export {};
