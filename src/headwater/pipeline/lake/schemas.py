"""Reads images, the JSON of rows, into Arrow columns of the types that the table had.

| PostgreSQL | Spark |
|---|---|
| smallint, integer, bigint | short, int, long |
| numeric(p,s) up to 38 digits | decimal(p,s) |
| numeric | decimal(38,18) |
| real, double precision | float, double |
| boolean | boolean |
| timestamp with time zone, timestamp | timestamp, timestamp_ntz |
| date | date |
| bytea | binary |
| json, jsonb, composite types | string, the JSON as it was written |
| arrays of these, of one dimension | array |
| text, uuid, time, interval, enumerations, everything else | string, PostgreSQL's own text |

No value is rounded or becomes NULL. A value that the type of its column cannot hold (`infinity`,
NaN in a numeric, a year beyond 9999, more than 18 decimals in a numeric without scale) raises an
`InvalidQuery` that names the column; such a column can be read as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from typing import Any

import msgspec
import pyarrow as pa

from headwater.errors import InvalidQuery
from headwater.live.kinds import single
from headwater.log import images as images_
from headwater.model import Column, Table

NUMERIC = pa.decimal128(38, 18)
"""The type of a numeric without precision."""

_NUMERIC = re.compile(r"numeric\((\d+)(?:,(-?\d+))?\)")


# ------------------------------------------------------------------------ types


def arrow_type(column: Column) -> pa.DataType:
    """The Arrow type of a column.

    >>> arrow_type(Column("amount", "numeric", "numeric(12,2)"))
    Decimal128Type(decimal128(12, 2))
    >>> arrow_type(Column("tags", "text[]", "text[]"))
    ListType(list<element: string>)
    """
    if column.type.endswith("[]"):
        element = Column("", column.type.removesuffix("[]"), column.declared.removesuffix("[]"))
        return pa.list_(pa.field("element", arrow_type(element)))
    if column.type == "numeric":
        return _numeric_type(column.declared)
    return _TYPES.get(column.type, pa.string())


def _numeric_type(declared: str) -> pa.DataType:
    match = _NUMERIC.fullmatch(declared)
    if match is None:
        return NUMERIC
    precision, scale = int(match[1]), int(match[2] or 0)
    # A scale may be negative, or larger than the precision.
    digits = max(precision - min(scale, 0), scale)
    return pa.decimal128(digits, max(scale, 0)) if digits <= 38 else pa.string()


def scale(column: Column) -> int | None:
    """The digits after the point that PostgreSQL prints of each value of a numeric; None for a
    column without a scale.

    >>> [scale(Column("n", "numeric", kind)) for kind in ("numeric(12,2)", "numeric(9)", "numeric")]
    [2, 0, None]
    """
    match = _NUMERIC.fullmatch(column.declared)
    return None if match is None else max(int(match[2] or 0), 0)


_TYPES: dict[str, pa.DataType] = {
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "real": pa.float32(),
    "double precision": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp with time zone": pa.timestamp("us", tz="UTC"),
    "timestamp without time zone": pa.timestamp("us"),
    "date": pa.date32(),
    "bytea": pa.binary(),
}


def as_text(table: Table, names: Collection[str]) -> Table:
    """The table with these columns read as text."""
    columns = tuple(
        Column(c.name, "text", "text", "C") if c.name in names else c for c in table.columns
    )
    return msgspec.structs.replace(table, columns=columns)


def arrow_schema(table: Table) -> pa.Schema:
    """A row of the table."""
    return pa.schema([pa.field(c.name, arrow_type(c)) for c in table.columns])


# ------------------------------------------------------------------------ reading

_raw = msgspec.json.Decoder(dict[str, msgspec.Raw])


def split(image: str) -> dict[str, str]:
    """The columns of an image, each as the JSON text that PostgreSQL wrote.

    >>> split('{"id":1,"amount":2.50}')
    {'id': '1', 'amount': '2.50'}
    """
    try:
        return {name: bytes(text).decode() for name, text in _raw.decode(image).items()}
    except (msgspec.DecodeError, RecursionError):
        return images_.split(image)


class ImageReader:
    """Reads images into rows of one table.

    `names` has, for shapes other than the table's, the name of each of its columns in that shape. A
    column that a shape lacks is NULL.
    """

    def __init__(self, table: Table, names: Mapping[int, Mapping[str, str]] | None = None) -> None:
        self._table = table
        self._names = names or {}
        self._schema = arrow_schema(table)
        self._values = [
            value_reader(field.type, c)
            for field, c in zip(self._schema, table.columns, strict=True)
        ]
        self._own = [c.name for c in table.columns]

    def rows(self, images: Sequence[str | None], shapes: Sequence[int]) -> pa.StructArray:
        """One row for each image, NULL where there is none. InvalidQuery names the column."""
        texts = [
            None if image is None else self._pick(split(image), shape)
            for image, shape in zip(images, shapes, strict=True)
        ]
        arrays = [self._column(place, texts) for place in range(len(self._own))]
        missing = pa.array([text is None for text in texts], pa.bool_())
        return pa.StructArray.from_arrays(arrays, fields=list(self._schema), mask=missing)

    def values(self, images: Sequence[str | None], shapes: Sequence[int]) -> list[Any]:
        """The same as values of Python: without arrays, for which Arrow imports pandas."""
        return [
            None if image is None else self._row(self._pick(split(image), shape))
            for image, shape in zip(images, shapes, strict=True)
        ]

    def _row(self, texts: list[str | None]) -> dict[str, Any]:
        row = {}
        for place, field in enumerate(self._schema):
            (value,) = self._read(place, [texts])
            row[field.name] = _python(value, field.type)
        return row

    def _pick(self, image: Mapping[str, str], shape: int) -> list[str | None]:
        names = self._names.get(shape)
        if names is None:
            return [image.get(name) for name in self._own]
        return [image.get(names[name]) if name in names else None for name in self._own]

    def _column(self, place: int, rows: Sequence[list[str | None] | None]) -> pa.Array:
        return pa.array(self._read(place, rows), self._schema.field(place).type)

    def _read(self, place: int, rows: Sequence[list[str | None] | None]) -> list[Any]:
        read = self._values[place]
        texts = (None if row is None else row[place] for row in rows)
        values = []
        for text in texts:
            try:
                values.append(None if text is None or text == "null" else read(text))
            except (ValueError, msgspec.DecodeError, ArithmeticError):
                raise self._beyond(place, text) from None
        return values

    def _beyond(self, place: int, text: str | None) -> InvalidQuery:
        column = self._table.columns[place]
        return InvalidQuery(
            f"{self._table.label}.{column.name} is {column.declared} and holds {text:.100}, which"
            f" Spark's {self._schema.field(place).type} cannot hold",
            hint=f"Read that column as text: as_text=['{column.name}'], or"
            f" --as-text {column.name}.",
        )


def value_reader(kind: pa.DataType, column: Column) -> Callable[[str], Any]:
    """Converts the JSON of a value for Arrow. JSON's null is handled by the caller."""
    if pa.types.is_list(kind):
        return _list_reader(kind, column)
    if pa.types.is_decimal(kind):
        return lambda text: _exact(Decimal(text_of(text)), kind)
    if kind == pa.string():
        return str if column.type in ("json", "jsonb") else text_of
    return _READERS[str(kind)]


