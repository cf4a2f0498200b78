"""The statements that write rows to one table: a mirror, or the staging table of its copy.

Each statement takes one row as parameters, or many rows as one array for each column. Exact
statements raise inside the server when a row that they change is not there, so they may be sent
without waiting for their answers. Tolerant ones change what is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import msgspec

from headwater.capture.mirror.arrays import array_text

Parameters = list[str | int | None]


class MirrorColumn(msgspec.Struct, frozen=True):
    """A column of the mirror. `type` is the qualified name of its type without its length; `direct`
    says whether an array of it can be written (not of arrays, and not of types without one)."""

    name: str
    type: str
    direct: bool = True


class Statement(msgspec.Struct, frozen=True):
    """`locks` is a table that it locks against readers: its oid and its name."""

    text: str
    parameters: Parameters
    locks: tuple[int, str] | None = None


def quoted(name: str) -> str:
    """
    >>> quoted('a"b')
    '"a""b"'
    """
    return '"' + name.replace('"', '""') + '"'


class TableStatements:
    """The statements for one table, each text built once. Rows are in the order of `columns`."""

    def __init__(
        self, table: str, relid: int, columns: Sequence[MirrorColumn], key: Sequence[str]
    ) -> None:
        self.table = table
        self._relid = relid
        self.columns = tuple(columns)
        names = [column.name for column in columns]
        self.key = tuple(names.index(name) for name in key)
        self._all = tuple(range(len(columns)))
        self.others = tuple(i for i in self._all if i not in self.key)
        self._insert = cache(self._insert_text)
        self._update = cache(self._update_text)
        self._delete = cache(self._delete_text)

    # ------------------------------------------------------------ statements

    def insert(self, rows: Sequence[Sequence[str | None]], *, upsert: bool = False) -> Statement:
        many = len(rows) > 1
        return Statement(self._insert(many, upsert), self._values(rows, self._all, many))

    def update(
        self, rows: Sequence[Sequence[str | None]], columns: tuple[int, ...], *, exact: bool
    ) -> Statement | None:
        """Set these columns of the rows with these keys. None if there is nothing to set."""
        if not columns:
            return None
        many = len(rows) > 1
        values = self._values(rows, self.key + columns, many)
        if exact:
            values.append(len(rows))
        return Statement(self._update(many, columns, exact), values)

    def delete(self, keys: Sequence[Sequence[str | None]], *, exact: bool) -> Statement:
        """The rows with these keys."""
        many = len(keys) > 1
        values: Parameters = (
            [array_text(values) for values in zip(*keys, strict=True)] if many else list(keys[0])
        )
        if exact:
            values.append(len(keys))
        return Statement(self._delete(many, exact), values)

    def rekey(
        self, key: Sequence[str | None], row: Sequence[str | None], columns: tuple[int, ...]
    ) -> Statement:
        """Give the row with this key the values of these columns, a new key among them."""
        names = [quoted(self.columns[i].name) for i in columns]
        sets = ", ".join(f"{name} = ${n}" for n, name in enumerate(names, len(key) + 1))
        where = " and ".join(f"t.{self._name(i)} = ${n}" for n, i in enumerate(self.key, 1))
        text = self._checked(
            f"update {self.table} t set {sets} where {where}", len(key) + len(columns) + 1, "update"
        )
        return Statement(text, [*key, *[row[i] for i in columns], 1])

    def find(self, key: Sequence[str | None]) -> Statement:
        """All values of the row with this key, as text."""
        where = " and ".join(f"t.{self._name(i)} = ${n}" for n, i in enumerate(self.key, 1))
        names = ", ".join(f"t.{self._name(i)}::pg_catalog.text" for i in self._all)
        return Statement(f"select {names} from {self.table} t where {where}", list(key))

    def truncate(self) -> Statement:
        return Statement(f"truncate {self.table}", [], (self._relid, self.table))

    # ------------------------------------------------------------ texts

    def _insert_text(self, many: bool, upsert: bool) -> str:
        names = ", ".join(self._name(i) for i in self._all)
        if many:
            source = f"select {self._casts(self._all)} from {self._arrays(self._all)}"
        else:
            source = f"values ({', '.join(f'${n}' for n in range(1, len(self._all) + 1))})"
        return f"insert into {self.table} ({names}) {source}{self._conflict() if upsert else ''}"

    def _conflict(self) -> str:
        key = ", ".join(self._name(i) for i in self.key)
        if not self.others:
            return f" on conflict ({key}) do nothing"
        sets = ", ".join(f"{self._name(i)} = excluded.{self._name(i)}" for i in self.others)
        return f" on conflict ({key}) do update set {sets}"

    def _update_text(self, many: bool, columns: tuple[int, ...], exact: bool) -> str:
        if many:
            sets = ", ".join(f"{self._name(i)} = {self._cast(i)}" for i in columns)
            text = (
                f"update {self.table} t set {sets} from {self._arrays(self.key + columns)}"
                f" where {self._same_key()}"
            )
            count = len(self.key) + len(columns)
        else:
            first = len(self.key) + 1
            sets = ", ".join(f"{self._name(i)} = ${n}" for n, i in enumerate(columns, first))
            where = " and ".join(f"t.{self._name(i)} = ${n}" for n, i in enumerate(self.key, 1))
            text = f"update {self.table} t set {sets} where {where}"
            count = len(self.key) + len(columns)
        return self._checked(text, count + 1, "update") if exact else text

    def _delete_text(self, many: bool, exact: bool) -> str:
        if many:
            text = f"delete from {self.table} t using {self._arrays(self.key)}"
            text += f" where {self._same_key()}"
        else:
            where = " and ".join(f"t.{self._name(i)} = ${n}" for n, i in enumerate(self.key, 1))
            text = f"delete from {self.table} t where {where}"
        return self._checked(text, len(self.key) + 1, "delete") if exact else text

    def _checked(self, text: str, number: int, operation: str) -> str:
        return (
            f"with changed as ({text} returning 1) select headwater.expect_rows(count(*),"
            f" ${number}::bigint, {self._relid}::oid, '{operation}') from changed"
        )

    def _name(self, i: int) -> str:
        return quoted(self.columns[i].name)

    def _same_key(self) -> str:
        return " and ".join(f"t.{self._name(i)} = {self._cast(i)}" for i in self.key)

    def _cast(self, i: int) -> str:
        column = self.columns[i]
        value = f"v.c{i}"
        return value if column.direct else f"{value}::{column.type}"

    def _casts(self, places: tuple[int, ...]) -> str:
        return ", ".join(self._cast(i) for i in places)

    def _arrays(self, places: tuple[int, ...]) -> str:
        """The parameters as rows of a table `v`."""
        types = [
            self.columns[i].type if self.columns[i].direct else "pg_catalog.text" for i in places
        ]
        arrays = ", ".join(f"${n}::{name}[]" for n, name in enumerate(types, 1))
        return f"unnest({arrays}) v ({', '.join(f'c{i}' for i in places)})"

    def _values(
        self, rows: Sequence[Sequence[str | None]], places: tuple[int, ...], many: bool
    ) -> Parameters:
        if not many:
            return [rows[0][i] for i in places]
        columns = list(zip(*rows, strict=True))
        return [array_text(columns[i]) for i in places]
