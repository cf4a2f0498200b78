"""The triggers that write images of changed rows into the queue.

SQLite has no transaction numbers, does not define the order of triggers, deletes rows for REPLACE
without firing triggers, and refuses to drop a column that a trigger names. The triggers here need
none of it:

- An AFTER trigger does not write NEW but what the table has now for the keys of OLD and NEW. So the
  last queue row about a key is true whatever other triggers did before or after (`changes.py` turns
  these statements about keys into inserts, updates and deletes).
- BEFORE INSERT and BEFORE UPDATE write the rows that have the same value in a unique index, with a
  token of that value. The AFTER trigger with the same token finds which of them are gone: those
  were replaced. An insert names the row with the same key that it replaced.
- Columns are read from `t NATURAL LEFT JOIN (SELECT NULL AS a, …)`. A column that was dropped is
  then found in the second table, and neither the ALTER nor a later write fails.

Every name is unqualified, so they work whatever name a connection attached the file under. None of
the statements can fail by itself or change the conflict handling of the writer's statement.
"""

from __future__ import annotations

from headwater.capture.sqlite.shapes import Shape, UniqueIndex
from headwater.capture.sqlite.statements import quoted, unquoted, words

# Operations of queue rows. The letters are stored in files.
BEFORE, INSERT, UPDATE, DELETE = "b", "i", "u", "d"
VANISHED = "v"  # replaced by another row
PRESENT = "s"  # the row that the key of OLD has now
INSERTED_GONE, UPDATED_GONE = "g", "w"  # another trigger removed the row since

_AT = "julianday('now')"


