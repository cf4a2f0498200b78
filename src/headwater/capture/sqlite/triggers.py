"""The triggers that write images of changed rows into the queue.

SQLite has no transaction numbers, does not define the order of triggers, deletes rows for REPLACE
without firing triggers, and refuses to drop a column that a trigger names. The triggers here need
none of it:

- An AFTER trigger does not write NEW but what the table has now for the keys of OLD and NEW. So the
  last queue row about a key is true whatever other triggers did before or after (`changes.py` turns
  these statements about keys into inserts, updates and deletes).
- BEFORE INSERT and BEFORE UPDATE write the rows that have the same value in a unique index, with a
  token of that value. The AFTER trigger with the same token finds which of them are gone: those
  were replaced.
- Columns are read from `t NATURAL LEFT JOIN (SELECT NULL AS a, …)`. A column that was dropped is
  then found in the second table, and neither the ALTER nor a later write fails.

Every name is unqualified, so they work whatever name a connection attached the file under. None of
the statements can fail by itself or change the conflict handling of the writer's statement.
"""

from __future__ import annotations

from headwater.capture.sqlite.shapes import Shape, UniqueIndex
from headwater.capture.sqlite.statements import quoted

# Operations of queue rows. The letters are stored in files.
BEFORE, INSERT, REPLACE, UPDATE, DELETE = "b", "i", "r", "u", "d"
VANISHED = "v"  # replaced by another row
PRESENT = "s"  # the row that the key of OLD has now
INSERTED_GONE, UPDATED_GONE = "g", "w"  # another trigger removed the row since

_AT = "julianday('now')"


def trigger_names(prefix: str, number: int) -> list[str]:
    kinds = ("bi", "ai", "bu", "au", "bd", "ad")
    return [f"{prefix}{number}_{kind}" for kind in kinds]


