"""One table with a column of every type that PostgreSQL has, with typical, NULL and extreme values:
its current state and its history, read by other programs, are those of PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from headwater import limits
from headwater.pipeline.lake import shapes
from headwater.pipeline.lake.schemas import arrow_type
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.tables.columns import stored_columns
from headwater.pipeline.tables.options import TableOptions
from headwater.pipeline.tables.typed_table import TypedTable
from tests.support.databases import fresh_database
from tests.support.generators import typed as generator
from tests.support.generators.typed import quoted
from tests.support.lake import typed
from tests.support.lake.truth import Database, fill, lake_at, opened

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(600)

ENGINES: tuple[Literal["duckdb", "polars"], ...] = ("duckdb", "polars")

INTERNAL = (
    "gtsvector", "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary", "pg_dependencies",
    "pg_mcv_list", "pg_ndistinct", "pg_node_tree",
)  # fmt: skip
"""Types whose values nobody can write."""

BEYOND = " beyond"
"""At the end of the name of a second column of a type, which in the end holds a value that the
lake's type does not."""


class EveryType:
    """The table and its statements."""

    def __init__(self, database: Database) -> None:
        self.database = database
        types = dict(generator.TYPES)
        if self._has_xml():
            types["xml"] = generator.XML
        self.columns: dict[str, tuple[str, list[str]]] = {}
        for kind, (fitting, hostile) in types.items():
            self.columns[kind] = kind, fitting
            if hostile:
                self.columns[kind + BEYOND] = kind, fitting
            # Arrays of these two are text, as all of several dimensions.
            is_array = kind.endswith(("[]", "vector")) and kind != "tsvector"
            if not is_array and f"{kind}[]" not in types:
                self.columns[f"{kind}[]"] = f"{kind}[]", self._arrays(kind, fitting)
        self.hostile = {k: hostile for k, (_, hostile) in types.items() if hostile}
        self.rows = max(len(literals) for _, literals in self.columns.values())

    def _has_xml(self) -> bool:
        try:
            self.database.execute("select '<a/>'::xml")
        except psycopg.errors.FeatureNotSupported:
            return False
        return True

    def _arrays(self, kind: str, fitting: list[str]) -> list[str]:
        # JSON that is itself an array makes one of two dimensions.
        simple = [each for each in fitting if kind not in ("json", "jsonb") or "[" not in each]
        items = ", ".join(f"{literal}::{kind}" for literal in simple)
        return [f"array[{items}]", f"array[null::{kind}, {simple[-1]}::{kind}]", "'{}'"]

    def create(self) -> None:
        columns = "".join(f", {quoted(n)} {kind}" for n, (kind, _) in self.columns.items())
        for statement in (*generator.SCHEMA, f"create table things (id int primary key{columns})"):
            self.database.execute(statement.encode())
        self.database.execute("select headwater.enable_reactivity('things')")

    def literals(self, turn: int) -> list[str]:
        return [f"{all_[turn % len(all_)]}::{kind}" for kind, all_ in self.columns.values()]

    def insert(self, first: int) -> None:
        """A row for each of the values, and one of NULLs."""
        for turn in range(self.rows):
            values = ", ".join(self.literals(turn))
            self.database.execute(f"insert into things values ({first + turn}, {values})".encode())
        self.database.execute(f"insert into things (id) values ({first + self.rows})".encode())

    def update(self, id: int, turn: int) -> None:
        sets = ", ".join(
            f"{quoted(name)} = {literal}"
            for name, literal in zip(self.columns, self.literals(turn), strict=True)
        )
        self.database.execute(f"update things set {sets} where id = {id}".encode())

    def clear(self, id: int) -> None:
        sets = ", ".join(f"{quoted(name)} = null" for name in self.columns)
        self.database.execute(f"update things set {sets} where id = {id}".encode())

    def exceed(self) -> None:
        """Write values that the types of the lake do not hold."""
        for kind, hostile in self.hostile.items():
            for id, literal in enumerate(hostile, 1):
                name = quoted(kind + BEYOND)
                statement = f"update things set {name} = {literal}::{kind} where id = {id}"
                self.database.execute(statement.encode())

    def check_complete(self) -> None:
        """No type of the server is missing."""
        known = {
            name
            for kind, _ in self.columns.values()
            for (name,) in self.database.execute("select format_type(%s::regtype, null)", [kind])
        }
        every = self.database.execute(
            "select format_type(oid, null) from pg_type where typtype in ('b', 'r', 'm')"
            " and typnamespace = 'pg_catalog'::regnamespace"
            " and (typcategory <> 'A' or typname in ('int2vector', 'oidvector'))"
        )
        missing = {name for (name,) in every} - known - set(INTERNAL)
        assert missing - {"xml"} == set()
        assert ("xml" in missing) == (not self._has_xml())


