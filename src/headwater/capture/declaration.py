"""Makes the definition of a source from what people write: in Python, in `headwater.toml` or on the
command line.

Everything that can be checked without the source is checked here, and an error says which source
and which table it is about. What the URL means is in `kinds`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import msgspec

from headwater.capture.kinds import ENCODED, absolute, has_references, kind_of
from headwater.capture.source import SourceDefinition, TableSpec
from headwater.database import is_reserved
from headwater.errors import ConfigError, InvalidQuery
from headwater.live.filters.filter import Filter, conditions, from_json, to_json
from headwater.live.filters.text import parse_conditions
from headwater.settings.sources import SourceEntry

_NAME = re.compile(r"[\w-]{1,50}")


class TableOptions(TypedDict, total=False):
    """What is mirrored of a table: the `columns`, or all but those to `exclude`; the rows that
    match `where`; `types` for columns whose type is not the usual one; and `target`, the name of
    the mirror where it is not the table's name."""

    columns: Sequence[str]
    exclude: Sequence[str]
    where: Any
    types: Mapping[str, str]
    target: str


TablesGiven: TypeAlias = "Iterable[str] | Mapping[str, TableOptions]"
"""Names of tables; or a mapping from names to options, `{}` for none."""


def define_source(
    url: str,
    *,
    into: str,
    name: str | None = None,
    tables: TablesGiven | None = None,
    feed_only: bool = False,
    options: Mapping[str, Any] | None = None,
) -> SourceDefinition:
    """The definition. ConfigError if it cannot be one of a source. A relative path in the URL is
    relative to the current folder, which is also where `headwater.toml` is."""
    _check_into(into)
    if name is None:
        name = into
        hint = f"Give it one beside into={into!r}: name='shop'."
    else:
        hint = "Names have letters, digits, _ and -, and at most 50 characters."
    if not _is_name(name):
        raise ConfigError(f"source {name!r:.100}: this is not a name of a source", hint=hint)
    _check_url(name, url)
    if not isinstance(feed_only, bool):
        raise ConfigError(
            f"source {name}: feed_only={feed_only!r:.100} is neither True nor False",
            hint="With feed_only=True, its changes go to the log and no mirror is made.",
        )
    return SourceDefinition(
        name=name,
        url=absolute(url),
        into=into,
        tables=_tables(name, {} if tables is None else tables),
        feed_only=feed_only,
        options=_options(name, options or {}),
    )


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def from_settings(name: str, entry: SourceEntry) -> SourceDefinition:
    """The definition of `[source.NAME]`. An error names the place in the file."""
    given = {table: msgspec.to_builtins(entry.table.get(table, {})) for table in entry.tables}
    given |= {table: msgspec.to_builtins(each) for table, each in entry.table.items()}
    try:
        return define_source(
            entry.url,
            into=entry.into,
            name=name,
            tables=given,
            feed_only=entry.feed_only,
            options=entry.options,
        )
    except ConfigError as error:
        raise ConfigError(f"headwater.toml: [source.{name}]: {error}", hint=error.hint) from error


# ------------------------------------------------------------------------ places


def _check_into(into: Any) -> None:
    if not isinstance(into, str) or not 1 <= len(into.encode()) <= 63 or "\0" in into:
        raise ConfigError(
            f"into={into!r:.100} is not the name of a schema",
            hint="Name the schema for the mirrors, such as into='shop'; it is created.",
        )
    if is_reserved(into) or into == "public":
        raise ConfigError(
            f"into={into!r}: mirrors cannot be in this schema",
            hint="Give them a schema of their own, such as into='shop'; it is created.",
        )


def _check_url(name: str, url: Any) -> None:
    if not isinstance(url, str) or not url or "\0" in url:
        raise ConfigError(
            f"source {name}: the URL is missing",
            hint="For example: mysql://headwater:${SHOP_PASSWORD}@db/shop",
        )
    if has_references(url.partition("://")[0]):
        return  # The scheme is known where the source is opened.
    try:
        kind = kind_of(url)
    except ConfigError as error:
        raise ConfigError(f"source {name}: {error}", hint=error.hint) from None
    after_host = url.partition("://")[2].partition("?")[0].partition("/")[2]
    if kind != "sqlite" and "@" in after_host:
        # Not the part itself: it may be the rest of a password.
        raise ConfigError(f"source {name}: the URL has a / before its last @", hint=ENCODED)


# ------------------------------------------------------------------------ tables


