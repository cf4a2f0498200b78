"""The table that a replay writes to: never one of Headwater's or PostgreSQL's own schemas."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from headwater.errors import ConfigError
from headwater.model import Column, Table
from headwater.pipeline.replay.targets import Database, ReplayRun, ReplayTarget, opened

ORDERS = Table(1, "public", "orders", (Column("id", "integer", "integer"),), ("id",), 1)
RUN = ReplayRun("orders", "rebuild", None, None, None, "x")


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    with opened(url) as found:
        yield found


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("headwater.x", "the schema headwater is Headwater's own"),
        ('"headwater"."log"', "the schema headwater is Headwater's own"),
        ("HEADWATER.replays", "the schema headwater is Headwater's own"),
        (" headwater . x ", "the schema headwater is Headwater's own"),
        ("pg_catalog.x", "the schema pg_catalog is PostgreSQL's own"),
        ("pg_temp.x", "the schema pg_temp is PostgreSQL's own"),
        ("information_schema.x", "the schema information_schema is PostgreSQL's own"),
        ("postgres.headwater.x", "names another database"),
        ("x; drop table y", "is not the name of a table"),
    ],
)
def test_a_reserved_schema_is_refused(database: Database, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        ReplayTarget(database, name)
    assert "--into" in str(caught.value.hint)


def test_a_bare_name_is_never_a_table_of_headwater(url: str) -> None:
    """Also for a role that is called as the schema: it comes first in such a role's path."""
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("drop role if exists headwater")
        owner.execute("create role headwater login superuser")
        try:
            with opened(url.replace("postgres@", "headwater@")) as database:
                target = ReplayTarget(database, "replays")  # a table of ours has that name
                assert target.take(RUN) is None
                target.create(ORDERS, RUN)
                with target.step(RUN) as note:
                    note(RUN)
                assert ReplayTarget(database, "replays").take(RUN) == RUN
                assert ReplayTarget(database, "public.replays").take(RUN) == RUN
            owner.execute("alter role headwater set search_path = headwater, pg_catalog")
            with (
                opened(url.replace("postgres@", "headwater@")) as database,
                pytest.raises(ConfigError, match="has no schema for it"),
            ):
                ReplayTarget(database, "replays")
            (found,) = owner.execute("select to_regclass('public.replays') is not null").fetchall()
            assert found == (True,)
        finally:
            owner.execute("drop owned by headwater")
            owner.execute("drop role headwater")


def test_a_bare_name_is_found_where_the_path_has_it(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute("create schema sales")
        name = owner.info.dbname
        owner.execute(f"alter database {name} set search_path = nowhere, public, sales".encode())
    with opened(url) as database:
        _find(database)


def _find(database: Database) -> None:
    ReplayTarget(database, "sales.orders_again").create(ORDERS, RUN)
    assert ReplayTarget(database, "orders_again").take(RUN) == RUN
    assert ReplayTarget(database, "orders_elsewhere").take(RUN) is None
