"""Every bound in one place, with its unit and what happens at it."""

from __future__ import annotations

# Log and reader
VALUE_DEPTH_MAX = 200
"""How deep JSON in a row may be nested. What is deeper stays text: a later reader could not follow
it."""

LOG_SLOTS = 32
"""Partitions of the log. Retention empties them in turn; see docs/design/001-log.md."""

LOG_PAGE_CHANGES = 50_000
"""Changes read from the log at a time. More new changes than this are read page by page."""

MARK_ROWS = 1_000
"""The newest rows of the log that the mark of a position covers, and trimmed rows that the log
remembers by number and time. A transaction that a restored snapshot lost, and that began before
this many newer rows, is not noticed by a mark that does not list it; a position whose mark covers
more trimmed rows than are remembered is accepted as it is."""

MARK_EARLIER_MAX = 32
"""Transactions of a read that are older than its newest `MARK_ROWS` rows, and that its mark lists.
Of more, those that wrote last are listed."""

MARK_LATE_MAX = 1_000
"""Transactions that a mark lists in all, most because they were running at the position before. Of
more, those with the highest ids are listed."""

MARK_COVERED_MAX = MARK_ROWS + MARK_LATE_MAX
"""Rows that a mark covers in all. A mark that would cover more begins at a later row; one from a
client that claims more is checked against this many."""

POSITION_CHARS_MAX = 100_000
"""Characters in a position. A longer text is refused; the longest that we give out lists each
transaction that was running."""

CHECKED_POSITIONS_MAX = 1_000
"""Positions of returning clients for which a gateway remembers whether they are of this history.
Beyond, it asks the database again."""

LOG_TABLES_SECONDS = 10.0
"""How long the log is asked which tables a backlog changed. If it takes longer, all are read."""

EVENT_CHANGES_MAX = 10_000
"""Changes that wait for handlers of `hw.on("change")`. More are read from the log later."""

TRANSACTION_PART_CHANGES = 200_000
"""A transaction with more changes is delivered in parts (`Transaction.complete`)."""

SERVER_VERSION_MIN = 140_000
"""The oldest PostgreSQL: 14, for `create function … return` and multirange types."""

CONNECT_TIMEOUT_SECONDS = 10
"""How long opening a connection may take before it counts as unreachable."""

SLOT_CHECK_SECONDS = 60
"""How often a reader looks which slots of the log are in use. Shorter than any slot lasts."""

SLOT_SECONDS_MIN = 3_600
"""With slots shorter than this (a retention below 30 hours) a reader visits all of them."""

DEAD_PEER_SECONDS = 30
"""A database that does not acknowledge for this long counts as gone, and we reconnect."""

RECONNECT_SECONDS = (0.05, 5.0)
"""First and longest pause between attempts to reach a lost database; doubled in between."""

# Waking (docs/design/002-waking.md)
SAFETY_POLL_SECONDS = 1.0
"""A sleeping reader looks at the log this often without being woken."""

WAKES_PER_SECOND_MAX = 300
"""A reader woken more often begins to poll."""

POLL_SECONDS = 0.005
"""Pause between two reads of a polling reader."""

POLL_QUIET_SECONDS = 1.0
"""A polling reader that found nothing for this long goes back to sleep."""

# Maintenance
MAINTENANCE_SECONDS = 60.0
"""How often retention is applied and altered tables get new capture functions."""

MAINTENANCE_LOCK_TIMEOUT = "1s"
"""How long maintenance may wait for a user's table; then it tries again next time."""

MIGRATION_LOCK_TIMEOUT = "60s"
"""How long installing waits for another process that installs; then it is an error."""

ENABLE_LOCK_TIMEOUT = "1s"
"""How long enabling may wait for a table at a time: writers queue behind it meanwhile."""

ENABLE_ATTEMPTS_MAX = 20
"""How often enabling tries; then it is an error that names the table."""

UNINSTALL_ATTEMPTS_MAX = 5
"""How often uninstalling tries that readers of the log come across; then the deadlock is raised."""

CURSOR_SAVE_SECONDS = 0.5
"""A cursor is saved at most this often while its consumer is busy."""

CURSOR_IDLE_SAVE_SECONDS = 30.0
"""A cursor is saved this often while there is nothing new."""

CURSOR_WARNING_SHARE = 0.2
"""Warn when less than this share of the retention is left to a cursor."""

# Settings
DURATION_SECONDS_MAX = 100 * 365 * 86_400
"""The longest length of time that a setting may give: a hundred years. A longer one is refused."""

# Embedded PostgreSQL
EMBEDDED_START_SECONDS = 120.0
"""How long a start waits for the server to answer, crash recovery included. Then the start fails,
retryable: the server goes on recovering, and the next start attaches to it."""

EMBEDDED_STOP_SECONDS = 30.0
"""How long a fast stop may take. Then the server is stopped at once; its next start recovers."""

EMBEDDED_COMMAND_SECONDS = 120.0
"""How long `initdb` may take. Then it is killed and the start fails."""

EMBEDDED_LEAVING_SECONDS = 2.0
"""How long connections of those who are leaving may take to end before they count as clients that
stay, for whom the server goes on."""

EMBEDDED_POLL_SECONDS = (0.01, 0.1)
"""First and longest wait between two looks at a server that is starting or stopping."""

EMBEDDED_LOG_BYTES_MAX = 8 * 1024 * 1024
"""A larger server log is set aside when the server starts; the one set aside before is dropped."""

EMBEDDED_LOG_TAIL_BYTES = 4_096
"""How much of the end of a log or of `initdb`'s output an error shows."""

