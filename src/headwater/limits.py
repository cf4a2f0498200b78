"""Every bound in one place, with its unit and what happens at it."""

from __future__ import annotations

# Log and reader
LOG_SLOTS = 32
"""Partitions of the log. Retention empties them in turn; see docs/design/001-log.md."""

LOG_PAGE_CHANGES = 50_000
"""Changes read from the log at a time. More new changes than this are read page by page."""

TRANSACTION_PART_CHANGES = 200_000
"""A transaction with more changes is delivered in parts (`Transaction.complete`)."""

POSITION_RUNNING_MAX = 64
"""Running transactions listed in a position. With more, it is rounded down: resuming redelivers."""

NOTIFY_PAYLOAD_BYTES_MAX = 7_000
"""A longer notification leaves out the key and the columns; PostgreSQL's own limit is 8,000."""

IDENTIFIER_BYTES_MAX = 63
"""PostgreSQL's limit on names."""

# Embedded PostgreSQL
EMBEDDED_START_SECONDS = 120.0
"""How long a start waits for the server to answer, crash recovery included. Then the start fails,
retryable: the server goes on recovering, and the next start attaches to it."""

EMBEDDED_STOP_SECONDS = 30.0
"""How long a fast stop may take. Then the server is stopped at once; its next start recovers."""

EMBEDDED_COMMAND_SECONDS = 120.0
"""How long `initdb` may take. Then it is killed and the start fails."""

EMBEDDED_POLL_SECONDS = (0.01, 0.1)
"""First and longest wait between two looks at a server that is starting or stopping."""

EMBEDDED_LOG_BYTES_MAX = 8 * 1024 * 1024
"""A larger server log is set aside when the server starts; the one set aside before is dropped."""

EMBEDDED_LOG_TAIL_BYTES = 4_096
"""How much of the end of a log or of `initdb`'s output an error shows."""

EMBEDDED_SOCKET_PATH_BYTES_MAX = 103
"""Longest path of a Unix socket that every system takes (macOS; Linux takes 107). A server whose
data folder is deeper has its socket in a private folder below /tmp."""
