"""The mirror of a collection: its columns, and how a document becomes a row.

Every mirror has `_id` (its key, as text) and `doc` (the document, as `jsonb`). A definition
declares more by path: `types={"total.amount": "numeric"}` adds the column `total_amount`. `columns`
and `exclude` of a definition are paths of fields, too: a field left out is neither in `doc` nor a
column. A value that does not fit its declared type is NULL in that column; it is still in `doc`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from headwater.capture.mongodb.texts.keys import key_text
from headwater.capture.mongodb.texts.scalars import TYPES, Misfit
from headwater.capture.mongodb.texts.values import Conversion, conversion, json_text
from headwater.capture.source import (
    UNCHANGED,
    Cell,
    SourceColumn,
    SourceKey,
    SourceRow,
    SourceTable,
    TableSpec,
)
from headwater.errors import SourceRefused

_log = logging.getLogger(__name__)

_NAME_BYTES_MAX = 63
"""Of a name in PostgreSQL, which cuts longer ones."""


class Field(NamedTuple):
    """A declared column: the steps of its path, and how its values become texts."""

    column: str
    type: str
    path: tuple[str, ...]
    convert: Conversion


class Layout:
    """How documents of one collection become rows. Counts the values that did not fit."""

    def __init__(self, spec: TableSpec) -> None:
        _check_paths(spec)
        self.spec = spec
        self.name = spec.name
        self.fields = tuple(_field(spec, path) for path in spec.types if _mirrored(spec, path))
        self.table = SourceTable(
            spec.name, _target(spec), (*_FIXED, *map(_declared, self.fields)), ("_id",)
        )
        self.misfits: Counter[str] = Counter()
        _check_columns(self.table)

    def row(self, document: Mapping[str, Any]) -> SourceRow:
        cells = [self._cell(field, document) for field in self.fields]
        return (key_text(document["_id"]), json_text(document), *cells)

    def key_row(self, identifier: Any) -> SourceRow:
        """A row of which only the key is known."""
        return (key_text(identifier), UNCHANGED, *(UNCHANGED for _ in self.fields))

    def key(self, row: SourceRow) -> SourceKey:
        assert isinstance(row[0], str)
        return (row[0],)

    def projection(self) -> dict[str, int] | None:
        """For `find`: a field that is left out does not travel."""
        if self.spec.columns is not None:
            return {"_id": 1} | dict.fromkeys(outermost(self.spec.columns), 1)
        return dict.fromkeys(outermost(self.spec.exclude), 0) or None

    def left_out(self) -> list[str]:
        """Declared paths that `columns` or `exclude` leaves out."""
        return [path for path in self.spec.types if not _mirrored(self.spec, path)]

    def _cell(self, field: Field, document: Mapping[str, Any]) -> Cell:
        value = at_path(document, field.path)
        if value is None:
            return None
        try:
            return field.convert(value)
        except Misfit as error:
            self._misfit(field, str(error))
            return None

    def _misfit(self, field: Field, reason: str) -> None:
        path = ".".join(field.path)
        self.misfits[path] += 1
        if self.misfits[path] == 1:
            _log.warning(
                "a value of %s in collection %s does not fit %s (%s): the column %s is NULL there."
                " Further ones are counted, not logged.",
                path, self.name, field.type, reason, field.column,
            )  # fmt: skip


_FIXED = (SourceColumn("_id", "text", False), SourceColumn("doc", "jsonb", False))


def _declared(field: Field) -> SourceColumn:
    return SourceColumn(field.column, field.type)


def at_path(document: Any, path: Sequence[str]) -> Any:
    """The value at a path. A number is a field's name or a place in an array.

    >>> at_path({"items": [{"sku": "a"}]}, ("items", "0", "sku"))
    'a'
    """
    for step in path:
        if isinstance(document, Mapping):
            document = document.get(step)
        elif isinstance(document, list) and step.isdecimal() and int(step) < len(document):
            document = document[int(step)]
        else:
            return None
    return document


def outermost(paths: Iterable[str]) -> list[str]:
    """Without those inside another, which MongoDB's projections refuse.

    >>> outermost(["a.b", "a", "c"])
    ['a', 'c']
    """
    paths = list(dict.fromkeys(paths))
    return [path for path in paths if not any(_inside(path, other) for other in paths)]


def _inside(path: str, other: str) -> bool:
    return path.startswith(f"{other}.")


def _mirrored(spec: TableSpec, path: str) -> bool:
    if spec.columns is not None:
        return any(path == other or _inside(path, other) for other in spec.columns)
    return not any(path == other or _inside(path, other) for other in spec.exclude)


def _field(spec: TableSpec, path: str) -> Field:
    type_ = spec.types[path]
    convert = conversion(type_)
    if convert is None:
        raise SourceRefused(
            f"collection {spec.name}: {path} cannot have the type {type_!r:.100}",
            hint=f"Types are: {TYPES}.",
        )
    return Field(
        path.replace(".", "_"), " ".join(type_.lower().split()), tuple(path.split(".")), convert
    )


def _target(spec: TableSpec) -> str:
    target = spec.target or spec.name.replace(".", "_")
    if len(target.encode()) > _NAME_BYTES_MAX:
        raise SourceRefused(
            f"collection {spec.name}: its name is too long for a table of PostgreSQL",
            hint=f'Give the mirror a name of at most {_NAME_BYTES_MAX} bytes with "target".',
        )
    return target


def _check_paths(spec: TableSpec) -> None:
    if spec.columns is not None and spec.exclude:
        raise SourceRefused(
            f"collection {spec.name}: both columns and exclude are given",
            hint="Say which fields to mirror, or which to leave out.",
        )
    for path in (*(spec.columns or ()), *spec.exclude, *spec.types):
        if not all(path.split(".")) or "$" in path or "\0" in path:
            raise SourceRefused(
                f"collection {spec.name}: {path!r:.100} is not the path of a field",
                hint="A path is names separated by dots, without $: total.amount",
            )
    if any(path == "_id" or _inside(path, "_id") for path in spec.exclude):
        raise SourceRefused(
            f"collection {spec.name}: _id cannot be left out: it is the key of the mirror",
            hint="Remove it from exclude.",
        )


def _check_columns(table: SourceTable) -> None:
    counts = Counter(column.name for column in table.columns)
    for name, count in counts.items():
        if count > 1:
            raise SourceRefused(
                f"collection {table.name}: two columns of its mirror would be named {name}",
                hint="A path becomes a column's name with underscores for dots; declare only one.",
            )
        if len(name.encode()) > _NAME_BYTES_MAX:
            raise SourceRefused(
                f"collection {table.name}: the path of column {name} is too long",
                hint=f"PostgreSQL's names have at most {_NAME_BYTES_MAX} bytes; read it from doc.",
            )