EMBEDDED_SOCKET_PATH_BYTES_MAX = 103
"""Longest path of a Unix socket that every system takes (macOS; Linux takes 107). A server whose
data folder is deeper has its socket in a private folder below /tmp."""

# Live queries
FILTER_DEPTH_MAX = 16
"""Groups within groups in a filter. A deeper one is refused."""

FILTER_CONDITIONS_MAX = 256
"""Conditions in a filter. A larger one is refused."""

FILTER_GROUPS_MAX = 256
"""Groups (`and`, `or`, plain lists) in a filter, empty ones too. A filter with more is refused."""

FILTER_VALUES_MAX = 1_000
"""Values in one `in` list. A longer one is refused."""

FILTER_VALUES_TOTAL_MAX = 10_000
"""Values in all `in` lists of a filter together; a statement can bind 65,535. More are refused."""

FILTER_TEXT_CHARS_MAX = 10_000
"""Characters in a text or number of a filter or cursor. A longer one is refused."""

FILTER_PATTERN_CHARS_MAX = 1_000
"""Characters in a pattern of `like` or `ilike`. A longer one is refused."""

FILTER_PATTERNS_CHARS_MAX = 10_000
"""Characters in all patterns of a filter together. More are refused."""

FILTER_HASHES_MAX = 100
"""Numbers in one `in` list that have the same hash as another of them. With more the list is
refused: such numbers do not come by chance."""

LIKE_TEXT_CHARS_MAX = 2_000_000
"""Characters of one row that all patterns of a filter read in memory, each its part of it. With a
longer text the database is asked."""

LIKE_STEPS_MAX = 20_000
"""Places in a text where a pattern is tried whose literals have a `_` between them. Beyond, the
database is asked."""

NUMERIC_DIGITS_MAX = 131_072
NUMERIC_SCALE_MAX = 16_383
"""Digits before and behind the point of a number in a filter or cursor: as many as PostgreSQL's
`numeric` can have. A larger or finer number is refused."""

ORDER_COLUMNS_MAX = 8
"""Order columns a query may name, before the primary key is appended. More are refused."""

WINDOW_ROWS_DEFAULT = 100
"""Rows in a window when the query names no limit."""

WINDOW_ROWS_MAX = 1_000
"""The largest limit a query may name unless its table allows another. A larger one is refused."""

WINDOW_CUSHION_ROWS_MIN = 5
"""Rows kept beyond a window, at least: so many may leave before the database is asked again."""

WINDOW_CUSHION_ROWS_MAX = 100
"""Rows kept beyond a window, at most. Between the two bounds it is a quarter of the window."""

WINDOW_ASK_KEYS_MAX = 2_000
"""Keys put to the database in one question. Where more are in doubt, the window is read anew."""

STREAMED_PAGE_ROWS = 5_000
"""Rows read at a time while a streamed query learns its members."""

VERIFY_VALUES_MAX = 20_000
"""Values (rows, those beyond the window too, times columns) in a result whose messages carry a hash
for a client that verifies. Messages of a larger one carry none."""

VERIFY_CHARS_MAX = 4_000_000
"""Characters in the texts of such a result. Messages of a longer one carry no hash."""

# Gateway
SESSION_QUEUE_BYTES_MAX = 1024 * 1024
"""Bytes that may wait for one client, beside the frame that exceeds it. Then its subscriptions fall
behind, each by its own policy."""

SESSION_BEHIND_SECONDS_MAX = 60.0
"""A client that stays behind for this long is disconnected."""

SESSION_IDLE_SECONDS_MAX = 300.0
"""A connection without a subscription is closed after this long."""

SUBSCRIPTION_ID_CHARS_MAX = 200
"""Characters in the id that a client gives a subscription; a topic's name fits. A longer one is
refused."""

SESSION_CHANNEL_SUBSCRIPTIONS_MAX = 16
"""Subscriptions of one session to the same channel: each is sent every message. More are refused
(`subscriptions_per_channel`)."""

SESSION_REQUESTS_MAX = 64
"""Queries, mutations, waits and messages to channels that one session has under way. More are
refused, to be asked again when one has been answered."""

WAIT_SECONDS_MAX = 30.0
"""How long a client may wait for a position to be sent. Then it is told to try again."""

BEHIND_SECONDS_MAX = 5.0
"""How long a subscription waits for its gateway to read the log up to a position that the client
has. Then it is refused (`behind`), so that the client tries again or another gateway."""

FEED_TABLES_MAX = 100
"""Tables one change feed may name. More are refused."""

KEEPALIVE_SLOTS = 16
"""Connections get their keepalives in so many groups, one after the other."""

RECHECKS_AT_ONCE = 16
"""Subscriptions whose rights are looked at again at the same time."""

REQUEST_BYTES_MAX = 1024 * 1024
"""Bytes in the body of a request or in a WebSocket message. A larger one is refused."""

MESSAGE_CONTAINERS_MAX = 50_000
"""Lists and objects in such a body or message. One with more is refused: decoding it would take
long."""

REQUEST_HEAD_BYTES_MAX = 64 * 1024
"""Bytes in a request's line and headers. A larger head is answered with 431."""

REQUEST_HEAD_SECONDS = 20.0
"""How long a client may take to send a request's line and headers. Then it is disconnected."""

REQUEST_BODY_SECONDS = 20.0
"""How long a client may take to send a request's body. Then it is answered with 408."""

KEEP_ALIVE_SECONDS = 60
"""How long a connection without a request stays open for the next one."""

ACCEPT_BACKLOG = 2048
"""Connections that may wait to be accepted. More are refused by the operating system."""