def _list_reader(kind: pa.DataType, column: Column) -> Callable[[str], Any]:
    element = Column("", column.type.removesuffix("[]"), column.declared.removesuffix("[]"))
    read = value_reader(kind.value_type, element)
    decoder = msgspec.json.Decoder(list[msgspec.Raw])

    def read_list(text: str) -> list[Any]:
        items = (bytes(item).decode().strip() for item in decoder.decode(text))
        return [None if item == "null" else read(_one_value(item)) for item in items]

    return read_list


def _python(value: Any, kind: pa.DataType) -> Any:
    """The value as Arrow returns it: a real in single precision, a decimal with its scale."""
    if value is None:
        return None
    if pa.types.is_list(kind):
        return [_python(item, kind.value_type) for item in value]
    if pa.types.is_float32(kind):
        return single(value)
    if pa.types.is_decimal(kind):
        return value.quantize(Decimal(1).scaleb(-kind.scale), context=_DIGITS)
    return value


_DIGITS = Context(prec=38)


def _one_value(item: str) -> str:
    if item.startswith("["):
        raise ValueError("an array of several dimensions")
    return item


def text_of(text: str) -> str:
    """The text of a JSON string, and any other JSON as it is."""
    return msgspec.json.decode(text, type=str) if text.startswith('"') else text


def _exact(value: Decimal, kind: pa.Decimal128Type) -> Decimal:
    """The value in the scale of its type; ValueError rather than a rounded one."""
    if not value.is_finite():
        raise ValueError(value)
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    surplus = -exponent - kind.scale
    if surplus > 0:
        if any(digits[-surplus:]):
            raise ValueError(value)
        value = Decimal((sign, digits[:-surplus] or (0,), -kind.scale))
    if value and value.adjusted() >= kind.precision - kind.scale:
        raise ValueError(value)
    return value


def _boolean(text: str) -> bool:
    return text == "true"


def _float(text: str) -> float:
    return float(text_of(text))


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text_of(text)).astimezone(UTC)


def _local_moment(text: str) -> datetime:
    return datetime.fromisoformat(text_of(text))


def _day(text: str) -> date:
    return date.fromisoformat(text_of(text))


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text_of(text)[2:])


_READERS: dict[str, Callable[[str], Any]] = {
    "int16": int,
    "int32": int,
    "int64": int,
    "float": _float,
    "double": _float,
    "bool": _boolean,
    "timestamp[us, tz=UTC]": _moment,
    "timestamp[us]": _local_moment,
    "date32[day]": _day,
    "binary": _bytes,
}