def _tables(source: str, given: Any) -> tuple[TableSpec, ...]:
    if isinstance(given, str):
        raise ConfigError(
            f"source {source}: tables={given!r:.100} is a text, not a list",
            hint=f"Give a list: tables=[{given!r:.100}]",
        )
    if not isinstance(given, Mapping):
        names = list(given)
        if others := [each for each in names if not isinstance(each, str)]:
            raise ConfigError(
                f"source {source}: {others[0]!r:.100} in its tables is not a name",
                hint='Options are given by name: tables={"orders": {"exclude": ["card"]}}.',
            )
        _check_once(source, "table", names)
        given = {name: {} for name in names}
    specs = tuple(_table(source, name, options) for name, options in given.items())
    _check_once(source, "mirror", [each.target or each.name for each in specs])
    return specs


def _check_once(source: str, what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            hint = "Name each table once." if what == "table" else "Give one of them a target."
            raise ConfigError(f"source {source}: there are two {what}s {name!r:.100}", hint=hint)


def _table(source: str, name: Any, options: Any) -> TableSpec:
    label = f"source {source}, table {name}"
    if not isinstance(name, str) or not name or "\0" in name:
        raise ConfigError(f"source {source}: {name!r:.100} is not the name of a table")
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"{label}: {options!r:.100} are no options",
            hint='Give a dictionary: {"exclude": ["card"]}, or {} for all of the table.',
        )
    if unknown := [key for key in options if key not in TableOptions.__annotations__]:
        raise ConfigError(
            f"{label}: there is no option {unknown[0]!r:.100}",
            hint=f"There are: {', '.join(TableOptions.__annotations__)}.",
        )
    columns = _columns(label, "columns", options.get("columns"))
    exclude = _columns(label, "exclude", options.get("exclude")) or ()
    if columns is not None and exclude:
        raise ConfigError(
            f"{label}: both columns and exclude are given",
            hint="Name the columns to mirror, or those to leave out.",
        )
    if columns == ():
        raise ConfigError(
            f"{label}: columns is empty", hint="Name columns, or leave it out for all of them."
        )
    where = _where(label, options.get("where"))
    _check_where(label, where, columns, exclude)
    return TableSpec(
        name=name,
        target=_target(label, options.get("target")),
        columns=columns,
        exclude=exclude,
        where=where,
        types=_types(label, options.get("types") or {}),
    )


def _columns(label: str, option: str, names: Any) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ConfigError(
            f"{label}: {option}={names!r:.100} is not a list of columns",
            hint=f'Give a list: {option}=["card"]',
        )
    found = tuple(names)
    if wrong := [each for each in found if not isinstance(each, str) or not each]:
        raise ConfigError(f"{label}: {wrong[0]!r:.100} in {option} is not the name of a column")
    return found


def _where(label: str, given: Any) -> Any:
    """The filter in its JSON form, with values as JSON has them; None for all rows."""
    if given is None:
        return None
    try:
        if isinstance(given, str):
            where: Filter = parse_conditions([given])
        elif isinstance(given, msgspec.Struct):
            where = from_json(to_json(given))  # type: ignore[arg-type]
        else:
            where = from_json(given)
        return msgspec.json.decode(msgspec.json.encode(to_json(where)))
    except InvalidQuery as error:
        raise ConfigError(f"{label}: {error}", hint=error.hint) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{label}: where={given!r:.100} is not a filter",
            hint='Write c.status == "open", or as text: "status = open".',
        ) from error


def _check_where(
    label: str, where: Any, columns: tuple[str, ...] | None, exclude: tuple[str, ...]
) -> None:
    """A row is also tested where the source cannot do it: by the columns that are mirrored."""
    used = [] if where is None else [each.column for each in conditions(from_json(where))]
    for column in used:
        if column in exclude or (columns is not None and column not in columns):
            raise ConfigError(
                f"{label}: where needs the column {column}, which is not mirrored",
                hint=f"Mirror the column {column} too, or filter by others.",
            )


def _target(label: str, target: Any) -> str | None:
    if target is None:
        return None
    if not isinstance(target, str) or not 1 <= len(target.encode()) <= 63 or "\0" in target:
        raise ConfigError(
            f"{label}: target={target!r:.100} is not the name of a table",
            hint="Give the name of the mirror without its schema, of at most 63 bytes.",
        )
    return target


def _types(label: str, types: Any) -> dict[str, str]:
    if not isinstance(types, Mapping) or not all(
        isinstance(part, str) and part for pair in types.items() for part in pair
    ):
        raise ConfigError(
            f"{label}: types={types!r:.100} are not columns and their types",
            hint='Give PostgreSQL types by column: types={"total": "numeric(12,2)"}',
        )
    return dict(types)


def _options(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return dict(msgspec.json.decode(msgspec.json.encode(dict(options))))
    except (TypeError, ValueError) as error:
        # Not with the values: an option may be a password.
        names = ", ".join(map(str, options))
        raise ConfigError(
            f"source {source}: an option of {names} has a value that JSON cannot hold",
            hint="Give texts, numbers, true or false.",
        ) from error