DEAD_CLIENT_SECONDS = 60.0
"""A client whose machine does not acknowledge for this long what it was sent counts as gone."""

SOCKET_PING_SECONDS = 20.0
"""How often a WebSocket is pinged, and how long a client may take to answer. Then it is gone."""

UNSENT_BYTES_MAX = 128 * 1024
"""Bytes that the operating system takes for a connection without sending them. More wait in the
sink, where they are counted and where newer state replaces them."""

SINK_LOW_BYTES = 32 * 1024
"""A sink that held more says so when it is down to this."""

SINK_BYTES_MAX = 64 * 1024 * 1024
"""A sink that holds more when it is given yet another frame is aborted. Sessions stop far below
it; only one enormous frame leads there."""

COMPRESS_BYTES_AT_ONCE = 256 * 1024
"""Bytes of a stream that are compressed in one turn of the event loop. Of a larger message each
part waits for its turn."""

SINK_CLOSE_SECONDS = 5.0
"""How long a closed sink waits for its client to take what is buffered. Then it is cut off."""

# Authentication
SECRET_BYTES_MIN = 32
"""Bytes in a shared secret, at least. A shorter one is refused at the start."""

RSA_BITS_MIN = 2_048
"""Bits of an RSA key, at least. A smaller one is refused at the start, and ignored in a key set."""

TOKEN_BYTES_MAX = 8_192
"""Bytes in a token. A longer one is refused before any of it is looked at."""

CLAIM_BYTES_MAX = 256
"""Bytes in the name of a user or tenant. A token with a longer one is refused."""

ROLE_BYTES_MAX = 63
"""Bytes in the name of a database role, as in PostgreSQL. A token with a longer one is refused."""

JWKS_BYTES_MAX = 1_048_576
"""Bytes in a key set. A larger one counts as a failed fetch."""

JWKS_KEYS_MAX = 32
"""Keys taken from a key set. Those beyond are ignored, with a warning in the log."""

JWKS_TIMEOUT_SECONDS = 5.0
"""How long fetching a key set may take before it counts as failed."""

JWKS_REFRESH_SECONDS = 300.0
"""An older key set is fetched again when next needed; until that succeeds the old one holds."""

JWKS_COOLDOWN_SECONDS = 10.0
"""A key set is fetched no more often, however many tokens name keys that are not in it."""

TICKET_SECONDS = 30
"""How long a ticket holds. A later one is refused; the client asks for another."""

TICKETS_PER_USER_MAX = 20
"""Tickets of one user that are given out and not used. More are answered with 429."""

TICKET_DATABASE_SECONDS = 5.0
"""How long the database may take over a ticket before the gateway answers with 503."""

AUTHORIZE_SECONDS_MAX = 10.0
"""How long the application's authorize hook may take. Then access is denied and the log says it."""

# Requests
ACCEPT_ENCODING_ITEMS_MAX = 32
"""Encodings looked at in a request's `Accept-Encoding`. Those beyond do not count."""

RATE_BURST_SECONDS = 2.0
"""Of requests that come at once, as many are let through as the rate allows in this time. More are
answered with 429 and when to try again."""

SUBSCRIBE_BYTES_PER_REQUEST = 1024
"""A live query counts as one request more against `requests_per_second` for each so many bytes of
it, but never as more than a full burst."""

RATE_OWNERS_MAX = 100_000
"""Users and addresses whose requests are counted. Beyond it the one seen longest ago is forgotten
early, and may ask a little more often than the rate."""

QUOTA_RETRY_SECONDS = 5.0
"""When to try again after too many sessions or subscriptions, as told to clients."""

# Python client
CLIENT_MESSAGE_BYTES_MAX = 64 * 1024 * 1024
"""The largest message a client takes. A larger one ends the connection for good, with an error that
says to ask for less."""

CLIENT_BACKOFF_SECONDS = (1.0, 30.0)
"""First and longest pause before a client connects again; doubled in between, with jitter."""

CLIENT_FAILURES_MAX = 10
"""A client gives up after so many failures in a row; any message begins the count again."""

CLIENT_ANSWER_SECONDS = 10.0
"""How long a client whose stream has ended waits for the answers to its mutations. Then it does not
know what has become of them, and connects again."""

CLIENT_CLOSE_SECONDS = 1.0
"""How long a client waits for the gateway to say goodbye over WebSocket; then it hangs up."""

CLIENT_REQUESTS_AT_ONCE = 16
"""Requests that a client over SSE has under way; more wait for one to be answered."""

CLIENT_CALLS_AT_ONCE = 32
"""Queries, mutations and waits that a client has under way; more wait for one to be answered."""

CLIENT_CALL_ATTEMPTS_MAX = 10
"""How often a query or wait is asked whose connection is lost each time; then that is raised."""

CLIENT_MUTATION_ATTEMPTS_MAX = 30
"""How often a mutation is sent whose connection is lost each time; then its outcome is unknown, and
that is raised."""

CLIENT_MUTATION_SECONDS = 3_600
"""How long after it was sent first a mutation is repeated. Later the gateway may have forgotten its
key: its outcome is unknown, and that is raised."""

CLIENT_PUBLISH_SECONDS = 300
"""The same for a message on a channel, whose key is stored for `PUBLISH_KEY_SECONDS`."""

CLIENT_REPEAT_SECONDS = 60.0
"""How long a mutation that is refused for now is repeated; then the refusal is raised."""

CLIENT_SUBSCRIBE_ATTEMPTS_MAX = 3
"""How often a new subscription is asked for that is refused for now; then the refusal is raised."""

