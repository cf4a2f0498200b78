"""The values of typed tables: read from images, and converted where a column got another type.

A value that the type of its column cannot hold is reported and not an error: its column becomes
text. Masked and hashed values are made here, in the task that reads the image: nothing after it has
the value itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa

from headwater.model import Column
from headwater.pipeline.lake.keys import moment_text
from headwater.pipeline.lake.schemas import split, text_of, value_reader
from headwater.pipeline.tables.columns import TypedColumn
from headwater.pipeline.tables.options import MASKED, TableOptions

_TEXT = Column("", "text", "text", "C")


class RowReader:
    """Reads images into the columns of a typed table."""

    def __init__(self, columns: Sequence[TypedColumn], options: TableOptions) -> None:
        self._columns = columns
        self._options = options
        self._readers = [self._reader(column) for column in columns]

    def read(self, images: Sequence[str | None]) -> tuple[list[pa.Array], list[list[str] | None]]:
        """An array for each column, NULL where there is no image; and for each row, the columns
        whose value their type cannot hold."""
        rows = [{} if image is None else split(image) for image in images]
        beyond: list[list[str] | None] = [None] * len(rows)
        arrays = [
            self._array(column, reader, rows, beyond)
            for column, reader in zip(self._columns, self._readers, strict=True)
        ]
        return arrays, beyond

    def _array(
        self,
        column: TypedColumn,
        read: Callable[[str], Any],
        rows: Sequence[Mapping[str, str]],
        beyond: list[list[str] | None],
    ) -> pa.Array:
        if column.column is None:
            return pa.nulls(len(rows), column.type)
        values: list[Any] = []
        for place, row in enumerate(rows):
            text = row.get(column.source)
            try:
                values.append(None if text is None or text == "null" else read(text))
            except (ValueError, msgspec.DecodeError, ArithmeticError):
                values.append(None)
                beyond[place] = [*(beyond[place] or ()), column.source]
        return pa.array(values, column.type)

    def _reader(self, column: TypedColumn) -> Callable[[str], Any]:
        if column.treatment == "mask":
            return lambda text: MASKED
        if column.treatment == "hash":
            return lambda text: self._options.hashed(text_of(text))
        kept = column.column
        if kept is None:
            return str
        is_json = kept.type in ("json", "jsonb")
        as_text = column.type == pa.string() and not is_json
        return value_reader(column.type, _TEXT if as_text else kept)


# ------------------------------------------------------------------------ other types


def converted(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Stored values in the type that their column got: a wider one, or text."""
    if values.type == kind:
        return values
    if kind != pa.string():
        return values.cast(kind)
    items = values.to_pylist()
    if pa.types.is_float32(values.type):
        items = [each if each is None else _Real(each) for each in items]
    return pa.array([None if each is None else _printed(each) for each in items], kind)


class _Real(float):
    """A number of four bytes, which is printed with fewer digits."""

    def __repr__(self) -> str:
        for digits in range(6, 10):
            text = f"{float(self):.{digits}g}"
            if struct.unpack("f", struct.pack("f", float(text))) == (float(self),):
                return text
        return float.__repr__(self)


def _printed(value: Any) -> str:
    """As PostgreSQL prints it. A numeric without scale loses the zeros at its end."""
    match value:
        case bool():
            return "true" if value else "false"
        case Decimal():
            return f"{value:f}".rstrip("0").rstrip(".") if "." in f"{value:f}" else f"{value:f}"
        case datetime():
            return moment_text(value)
        case date():
            return value.isoformat()
        case bytes():
            return f"\\x{value.hex()}"
        case list():
            return f"[{','.join(_json(each) for each in value)}]"
        case float() if value != value or value in (float("inf"), float("-inf")):
            return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return repr(value) if isinstance(value, float) else str(value)


def _json(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool() | int() | Decimal():
            return _printed(value)
        case float() if value - value == 0:
            return _printed(value)
    return msgspec.json.encode(_printed(value)).decode()