def check(lake: Lake, known: list[typed.Truth]) -> None:
    """What is in the files, now and at each position that is known."""
    root = f"{lake.root}/tables/public/things"
    for engine in ENGINES:
        typed.expect(typed.read(f"{root}/current", engine), known[-1].rows, engine)
        history = typed.read(f"{root}/history", engine)
        for number, each in enumerate(known):
            rows = typed.state_at(history, each.position)
            assert rows is not None
            typed.expect(rows, each.rows, f"{engine}, step {number}")


def check_types(lake: Lake) -> None:
    """Only those columns are text whose values need it."""
    declared = {c.name: c for c in shapes.load(lake.shapes_path, "things")[-1].table.columns}
    for which in ("current", "history"):
        table = DeltaTable(f"{lake.root}/tables/public/things/{which}")
        stored = stored_columns(pa.schema(table.schema().to_arrow()))
        assert stored.keys() == declared.keys()
        assert {name: field.type for name, field in stored.items()} == {
            name: pa.string() if name.endswith(BEYOND) else arrow_type(column)
            for name, column in declared.items()
        }


def check_texts(lake: Lake, last: typed.Truth) -> None:
    """Values that became text have all their digits."""
    for row in typed.read(f"{lake.root}/tables/public/things/current", "polars"):
        for kind in ("numeric(12,2)", "numeric(38,0)", "numeric(5,2)[]"):
            assert row[kind + BEYOND] == last.rows[str(row["id"])][kind + BEYOND]


@pytest.fixture(params=["embedded", "system"])
def server_database(request: pytest.FixtureRequest) -> Iterator[str]:
    """A database of the embedded server, and of the machine's, which has `xml`."""
    name = {"embedded": "server_url", "system": "system_postgres"}[request.param]
    with fresh_database(request.getfixturevalue(name), installed=True) as url:
        yield url


def test_every_type(
    server_database: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lake_at(tmp_path, spark)
    known: list[typed.Truth] = []

    def merge(relation: int) -> None:
        fill(lake, server_database)
        known.append(typed.truth(database, "things"))
        reached = lake.reached()
        assert reached is not None
        TypedTable(lake, relation, TableOptions()).advance(reached)
        check(lake, known)

    with opened(server_database) as database:
        things = EveryType(database)
        things.create()
        things.check_complete()
        things.insert(1)
        merge(lake.snapshot(server_database, "things").relation)  # by Spark, from a snapshot
        relation = shapes.load(lake.shapes_path, "things")[-1].table.oid
        things.insert(100)
        for id in range(1, things.rows + 2):
            things.update(id, id)
        things.clear(100)
        database.execute("delete from things where id = 101")
        merge(relation)  # by the driver, because there are few changes
        things.exceed()
        monkeypatch.setattr(limits, "TABLES_MERGE_CHANGES_MAX", 0)
        merge(relation)  # by Spark, and some columns become text
    check_types(lake)
    check_texts(lake, known[-1])