CLIENT_BATCHES_MAX = 1_000
"""Batches of deltas that wait for their reader. At the bound they give way to one reset."""

CLIENT_TRANSACTIONS_MAX = 1_000
"""Transactions of a feed that wait for their reader. At the bound the connection is not read; while
something else is waited for, the feed is left instead, and gone on with later."""

CLIENT_DELIVERED_MAX = 100_000
"""Transactions beyond its position that a feed remembers. Older ones, forgotten, may come twice
after a lost connection."""

CLIENT_MESSAGES_MAX = 1_000
"""Messages of a channel that wait for their reader. At the bound the oldest are dropped."""

CLIENT_DIVERGED_MAX = 3
"""A live query that diverges so often in a row, each time from a fresh snapshot, has failed."""

CLIENT_REFRESH_SECONDS = 30.0
"""A token is renewed so long before it ends, or when half of its time is left if that is later."""

# headwater watch
WATCH_HIGHLIGHT_SECONDS = 1.5
"""How long a row that is new or changed is marked on the screen."""

WATCH_FRAMES_PER_SECOND_MAX = 20
"""How often the screen is drawn, at most; what happens meanwhile is drawn together."""

WATCH_FRAMES_MAX = 1_000
"""Frames of a hub in the same process that wait to be shown. At the bound they give way to a
reset."""

# Hub
VIEWS_MAX = 100_000
"""Live queries that one process maintains, shared ones once. Further ones are refused."""

VIEW_BYTES = 6 * 1024
"""Bytes of memory that a live query takes beside its rows and its text, as `bytes_per_user` counts
it."""

VIEW_QUERY_FACTOR = 6
"""How many times its text a query takes in memory: as it was asked, bound, compiled and routed."""

VIEW_STEP_BYTES = 1024
"""The memory of a live query is counted in steps of this many bytes, so that most changes leave the
sums as they are."""

VIEW_LINGER_SECONDS = 30.0
"""How long a live query outlives its last subscriber, so that one who comes back can resume."""

VIEWS_LINGERING_MAX = 1_000
"""Live queries without subscribers that are kept. The one that waited longest goes first."""

OPENING_CONNECTIONS = 4
"""Connections that read the first results of live queries, as long as these are quick."""

OPENING_CONNECTIONS_MAX = 16
"""The same where results wait and none of the connections has begun another for a while. With all
of them busy, others wait. Connections of the question role are counted by themselves."""

OPENING_STUCK_SECONDS = 0.25
"""After this long without another result begun, one more connection is opened for those that
wait."""

OPENINGS_PER_TABLE = 3
"""First results of one table that are read at a time. Further ones wait, and those of other tables
pass them: a table that is locked does not take all connections."""

OPENINGS_PER_USER = 2
"""First results of one user, or of one address without a user, that are read at a time. Further
ones wait, and those of others pass them."""

OPENING_SHARE = 1_000
"""First results that are read in the snapshot of one flush. The others wait for the next."""

OPENING_SECONDS = 30
"""How long reading a first result may take. Then the subscription fails, with a hint at indexes."""

OPENING_LOCK_SECONDS = 20
"""How long reading a first result may wait for a lock on its table. Then the subscription fails
(`table_locked`)."""

OPENING_LOOK_SECONDS = 5.0
"""A first result that takes longer is looked at, this often: the log and the error name who holds
the lock that it waits for."""

OPENING_ROOM_SECONDS = 30.0
"""How long a client may take to accept a part of a streamed result. Then its subscription fails."""

OPENING_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of a first result, or of a part of it, as the database sends its rows. A larger one is
refused (`result_too_large`), and what is beyond is not sent."""

OPENING_CHANGES_MAX = 50_000
"""Changes kept for a live query while its first result is read. With more it is read again."""

FLUSH_SECONDS_MAX = 60.0
"""A flush that takes longer has met a database that hangs: the hub is not ready, and connects
again."""

LOOKUP_SECONDS = 10.0
"""How long a question about tables or rights may take. Then who asked is told to try again."""

FLUSH_QUESTION_SECONDS = 0.5
"""How long a question may take that a flush asks itself, for topics; or that is asked beside it for
several live queries together, as Headwater's own role. Then a topic gets a gap, and a live query is
read again. Also how long a connection may take to import the snapshot of a flush."""

FLUSH_BUDGET_SECONDS = 0.05
"""How long a flush waits for the questions of its live queries. Then it hands out what it has: the
other live queries lag, and are sent their changes when the questions are answered."""

FLUSH_BUDGET_PAUSE_SECONDS = 1.0
"""After a flush has waited for its whole budget, no flush waits for this long: live queries that
ask are sent their changes when the questions are answered."""

FLUSH_APPLY_SECONDS = 0.05
"""How long a flush is busy with live queries that are slow to take changes, as patterns over long
texts are. Then others that are slow, or new over the same table, lag and take their changes with a
later flush."""

APPLY_QUICK_SECONDS = 0.001
"""A live query that takes longer over the changes of a flush is slow."""

LOOP_TURN_SECONDS = 0.002
"""After this long, work beside the flushes lets others have the event loop."""

JOB_LOOP_SECONDS = 0.02
"""How long the event loop may be busy with one look at what a role with claims may see. After more,
nothing is asked for them for a while: they rest, and their live queries lag."""

JOB_REST_TIMES = 4
"""How many times as long they rest."""

JOB_REST_SECONDS_MAX = 2.0
"""They rest for at most this long. Then everything that came since is asked together."""

QUESTION_CONNECTIONS = 8
"""Connections that ask for live queries beside the flushes: this many as users' roles, and this
many as Headwater's own. With all of them busy, live queries that must ask lag."""

