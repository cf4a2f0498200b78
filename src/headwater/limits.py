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

SERVER_VERSION_MIN = 140_000
"""The oldest PostgreSQL: 14, for `create function … return` and multirange types."""

CONNECT_TIMEOUT_SECONDS = 10
"""How long opening a connection may take before it counts as unreachable."""
