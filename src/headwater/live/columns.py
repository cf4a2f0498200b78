"""The error for a column that a live query cannot use."""

from __future__ import annotations

from collections.abc import Iterable

from headwater.errors import InvalidQuery
from headwater.model import Table


def unusable_column(
    table: Table, name: str, usable: Iterable[str], *, path: str, use: str = ""
) -> InvalidQuery:
    """The error for a column that is not among the usable ones; `use` says what for.

    >>> orders = Table(1, "public", "orders", (), ("id",), virtual=("ratio",))
    >>> str(unusable_column(orders, "nope", ["id"], path="where.column", use="filterable"))
    "where.column: orders has no filterable column 'nope'"
    >>> str(unusable_column(orders, "ratio", ["id"], path="columns[0]"))
    "columns[0]: the virtual column 'ratio' of orders is not captured"
    """
    listed = f"{f'{use} columns'.strip().capitalize()} are: {', '.join(usable) or 'none'}."
    if name in table.virtual:
        return InvalidQuery(
            f"the virtual column {name!r:.100} of {table.label} is not captured",
            path=path,
            hint=f"It is computed when it is read; a stored one is captured. {listed}",
        )
    return InvalidQuery(
        f"{table.label} has no {f'{use} column'.strip()} {name!r:.100}", path=path, hint=listed
    )