QUESTION_CONNECTIONS_QUICK = 2
"""Of these, how many are never given to questions that took long the last time."""

QUESTION_CONNECTIONS_PER_SCOPE = 2
"""Of these, how many ask slow questions for one role and claims at a time. Its others wait."""

QUESTION_BATCH = 16
"""Roles with claims whose quick questions are asked together over one connection."""

QUESTION_QUICK_SECONDS = 0.1
"""A question that takes longer is slow: it is asked again alone, and from then on beside the
flushes until it was quick once."""

QUESTION_SECONDS_MAX = 30.0
"""How long a question beside the flushes may take. Then the live query is read again, and fails
with `slow_query` if that happens three times in a row."""

QUESTION_IDLE_SECONDS = 60.0
"""A connection for questions that was not used for this long is closed; one stays."""

QUESTION_PACES_MAX = 10_000
"""Roles with claims, by table, of which is remembered how long their last question took. The oldest
is forgotten, and counts as quick."""

LAG_CHANGES_MAX = 10_000
"""Changes that wait for a live query that lags. With more it is read again, and reset."""

LAG_BYTES_MAX = 16 * 1024 * 1024
"""The same in bytes, about."""

LAG_SHOWN_SECONDS = 1.0
"""A live query that lags for longer is counted in the metric and named in `headwater status`."""

RECONCILE_VIEWS_MAX = 100
"""Live queries and topics compared with the database in one flush. The others wait for the next."""

RECONCILE_ROWS_MAX = 2_000
"""Rows that are read for comparing in one flush. A streamed query with more is read beside it."""

RECONCILE_STREAMED_ROWS_MAX = 100_000
"""A streamed query with more members is not compared, and counted as skipped."""

RECONCILE_SECONDS = 0.1
"""After this long, a flush begins no further comparison."""

RECONCILE_QUESTION_SECONDS = 0.05
"""How long reading one live query for comparing may take within a flush. Then it is read beside,
and nothing is compared for `FLUSH_BUDGET_PAUSE_SECONDS`."""

RECONCILE_TOPIC_ROWS = 8
"""Rows of a topic that are compared: the last that were sent."""

RECONCILE_VALUE_CHARS = 100
"""Characters of a value that is logged because it differs. The rest is cut."""

FLUSH_QUESTIONS_SECONDS = 0.5
"""How long questions that travelled together may take one by one once one has failed; the others
are asked later."""

RECENT_FRAMES_MAX = 256
"""Frames of one live query that are kept for those who come back. Older ones are dropped: whoever
needs them gets a snapshot instead."""

RECENT_BYTES_MAX = 32 * 1024 * 1024
"""The same in all, in bytes as sent. The oldest are dropped first."""


FEED_CATCH_UPS_MAX = 16
"""Change feeds that catch up from the log at the same time. Further ones wait for their turn."""

FEED_FRAME_CHANGES = 500
"""Changes in one message of a feed that catches up; a transaction is not split for it."""

FEED_KEPT_CHANGES_MAX = 10_000
"""Changes kept for a feed while it catches up. With more it reads those in the log, too."""

FEED_POSITION_SECONDS = 60.0
"""A change feed is told this often, also without a change, where to resume from."""

FEED_ROOM_SECONDS = 10.0
"""How long a feed that catches up waits for its client. Then others may catch up instead, and it
goes on when the client has taken what it was sent."""

# ------------------------------------------------------------------------ reactive queries

GROUPS_MAX = 100_000
"""Different queries (by function, arguments and user) with subscribers; more are refused."""

QUERY_MEANWHILE_CHANGES_MAX = 50_000
"""Changes kept to be held against what a running query turns out to read; beyond, it is executed
again."""

QUERY_RETRY_SECONDS = (1.0, 60.0)
"""Between two attempts at a subscribed query that fails: the first, and the longest."""

QUERY_ROWS_FACTOR = 8
"""How many times its text the rows of a result take that is told row by row, as `bytes_per_user`
counts it."""

QUERY_SHARE = 4
"""Queries of a flush that one connection takes, if there are enough of them."""

QUERY_CONNECTIONS_QUICK = 8
"""Connections for queries that are quick; more are opened where none has been begun for a while."""

QUERY_SLOW_SECONDS = 0.02
"""Queries that have waited for so long are given to further connections."""

QUERY_USER_SHARE = 0.25
"""The part of `query_concurrency` that queries of one user, or of one address without a user, have
at most, but one at least. Further ones wait, and those of others pass them."""

QUERY_IDLE_SECONDS = 60.0
"""A connection for queries that was not used for so long is closed."""

ROW_STEPS_MAX = 500
"""Row deltas of one query result in one message; beyond, the rows are sent whole."""

ROW_DELTA_BYTES_MAX = 4 * 1024 * 1024
ROW_DELTA_ROWS_MAX = 10_000
"""Bytes of a result, as JSON, and its rows, that is compared with the one before row by row. A
subscription to a larger one with deltas fails (`result_too_large`)."""

REPLICA_RETRY_SECONDS = 1.0
"""How often a replica that is not used is looked at again."""

REPLICA_ANSWER_SECONDS = 2.0
"""How long a replica may take to say how far it has come."""

REPLICA_POLL_SECONDS = (0.002, 0.05)
"""How often a replica is asked whether it has come as far as a query needs: at first, and later."""

FUNCTION_NAME_CHARS_MAX = 100
"""Characters in the name of a query or mutation. A longer one is refused when it is registered."""

