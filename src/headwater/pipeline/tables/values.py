"""The values of typed tables: read from images, and converted where a column got another type.

A value that the type of its column cannot hold is reported and not an error: its column becomes
text. Masked and hashed values are made here, in the task that reads the image: nothing after it has
the value itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa

from headwater.model import Column
from headwater.pipeline.lake.keys import float_json, moment_text
from headwater.pipeline.lake.schemas import NUMERIC, arrow_type, split, text_of, value_reader
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


def converted(values: pa.Array, kind: pa.DataType, scale: int = 0) -> pa.Array:
    """Stored values in the type that their column got: a wider one, or text. A numeric is printed
    with `scale` digits after the point, or more where it has them."""
    if values.type == kind:
        return values
    if kind != pa.string():
        return values.cast(kind)
    digits = 6 if _element(values.type) == pa.float32() else 15
    items = values.to_pylist()
    texts = [None if each is None else _printed(each, scale, digits) for each in items]
    return pa.array(texts, kind)


def scale_of(column: TypedColumn, stored: pa.DataType) -> int:
    """How many digits after the point PostgreSQL prints of each value: those of the column, else
    those that were stored. A numeric without scale is stored with more than it had."""
    present = stored if column.column is None else arrow_type(column.column)
    kinds = [_element(each) for each in (present, stored)]
    scales = (each.scale for each in kinds if pa.types.is_decimal(each) and each != NUMERIC)
    return next(scales, 0)


def _element(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_list(kind) else kind


def _printed(value: Any, scale: int, digits: int) -> str:
    """As PostgreSQL prints it. `digits` are those of `float_json`."""
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return text_of(float_json(value, digits))
        case Decimal():
            whole, _, part = f"{value:f}".partition(".")
            part = part.rstrip("0").ljust(scale, "0")
            return f"{whole}.{part}" if part else whole
        case datetime():
            return moment_text(value)
        case date():
            return value.isoformat()
        case bytes():
            return f"\\x{value.hex()}"
        case list():
            return f"[{','.join(_json(each, scale, digits) for each in value)}]"
    return str(value)


def _json(value: Any, scale: int, digits: int) -> str:
    match value:
        case None:
            return "null"
        case float():
            return float_json(value, digits)
        case bool() | int() | Decimal():
            return _printed(value, scale, digits)
    return msgspec.json.encode(_printed(value, scale, digits)).decode()