def trigger_names(prefix: str, number: int) -> list[str]:
    kinds = ("bi", "ai", "ar", "bu", "au", "aw", "bd", "ad")
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
        """AFTER INSERT and AFTER UPDATE are two triggers each: the usual one does not read the
        queue, which costs more than all the rest."""
        bodies = (
            ("BEFORE INSERT", "", self._candidates()),
            ("AFTER INSERT", f"NOT ({self._has_candidates()})", self._after_insert()),
            ("AFTER INSERT", self._has_candidates(), self._after_replace()),
            ("BEFORE UPDATE", "", self._before_update()),
            ("AFTER UPDATE", f"NOT ({self._has_candidates(True)})", self._after_update()),
            ("AFTER UPDATE", self._has_candidates(True), self._after_update_or_replace()),
            ("BEFORE DELETE", "", [self._image(BEFORE, self._same("OLD"), self._key_of("OLD"))]),
            ("AFTER DELETE", "", self._after_delete()),
        )
        return [
            f"CREATE TRIGGER {name} {event} ON {self._table}{f' WHEN {when}' if when else ''}"
            f" BEGIN {' '.join(body)} END"
            for name, (event, when, body) in zip(self._names, bodies, strict=True)
        ]

    # ------------------------------------------------------------ triggers

    def _after_insert(self) -> list[str]:
        return [
            self._image(INSERT, self._same("NEW")),
            self._gone(INSERTED_GONE, self._keys, "NEW"),
        ]

    def _after_replace(self) -> list[str]:
        replaced = [
            f"(SELECT c.k{i} FROM {self._queue} c WHERE {self._is_candidate(self._newest(0))})"
            for i in range(len(self._shape.key))
        ]
        return [
            self._vanished(f"SELECT 1 FROM {self._table} t WHERE {self._same('c')}"),
            self._image(INSERT, self._same("NEW"), ", ".join(replaced)),
            self._gone(INSERTED_GONE, self._keys, "NEW"),
        ]

    def _before_update(self) -> list[str]:
        return [
            self._image(BEFORE, self._same("OLD"), self._key_of("OLD")),
            *self._candidates(self._same("OLD")),
        ]

    def _after_update(self) -> list[str]:
        places = self._shape.key_places()
        both = f"{self._keys}, " + ", ".join(f"c{i}" for i in places)
        not_new = f"({self._same('NEW')}) IS NOT 1"
        other = f"{self._differs('OLD', 'NEW')} AND {self._same('OLD')} AND {not_new}"
        return [
            self._image(UPDATE, self._same("NEW"), self._key_of("OLD")),
            self._gone(UPDATED_GONE, both, "OLD", "NEW"),
            self._image(PRESENT, other),
        ]

    def _after_update_or_replace(self) -> list[str]:
        not_new = f"({self._same('NEW')}) IS NOT 1"
        itself = " AND ".join(
            f"c.k{i} IS OLD.{quoted(name)}" for i, name in enumerate(self._shape.key)
        )
        row = f"SELECT 1 WHERE {itself} UNION ALL"
        row += f" SELECT 1 FROM {self._table} t WHERE {self._same('c')} AND {not_new}"
        return [self._vanished(row, update=True), *self._after_update()]

    def _after_delete(self) -> list[str]:
        return [
            f"INSERT INTO {self._queue} (at, shape, op, {self._keys})"
            f" VALUES ({_AT}, {self._number}, '{DELETE}', {self._key_of('OLD')});",
            self._image(PRESENT, self._same("OLD")),
        ]

    # ------------------------------------------------------------ statements

    def _image(self, op: str, where: str, key: str = "", token: str = "NULL") -> str:
        """Write the row of the table that matches."""
        columns, values = (f", {self._keys}", f", {key}") if key else ("", "")
        return (
            f"INSERT INTO {self._queue} (at, shape, op, token, {self._images}{columns})"
            f" SELECT {_AT}, {self._number}, '{op}', {token}, {self._values}{values}"
            f" FROM {self._table} AS t {self._fallback()} WHERE {where};"
        )

    def _gone(self, op: str, columns: str, *rows: str) -> str:
        values = ", ".join(self._key_of(row) for row in rows)
        return (
            f"INSERT INTO {self._queue} (at, shape, op, {columns}) SELECT {_AT}, {self._number},"
            f" '{op}', {values} WHERE NOT EXISTS"
            f" (SELECT 1 FROM {self._table} AS t WHERE {self._same('NEW')});"
        )

    def _candidates(self, itself: str | None = None) -> list[str]:
        """Write the rows that the new one replaces, if its statement says REPLACE."""
        found = []
        for i, index in enumerate(self._shape.uniques):
            where = self._conflict(index)
            if itself is not None:
                where = f"{self._changed(i)} AND ({itself}) IS NOT 1 AND {where}"
            found.append(self._image(BEFORE, where, self._key_of("t"), self._token(i)))
        return found

    def _vanished(self, still_there: str, *, update: bool = False) -> str:
        newest = ", ".join(self._newest(i, update) for i in range(len(self._shape.uniques)))
        return (
            f"INSERT INTO {self._queue} (at, shape, op, {self._keys}) SELECT {_AT}, {self._number},"
            f" '{VANISHED}', {self._prefixed('c')} FROM {self._queue} c"
            f" WHERE {self._is_candidate(newest)} AND NOT EXISTS ({still_there})"
            f" GROUP BY {self._prefixed('c')};"
        )

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

    def _changed(self, i: int) -> str:
        """Whether an update changes a value of a unique index; otherwise it replaces nothing."""
        index = self._shape.uniques[i]
        if not index.columns:
            return f"({self._token(i, 'OLD')} IS NOT {self._token(i)})"
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

    def _conflict(self, index: UniqueIndex) -> str:
        if index.columns:
            return " AND ".join(
                f"t.{quoted(name)} = NEW.{quoted(name)} COLLATE {coll}"
                for name, coll in zip(index.expressions, index.collations, strict=True)
            )
        key = ", ".join(quoted(name) for name in self._shape.key)
        new = self._as_table(index, "NEW")
        terms = [
            f"({expression}) = (SELECT {expression} FROM {new}) COLLATE {coll}"
            for expression, coll in zip(index.expressions, index.collations, strict=True)
        ]
        if index.predicate is not None:
            terms.append(f"({index.predicate})")
        where = " AND ".join(terms)
        return f"({self._key_of('t')}) IN (SELECT {key} FROM {self._table} WHERE {where})"

    def _as_table(self, index: UniqueIndex, row: str) -> str:
        """So that an expression over the table's columns can be computed for NEW. With the columns
        that it names only: no other one is needed, and each of them could be dropped."""
        text = " ".join([*index.expressions, index.predicate or ""])
        named = {unquoted(word).lower() for word in words(text)}
        columns = [n for n in self._shape.every if n.lower() in named]
        return f"(SELECT {', '.join(f'{row}.{quoted(n)} AS {quoted(n)}' for n in columns)})"

    def _token(self, i: int, row: str = "NEW") -> str:
        """The values of NEW in a unique index, as one text, and whether it is in a partial one: an
        update may only change that."""
        index = self._shape.uniques[i]
        names = [f"{row}.{quoted(name)}" for name in index.expressions]
        values = [f"quote({value})" for value in (names if index.columns else index.expressions)]
        if index.predicate is not None:
            values.append(f"quote(({index.predicate}) IS TRUE)")
        text = f"'{self._number}:{i}:' || {' || '.join(values)}"
        return text if index.columns else f"(SELECT {text} FROM {self._as_table(index, row)})"

    def _has_candidates(self, update: bool = False) -> str:
        """Whether rows were written that this statement may have replaced."""
        terms = []
        for i in range(len(self._shape.uniques)):
            term = (
                f"EXISTS (SELECT 1 FROM {self._queue} WHERE token = {self._token(i)}"
                f" AND at = {_AT})"
            )
            terms.append(f"({self._changed(i)} AND {term})" if update else term)
        return " OR ".join(terms)

    def _newest(self, i: int, update: bool = False) -> str:
        token = self._token(i)
        if update:
            token = f"CASE WHEN {self._changed(i)} THEN {token} END"
        return f"(SELECT max(id) FROM {self._queue} WHERE token = {token})"

    def _is_candidate(self, ids: str) -> str:
        """Whether `c` is a row that this statement may have replaced, and of which no trigger wrote
        yet that it is gone: the time is the same during a statement."""
        places = list(enumerate(self._shape.key_places()))
        same = " AND ".join(f"d.k{i} IS c.k{i}" for i, _ in places)
        moved = " OR ".join(f"d.c{place} IS NOT d.k{i}" for i, place in places)
        back = " AND ".join(f"e.c{place} IS c.k{i}" for i, place in places)
        return (
            f"c.id IN ({ids}) AND c.at = {_AT} AND NOT EXISTS (SELECT 1 FROM {self._queue} d"
            f" WHERE d.id > c.id AND d.shape = {self._number} AND {same} AND (d.op IN"
            f" ('{DELETE}', '{VANISHED}') OR d.op IN ('{UPDATE}', '{UPDATED_GONE}') AND ({moved}))"
            f" AND NOT EXISTS (SELECT 1 FROM {self._queue} e WHERE e.id > d.id AND e.shape ="
            f" {self._number} AND e.op = '{INSERT}' AND {back}))"
        )