ARGUMENT_DEPTH_MAX = 100
"""Lists and objects within each other in an argument of a query or mutation. Deeper ones are
refused: they could not be told from others."""

ARGUMENT_VALUES_MAX = 10_000
"""Values in the arguments of a query, those in lists and objects too. More are refused: results are
found by comparing all of them. A mutation may have more."""

ARGUMENT_LARGE_INTEGERS_MAX = 100
"""Integers of more than 64 bits in the arguments of a query or mutation. More are refused: they can
be chosen to have the same hash."""

FUNCTION_THREADS = 32
"""Queries and mutations that are not async run in so many threads at once. Further ones wait, and
the wait counts towards their timeout."""

QUERY_ROWS_MAX = 200_000
"""Rows that one statement of a query or mutation may return. With more it fails, and the rest is
not read."""

QUERY_RESULT_BYTES_MAX = 32 * 1024 * 1024
"""Bytes in a result as JSON. A larger one is an error."""

FETCH_BYTES_MAX = 256 * 1024 * 1024
"""Bytes that one statement of a query or mutation may return, by a sample of its rows. With more it
fails, and the rest is not read."""

FETCH_CHUNK_ROWS = 200
"""Rows that are taken from the database at a time."""

PREPARE_AFTER = 3
"""A statement is prepared when it comes for the so-manieth time on a connection."""

PREPARED_STATEMENTS_MAX = 200
"""Statements that are kept prepared on a connection. The one used longest ago goes first."""

STATEMENT_TEXTS_KEPT = 1_000
"""Texts of statements whose placeholders are remembered. The one used longest ago goes first."""

EVENT_HANDLERS_AT_ONCE = 100
"""Async event handlers at work at the same time. Events beyond are dropped, and the log says so."""

EVENTS_DROPPED_SECONDS = 10.0
"""How often the log says that events were dropped."""

COMMIT_SECONDS = 60.0
"""How long committing a mutation may take. Then its outcome is unknown, and the caller is told."""

MUTATION_USER_SHARE = 0.5
"""The part of `mutation_connections` that mutations of one user, or of one address without a user,
have at most, but one at least. Further ones wait, and those of others pass them."""

IDEMPOTENCY_KEY_CHARS_MAX = 128
"""Characters of an idempotency key. A longer one is refused."""

REQUEST_RESULT_BYTES_MAX = 1024 * 1024
"""Bytes of a mutation's result, as JSON, that are stored with its idempotency key. Of a larger one
only the key is stored: a repetition does nothing and is answered with an error that says so."""

REQUEST_BEGIN_ATTEMPTS_MAX = 10
"""How often a transaction is begun whose snapshot is older than an attempt with the same
idempotency key; above READ COMMITTED the second sees it. Then the mutation is refused for now."""

REQUEST_LOOKUP_SECONDS = 10.0
"""How long a gateway that lost the database during a commit looks for the outcome. Then it is
unknown; with an idempotency key the caller may repeat the mutation."""

REQUEST_SECONDS_MIN = 2 * CLIENT_MUTATION_SECONDS
"""How long the idempotency key of a mutation is stored at least: twice as long as a client repeats
it. A shorter `mutation_retention` is refused, and of a user's keys beyond the bound no younger one
is removed."""

REQUESTS_PER_USER_MAX = 100_000
"""Idempotency keys of one user that are stored. Beyond, the oldest are removed if no client repeats
them any more; a repetition of theirs would run again."""

REQUESTS_TRIM_EVERY = 1_000
"""After how many stored keys of one user a gateway looks whether there are too many, and how many
more than that may be stored for each gateway until then."""

REQUESTS_TRIM_BATCH = 10_000
"""Idempotency keys that are removed in one transaction."""

REQUESTS_TRIM_BATCHES_MAX = 1_000
"""Transactions in which one round of maintenance removes idempotency keys whose time is over. The
rest is left for the next round."""

REQUESTS_COUNTED_USERS_MAX = 10_000
"""Users whose stored keys a gateway counts. Beyond, it begins to count again."""

PUBLISH_KEY_SECONDS = 600.0
"""How long the idempotency key of a message on a channel is stored. A later repetition is published
again."""

CONNECTION_CLEAN_SECONDS = 5.0
"""How long it may take to undo what a function left on its connection. Then that is closed."""

# Reactive queries
ANALYSES_MAX = 10_000
"""Statements of which it is remembered what they read. The one used longest ago is asked for again
when next needed."""

READS_PER_TABLE_MAX = 16
"""Ways in which one execution may read a table. With more, every row that alters a used column
counts."""

# Topics
TOPIC_CHARS_MAX = 200
"""Characters in the name of a topic or channel. `headwater.signal` has the same bound. Longer ones
are refused."""

TOPIC_VALUE_CHARS_MAX = 100
"""Characters that stand for one `{place}` of a pattern. A name with more does not match."""

TOPIC_NUMBER_MAX = 2**63 - 1
"""The largest whole number in the name of a topic or channel, which a bigint can hold. A name with
a larger one is refused."""

TOPIC_PATTERNS_MAX = 1_000
"""Topics that an application may declare. More are refused."""

SIGNAL_IDS_MAX = 10_000
"""Ids in one signal. `headwater.signal` refuses more."""

TOPIC_ROWS_MAX = 10_000
"""Rows that a topic sends at once. With more its viewers are told a gap, and pull."""

TOPIC_ASK_KEYS_MAX = 10_000
"""Keys of one table that are put to the database in one statement of a flush."""

TOPIC_PAUSE_SECONDS = 5.0
"""For this long after rows of a table took too long to be read for topics, no flush reads it for
them: its topics get gaps."""