class TriggerWriter:
    """The statements for one shape."""

    def __init__(self, prefix: str, queue: str, number: int, shape: Shape) -> None:
        self._shape = shape
        self._number = number
        self._queue = quoted(queue)
        self._table = quoted(shape.table)
        self._names = [quoted(name) for name in trigger_names(prefix, number)]
        self._images = ", ".join(f"c{i}" for i in range(len(shape.columns)))
        self._keys = ", ".join(f"k{i}" for i in range(len(shape.key)))
        self._values = ", ".join(self._value(name) for name in shape.columns)

    def statements(self) -> list[str]:
        bodies = (
            ("BEFORE INSERT", [self._clear("NEW"), *self._candidates("NEW")]),
            ("AFTER INSERT", self._after_insert()),
            ("BEFORE UPDATE", self._before_update()),
            ("AFTER UPDATE", self._after_update()),
            ("BEFORE DELETE", [self._image(BEFORE, self._same("OLD"), "OLD")]),
            ("AFTER DELETE", self._after_delete()),
        )
        return [
            f"CREATE TRIGGER {name} {event} ON {self._table} BEGIN {' '.join(body)} END"
            for name, (event, body) in zip(self._names, bodies, strict=True)
        ]

    # ------------------------------------------------------------ triggers

    def _after_insert(self) -> list[str]:
        token = self._token(0, "NEW")
        is_replaced = f"EXISTS (SELECT 1 FROM {self._queue} c WHERE c.token = {token} AND"
        op = f"CASE WHEN {is_replaced} {self._not_deleted()}) THEN 'r' ELSE 'i' END"
        return [
            self._vanished(f"SELECT 1 FROM {self._table} t WHERE {self._same('c')}"),
            self._image(op, self._same("NEW")),
            self._gone(INSERTED_GONE, self._keys, "NEW"),
            self._clear("NEW"),
        ]

    def _before_update(self) -> list[str]:
        return [
            self._image(BEFORE, self._same("OLD"), "OLD"),
            self._clear("NEW"),
            *self._candidates("NEW", self._same("OLD")),
        ]

    def _after_update(self) -> list[str]:
        places = self._shape.key_places()
        both = f"{self._keys}, " + ", ".join(f"c{i}" for i in places)
        other = (
            f"{self._differs('OLD', 'NEW')} AND {self._same('OLD')} AND NOT ({self._same('NEW')})"
        )
        row = f"SELECT 1 FROM {self._table} t WHERE {self._same('c')} AND NOT ({self._same('NEW')})"
        return [
            self._vanished(row),
            self._image(UPDATE, self._same("NEW"), "OLD"),
            self._gone(UPDATED_GONE, both, "OLD", "NEW"),
            self._image(PRESENT, other),
            self._clear("NEW"),
        ]

    def _after_delete(self) -> list[str]:
        return [
            f"INSERT INTO {self._queue} (at, shape, op, {self._keys})"
            f" VALUES ({_AT}, {self._number}, '{DELETE}', {self._key_of('OLD')});",
            self._image(PRESENT, self._same("OLD")),
        ]

    # ------------------------------------------------------------ statements

    def _image(self, op: str, where: str, key_of: str | None = None, token: str = "NULL") -> str:
        """Write the row of the table that matches."""
        op = f"'{op}'" if len(op) == 1 else op
        keys = (f", {self._keys}", f", {self._key_of(key_of)}") if key_of else ("", "")
        return (
            f"INSERT INTO {self._queue} (at, shape, op, token, {self._images}{keys[0]})"
            f" SELECT {_AT}, {self._number}, {op}, {token}, {self._values}{keys[1]}"
            f" FROM {self._table} AS t {self._fallback()} WHERE {where};"
        )

    def _gone(self, op: str, columns: str, *rows: str) -> str:
        values = ", ".join(self._key_of(row) for row in rows)
        return (
            f"INSERT INTO {self._queue} (at, shape, op, {columns}) SELECT {_AT}, {self._number},"
            f" '{op}', {values} WHERE NOT EXISTS"
            f" (SELECT 1 FROM {self._table} AS t WHERE {self._same('NEW')});"
        )

    def _candidates(self, row: str, itself: str | None = None) -> list[str]:
        """Write the rows that the new one replaces, if its statement says REPLACE."""
        found = []
        for i, index in enumerate(self._shape.uniques):
            where = self._conflict(index, row)
            if itself is not None:
                where = f"NOT ({itself}) AND {where}"
                if index.columns:
                    where = f"{self._changed(index)} AND {where}"
            found.append(self._image(BEFORE, where, "t", self._token(i, row)))
        return found

    def _vanished(self, still_there: str) -> str:
        return (
            f"INSERT INTO {self._queue} (at, shape, op, {self._keys}) SELECT {_AT}, {self._number},"
            f" '{VANISHED}', {self._prefixed('c')} FROM {self._queue} c WHERE c.token IN"
            f" ({self._tokens('NEW')}) AND {self._not_deleted()} AND NOT EXISTS ({still_there})"
            f" GROUP BY {self._prefixed('c')};"
        )

    def _clear(self, row: str) -> str:
        """Tokens of a statement that replaced nothing must not be found again."""
        return f"UPDATE {self._queue} SET token = NULL WHERE token IN ({self._tokens(row)});"

    # ------------------------------------------------------------ expressions

    def _value(self, name: str) -> str:
        """A column of the table; its key cannot be dropped, and needs no second table."""
        return f"t.{quoted(name)}" if name in self._shape.key else quoted(name)

    def _fallback(self) -> str:
        names = [name for name in self._shape.columns if name not in self._shape.key]
        if not names:
            return ""
        return f"NATURAL LEFT JOIN (SELECT {', '.join(f'NULL AS {quoted(n)}' for n in names)})"

    def _key_of(self, row: str) -> str:
        return ", ".join(f"{row}.{quoted(name)}" for name in self._shape.key)

    def _prefixed(self, row: str) -> str:
        return ", ".join(f"{row}.k{i}" for i in range(len(self._shape.key)))

    def _same(self, row: str) -> str:
        """Whether `t` is the row with the key of OLD, NEW, or a queue row `c`."""
        terms = []
        for i, (name, coll) in enumerate(self._key_columns()):
            other = f"c.k{i}" if row == "c" else f"{row}.{quoted(name)}"
            terms.append(f"t.{quoted(name)} = {other}{coll}")
        return " AND ".join(terms)

    def _differs(self, one: str, other: str) -> str:
        terms = [
            f"{one}.{quoted(name)} IS NOT {other}.{quoted(name)}{coll}"
            for name, coll in self._key_columns()
        ]
        return f"({' OR '.join(terms)})"

    def _changed(self, index: UniqueIndex) -> str:
        terms = [
            f"OLD.{quoted(name)} IS NOT NEW.{quoted(name)} COLLATE {coll}"
            for name, coll in zip(index.expressions, index.collations, strict=True)
        ]
        return f"({' OR '.join(terms)})"

    def _key_columns(self) -> list[tuple[str, str]]:
        primary = self._shape.uniques[0]
        collations = dict(zip(primary.expressions, primary.collations, strict=True))
        found = []
        for name in self._shape.key:
            coll = collations.get(name, "BINARY")
            found.append((name, f" COLLATE {coll}"))
        return found

    def _conflict(self, index: UniqueIndex, row: str) -> str:
        if index.columns:
            return " AND ".join(
                f"t.{quoted(name)} = {row}.{quoted(name)} COLLATE {coll}"
                for name, coll in zip(index.expressions, index.collations, strict=True)
            )
        key = ", ".join(quoted(name) for name in self._shape.key)
        terms = [
            f"({expression}) = (SELECT {expression} FROM {self._row_as_table(row)}) COLLATE {coll}"
            for expression, coll in zip(index.expressions, index.collations, strict=True)
        ]
        if index.predicate is not None:
            terms.append(f"({index.predicate})")
        where = " AND ".join(terms)
        return f"({self._key_of('t')}) IN (SELECT {key} FROM {self._table} WHERE {where})"

    def _row_as_table(self, row: str) -> str:
        """So that an expression over the table's columns can be computed for NEW."""
        columns = ", ".join(f"{row}.{quoted(n)} AS {quoted(n)}" for n in self._shape.every)
        return f"(SELECT {columns})"

    def _token(self, i: int, row: str) -> str:
        index = self._shape.uniques[i]
        if index.columns:
            values = [f"quote({row}.{quoted(name)})" for name in index.expressions]
            return f"'{self._number}:{i}:' || {' || '.join(values)}"
        values = [f"quote({expression})" for expression in index.expressions]
        text = f"'{self._number}:{i}:' || {' || '.join(values)}"
        return f"(SELECT {text} FROM {self._row_as_table(row)})"

    def _tokens(self, row: str) -> str:
        return ", ".join(self._token(i, row) for i in range(len(self._shape.uniques)))

    def _not_deleted(self) -> str:
        """With recursive triggers, the AFTER DELETE trigger has written that `c` was replaced."""
        same = " AND ".join(f"d.k{i} IS c.k{i}" for i in range(len(self._shape.key)))
        return (
            f"NOT EXISTS (SELECT 1 FROM {self._queue} d WHERE d.id > c.id AND d.op = '{DELETE}'"
            f" AND d.shape = {self._number} AND {same})"
        )
