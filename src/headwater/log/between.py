"""Which rows of the log are the changes between two positions. No other module decides this.

The rule: a change is between two positions when the later position contains its transaction and the
earlier one does not. A position contains a transaction whose id is below its `xmax`, except those
in `xip`, which were running when it was taken. Ids and numbers alone do not decide: a transaction
that began early can commit late.

The conditions are texts for a `where` clause. There are three forms of the same rule, because
PostgreSQL finds the rows in three ways:

- `SINCE`, `UNTIL` and both together, `BETWEEN`: found by id, through the index on (xid, seq).
- `SINCE_RANGES`: the two halves of `SINCE`. Each is read in the order of that index.
- `BETWEEN_TESTED` and `IN_UNTIL`: for rows that were found by number. PostgreSQL cannot use an
  index for these, so it uses the index on the numbers.

The values for all of them come from `parameters`. Pure. Whether the log still has all these rows is
checked in `reach`.
"""

from __future__ import annotations

from typing import Any

from headwater.model import Position

SINCE_RANGES = ("xid >= %(since_xmax)s::xid8", "xid = any(%(since_xip)s::xid8[])")
"""Not in the earlier position: one of these holds, never both."""

SINCE = f"({' or '.join(SINCE_RANGES)})"
"""Not in the earlier position."""

IN_UNTIL = "pg_visible_in_snapshot(xid, %(until)s::pg_snapshot)"
"""In the later position, tested row by row."""

UNTIL = f"xid < %(until_xmax)s::xid8 and {IN_UNTIL}"
"""In the later position."""

BETWEEN = f"{SINCE} and {UNTIL}"
"""Between the two positions."""

BETWEEN_TESTED = f"not pg_visible_in_snapshot(xid, %(since)s::pg_snapshot) and {IN_UNTIL}"
"""Between the two positions, tested row by row."""


def parameters(since: Position, until: Position | None = None) -> dict[str, Any]:
    """The values of the conditions. Without `until`, those that only name the earlier position."""
    values: dict[str, Any] = {
        "since": since.snapshot,
        "since_xmax": str(since.xmax),
        "since_xip": list(map(str, since.xip)),
    }
    return values if until is None else values | until_parameters(until)


def until_parameters(until: Position) -> dict[str, Any]:
    """The values of `UNTIL` and `IN_UNTIL`."""
    return {"until": until.snapshot, "until_xmax": str(until.xmax)}


def since_ranges(since: Position) -> tuple[str, ...]:
    """Those of `SINCE_RANGES` that can hold a row: the first alone where nothing was running."""
    return SINCE_RANGES if since.xip else SINCE_RANGES[:1]


def literal(since: Position, until: Position) -> str:
    """`BETWEEN` with its values written out, for a driver that has no parameters.

    >>> literal(Position("a", 5, 9, (5, 7)), Position("a", 12, 12))  # doctest: +ELLIPSIS
    "(xid >= '9'::xid8 or xid = any('{5,7}'::xid8[])) and xid < '12'::xid8 and pg_visible_in_..."
    >>> literal(Position("a", 9, 9), Position("a", 12, 12)).split(" and ")[0]
    "(xid >= '9'::xid8)"
    """
    condition = f"({' or '.join(since_ranges(since))}) and {UNTIL}"
    values = parameters(since, until) | {"since_xip": f"{{{','.join(map(str, since.xip))}}}"}
    return condition % {name: f"'{value}'" for name, value in values.items()}