STREAM_TOPICS_MAX = 100
"""Topics that `GET /v1/stream` is opened with. More are refused; they can be added one by one."""

STREAM_TOPICS_AT_ONCE = 8
"""Topics of one stream that are being opened; the others wait."""

STREAM_MARK_SECONDS = 0.5
"""A stream of topics says at most this often where to resume. Who resumes is told again what came
since."""

TEXT_STREAM_CHARS_MAX = 1_000_000
"""Characters in a text stream, which is written whole each time. More are refused."""

TEXT_STREAM_END_SECONDS = 30.0
"""How long the last writing of a text stream is tried while the database is away; then that is
raised."""

CLIENT_TOPIC_ROWS_MAX = 10_000
"""Rows that a client keeps of a topic, and rows that wait for its reader. At the bound the oldest
are forgotten; a reader is told to pull instead."""

# Channels
CHANNEL_PATTERNS_MAX = 1_000
"""Channels that an application may declare. More are refused."""

CHANNEL_MESSAGE_BYTES_MAX = 64 * 1024
"""Bytes of a message on a channel, as JSON. A larger one is refused."""

CHANNEL_STATE_BYTES_MAX = 4 * 1024
"""Bytes of a member's state, as JSON. A larger one is refused."""

CHANNEL_MEMBERS_MAX = 1_000
"""Members that may be present on one channel. More are refused; to follow it is not."""

CHANNEL_HISTORY_MAX = 1_000
"""Messages that a channel may be declared to remember. More are refused."""

CHANNEL_HISTORY_BYTES_MAX = 256 * 1024
"""Bytes of messages that a gateway remembers of one channel. The oldest are forgotten first."""

CHANNEL_MESSAGE_FACTOR = 4
"""How many times its size a message takes that a channel remembers: as it came, and in the forms in
which it is sent; as `bytes_per_user` counts it."""

CHANNEL_KNOWN_SECONDS = 0.5
"""How long after its start a gateway waits to hear of others, which the first who follows a channel
could have asked what they remember of it."""

CHANNEL_RECALL_SECONDS = 2.0
"""How long the first who follows a channel at a gateway waits for what another one remembers of it.
Then the next is asked; if none answers, it begins with what is said from now on."""

BUS_PAYLOAD_BYTES_MAX = 7_900
"""Bytes in one NOTIFY between gateways; PostgreSQL takes less than 8,000. More are sent in
parts."""

BUS_NOTE_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of all parts of what one gateway says to others. A longer one is left out."""

BUS_WHOLE_BYTES = 64 * 1024
"""Bytes of members after which a gateway that tells all of its own begins another part."""

BUS_BATCH_BYTES = 256 * 1024
"""Bytes that a gateway sends to the others in one transaction, beside the message that exceeds
it."""

BUS_QUEUE_BYTES_MAX = 16 * 1024 * 1024
"""Bytes that wait to be sent to other gateways. Beyond, publishing is refused for now."""

BUS_SENDERS_MAX = 10_000
"""Gateways and programs of which it is remembered what came last. The one heard longest ago is
forgotten."""

BUS_SECONDS = 5.0
"""How long the database may take to pass a message on. Then whoever publishes is told to try
again."""

# ------------------------------------------------------------------------ the pipeline

SPARK_BATCH_CHANGES = 200_000
"""Changes in one batch of the data source `headwater`, unless `maxRows` says otherwise."""

SPARK_PART_CHANGES = 50_000
"""Changes that one task of the data source reads."""

SPARK_PARTS_MAX = 1_000
"""Tasks that one batch is read by; beyond, each reads more."""

SPARK_LOOKS_MAX = 1_000
"""Transactions of one part whose last change is looked for one by one. More are looked over in one
go, if they lie close together."""

SPARK_LOOKS_SPREAD = 10
"""Close together: so many transaction ids, at most, for each that occurs."""

SPARK_PLANNING_PATIENCE_SECONDS = 30.0
"""For how long the data source tries to reach a database that it has lost, before the stream
fails."""

SPARK_PLANNING_PAUSE_SECONDS = 0.1
"""Before it tries the first time again; twice as long each further time."""

DELTA_COMMIT_ATTEMPTS_MAX = 10
"""How often a commit to a Delta table is tried that others come before; then it is an error."""

DELTA_STATS_CHARS_MAX = 64
"""The lowest and highest text of a column are told to readers of a Delta table if both are no
longer."""

DELTA_HISTORY_COMMITS = 10_000
"""How many commits of a Delta table are looked through for how far it goes. Each commit of ours
says so; only those of others do not. Where a checkpoint is gone and none says, the stream does not
begin."""

LAKE_COMPACT_COMMITS = 500
"""After so many commits the small files of a Delta table are joined."""

LAKE_VACUUM_SECONDS = 86_400.0
"""How often a running pipeline removes files that no longer belong to the lake."""

PIPELINE_LOOK_SECONDS = 0.2
"""How often the streams of the pipeline are looked at."""

PIPELINE_REPORT_SECONDS = 2.0
"""How often a pipeline writes down its progress, where there is any."""

PIPELINE_BEHIND_SECONDS = 5.0
"""How long finding out how far a stream is behind may take. Then it is not reported."""

PIPELINE_RESTART_SECONDS = (1.0, 60.0)
"""First and longest pause before a failed stream of the pipeline is started again; doubled in
between."""

PIPELINE_STOP_SECONDS = 60.0
"""How long a pipeline that is to stop waits for a batch that is being written. Then the batch is
left, and written by the next start."""

PIPELINE_ERROR_CHARS_MAX = 2_000
"""Characters of an error that the progress of the pipeline keeps."""

SPARK_MOVE_SECONDS = 300.0
"""How often a stream without news moves its position past transactions that ended meanwhile."""

SNAPSHOT_CHUNK_ROWS = 20_000
"""Rows that are taken from a table at a time when a snapshot of it is made."""

LAKE_ROWS_SHOWN = 1_000
"""Rows that `headwater asof` shows as a table. The other formats print them all."""

LAKE_ROW_GROUP_ROWS = 100_000
"""Rows in one part of a Parquet file of the lake. Readers pass over parts that have nothing for
them."""

LAKE_SNAPSHOT_EVENTS = 100_000
"""After so many changes of a table the pipeline keeps another snapshot of it, unless
`lake_snapshots` says otherwise."""

LAKE_SNAPSHOT_SHARE = 0.5
"""But not before so many of its rows, as a share, have changed: a large table is not written again
and again."""

LAKE_SNAPSHOTS_DENSE_DAYS = 7
"""Of snapshots older than this, only the last one of each day is kept, where it was made from
events: it could be made again."""

LAKE_XIDS_LISTED_MAX = 100
"""Transactions that were open at a snapshot and are looked for one by one. Beyond, everything since
the oldest of them is read."""

LAKE_PART_ROWS = 50_000
"""Rows of the lake that are brought to the driver at a time where they are taken in order."""

REPLAY_CHUNK_ROWS = 5_000
"""Rows that a replay writes in one transaction when it rebuilds a table."""

ANSWERS_AT_ONCE = 4
"""Questions about the lake that a running pipeline answers at a time. Others wait."""

ANSWER_CONNECT_SECONDS = 2.0
"""How long a command waits for a running pipeline to take its question. Then it starts a Spark of
its own."""

SERVICE_FILE_BYTES_MAX = 10_000
"""Longest file `_service` of a lake: where its running pipeline answers. A longer one counts as
none."""

QUESTION_BYTES_MAX = 1_000_000
"""A longer question to a running pipeline is refused."""

CHILD_RESTART_SECONDS = (1.0, 60.0)
"""First and longest pause before a pipeline that ended is started again by `headwater serve
--with-pipeline`; doubled in between."""

CHILD_STOP_SECONDS = 90.0
"""How long a pipeline that was told to stop may take to end. Then it is killed: the next start
repairs what it left."""

SPARK_LOG_BYTES_MAX = 8 * 1024 * 1024
"""Size at which the file with what Spark prints is set aside; the one set aside before is
dropped."""

WARM_SECONDS = 600.0
"""How long making an archive of Spark's classes may take. Then it is given up."""

VIEW_GROUPS_AT_ONCE = 10_000
"""Groups of a view that one statement writes. All those of a batch are one transaction."""

VIEW_BUILD_ROWS = 50_000
"""Rows of a table that are read, aggregated and kept at a time when a view is built."""

VIEW_SECONDS = 0.05
"""How often the stream of a view looks for changes."""

VIEW_CHANGED_ROWS = 10_000
"""Rows of a joined table that have changed and lie beside the others. Beyond, they are joined to
them."""

VIEW_COLUMNS_REMEMBERED = 1_000
"""Aggregates of columns that are remembered between the calls of views' functions."""

ACTIVITY_ROWS_MAX = 200
"""Sessions, and as many views, that a gateway writes down for those who look: the costliest."""

ACTIVITY_DETAIL_CHARS_MAX = 2_000
"""Of what is written down of one of them. The rest is cut off."""

ACTIVITY_VIEWS_SHOWN_MAX = 50
"""Views that are named of one session."""

ACTIVITY_SILENT_PERIODS = 5
"""After so many periods without a word from it, a gateway's rows are removed by the others."""

ACTIVITY_SECONDS_MAX = 10.0
"""How long writing it down may take. Then it is given up until the next time."""

ACTIVITY_TURN_ITEMS = 1_000
"""Sessions or views that are looked through for it in one go, while everything else waits."""

ADMIN_REQUESTS_AT_ONCE = 4
"""Questions of admins that a gateway puts to the database at a time; others wait."""

ADMIN_SECONDS_MAX = 5.0
"""How long such a question may take. A search in the log says how far it came."""

ADMIN_LOG_ROWS_MAX = 500
"""Changes that one search in the log answers with."""

ADMIN_LOG_STEP_ROWS_MIN = 50
"""Changes that a search in the log looks at in one step where these are large."""

ADMIN_LOG_STEP_ROWS = 500
"""Changes that it looks at in its first step."""

ADMIN_LOG_STEP_ROWS_MAX = 20_000
"""Changes that it looks at in one step where these are small."""

ADMIN_LOG_BYTES_MAX = 4_000_000
"""Of the rows that one search in the log answers with; the answer says how to go on."""

ADMIN_RATE_ROWS_MAX = 50_000
"""The newest changes, among which those of the last minute are counted for each table."""

ADMIN_TABLES_MAX = 1_000
"""Tables that are listed."""

ADMIN_HISTORY_ROWS_MAX = 500
"""Versions of a record that are told, from the log or from the lake: the newest."""

ADMIN_IMAGE_CHARS_MAX = 50_000
"""The largest row that a search in the log shows. Of larger ones it says that they are."""

ADMIN_LAKE_REQUESTS_AT_ONCE = 1
"""Questions of admins that a gateway puts to the lake at a time; others wait."""

ADMIN_LAKE_SECONDS_MAX = 60.0
"""How long the lake may take to tell a record's history."""
