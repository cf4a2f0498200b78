"""What is wrong with a server, a user or a table: one clear problem each, with its fix, and never a
password in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headwater.capture.mysql.connection import parse_url
from headwater.capture.mysql.source import MysqlSource
from headwater.capture.source import Problem, SourceDefinition, TableSpec
from headwater.errors import ConfigError, HeadwaterError, SourceRefused, SourceUnavailable
from tests.contract.sources.drivers.mysql import MysqlDriver
from tests.support.mariadb import ESCAPED_PASSWORD, PASSWORD, MariaDB, running_mariadb
from tests.support.mysql.reading import opened


async def _problems(definition: SourceDefinition) -> list[Problem]:
    async with opened(definition) as source:
        found = await source.check()
        for problem in found:
            assert problem.fix
            assert PASSWORD not in f"{problem}"
        return found


async def _only(definition: SourceDefinition) -> Problem:
    (problem,) = await _problems(definition)
    return problem


async def test_nothing_is_wrong(driver: MysqlDriver) -> None:
    await driver.create_table("orders")
    assert await _problems(driver.definition("orders")) == []
    assert await _problems(driver.definition()) == []


async def test_a_table_that_does_not_exist(driver: MysqlDriver) -> None:
    """Only the runner knows whether it was mirrored before: the others are described."""
    await driver.create_table("orders")
    definition = driver.definition("orders", "t")
    problem = await _only(definition)
    assert "the table t does not exist" in problem.what
    assert problem.missing == "t"
    async with opened(definition) as source:
        assert [table.name for table in await source.tables()] == ["orders"]


TABLES = [
    ("create table t (id int)", "t has no primary key", "add primary key"),
    ("create view t as select 1 as id", "t is a view", "Capture the tables"),
    (
        "create table t (id int primary key) with system versioning",
        "t is a system versioned",
        "Leave it out",
    ),
    (
        "create table t (id int primary key, c varchar(9) compressed)",
        "t.c has the type varchar(9)",
        'exclude = ["c"]',
    ),
    (
        f"create table t (id int primary key, {'ü' * 40} int)",
        "is longer than PostgreSQL's 63 bytes",
        "exclude",
    ),
]


@pytest.mark.parametrize(("statement", "what", "fix"), TABLES)
async def test_tables(driver: MysqlDriver, statement: str, what: str, fix: str) -> None:
    await driver.execute(statement)
    problem = await _only(driver.definition("t"))
    assert what in problem.what
    assert fix in problem.fix
    assert not problem.warning
    async with opened(driver.definition("t")) as source:
        with pytest.raises(SourceRefused) as refused:
            await source.tables()
    assert refused.value.hint


async def test_definition(driver: MysqlDriver) -> None:
    await driver.create_table("orders")
    for spec, what in (
        (TableSpec("orders", exclude=("nothing",)), "orders has no column nothing"),
        (TableSpec("orders", columns=("name",)), "leaves out id, a column of its key"),
        (TableSpec("orders", exclude=("id",)), "leaves out id, a column of its key"),
    ):
        assert what in (await _only(driver.definition(tables=(spec,)))).what


async def test_engine_is_a_warning(driver: MysqlDriver) -> None:
    await driver.execute("create table t (id int primary key) engine = MyISAM")
    problem = await _only(driver.definition("t"))
    assert (problem.warning, "engine MyISAM" in problem.what) == (True, True)


async def test_cascades(driver: MysqlDriver) -> None:
    await driver.execute(
        "create table parent (id int primary key)",
        "create table child (id int primary key, parent int,"
        " foreign key (parent) references parent (id) on delete cascade)",
    )
    problem = await _only(driver.definition("child", "parent"))
    assert "child has a foreign key with a cascade" in problem.what
    options = {"allow_cascades": True}
    assert await _problems(driver.definition("child", options=options)) == []


async def test_rights(driver: MysqlDriver) -> None:
    await driver.create_table("orders")
    user, select = f"u_{driver.database}", f"select on {driver.database}.*"
    url = driver.server.url(driver.database, user, ESCAPED_PASSWORD)
    definition = driver.definition("orders", url=url)
    await driver.execute(f"create user {user}@'%' identified by '{PASSWORD}'")
    for grants, what, fix in (
        ([select, "replication slave on *.*"], "where the binary log ends", "binlog monitor"),
        ([select, "binlog monitor on *.*"], "may not read the binary log", "replication slave"),
        (["replication slave, binlog monitor on *.*"], "orders does not exist", "grant select"),
        (
            [
                "replication slave, binlog monitor on *.*",
                f"select (id) on {driver.database}.orders",
            ],
            "orders has no column name",
            "",
        ),
    ):
        await driver.execute(f"revoke all privileges, grant option from {user}@'%'")
        await driver.execute(*(f"grant {grant} to {user}@'%'" for grant in grants))
        tables = (TableSpec("orders", columns=("id", "name")),)
        chosen = driver.definition(url=url, tables=tables) if not fix else definition
        problem = await _only(chosen)
        assert what in problem.what
        assert fix in problem.fix
    await driver.execute(f"drop user {user}@'%'")


async def test_wrong_password(driver: MysqlDriver) -> None:
    url = driver.server.url(driver.database, password="wr0ng")
    problem = await _only(driver.definition("orders", url=url))
    assert "refused the user headwater" in problem.what
    assert "wr0ng" not in f"{problem}"
    async with opened(driver.definition("orders", url=url)) as source:
        for call in (source.tables(), source.start(), source.health()):
            with pytest.raises(SourceRefused) as refused:
                await call
            assert "wr0ng" not in f"{refused.value!r} {refused.value.hint}"
        assert "wr0ng" not in repr(source._address)


async def test_unknown_database(driver: MysqlDriver) -> None:
    url = driver.server.url("no_such_database")
    problem = await _only(driver.definition(url=url))
    assert "no_such_database has no table" in problem.what


def test_a_port_that_is_no_number_may_be_a_password() -> None:
    with pytest.raises(ConfigError, match="is not a number") as raised:
        parse_url("mysql://u:hunt?er2@db/x")
    assert "percent-encoded" in (raised.value.hint or "")


@pytest.mark.parametrize(
    "url", ["mysql://u:pw@127.0.0.1:1/x", "mysql://u:pw@no.such.host.invalid/x"]
)
async def test_unreachable(url: str) -> None:
    async with opened(SourceDefinition("shop", url, "shop")) as source:
        with pytest.raises(SourceUnavailable) as unreachable:
            await source.check()
    assert "pw" not in str(unreachable.value)
    assert "Check that the server runs" in (unreachable.value.hint or "")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("mysql://u@h:abc/x", {}),
        ("mysql://u@h", {}),
        ("mysql://u@h/x?nonsense=1", {}),
        ("mysql://u@h/x", {"nonsense": 1}),
        ("mysql://u@h/x", {"server_id": "many"}),
        ("mysql://u@h/x", {"server_id": 0}),
    ],
)
def test_wrong_definitions(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MysqlSource(SourceDefinition("shop", url, "shop", options=options))


async def test_wrong_ssl_mode() -> None:
    async with opened(SourceDefinition("shop", "mysql://u@h/x?ssl-mode=maybe", "shop")) as source:
        with pytest.raises(HeadwaterError, match="ssl-mode=maybe"):
            await source.start()


async def test_own_server_id(driver: MysqlDriver) -> None:
    await driver.create_table("orders")
    problem = await _only(driver.definition("orders", options={"server_id": 1}))
    assert "which is the server's own" in problem.what


SETTINGS = [
    ("binlog_format", "STATEMENT", "binlog_format is STATEMENT, capture needs ROW"),
    ("binlog_format", "MIXED", "binlog_format is MIXED"),
    ("binlog_row_image", "MINIMAL", "binlog_row_image is MINIMAL, capture needs FULL"),
    ("binlog_row_metadata", "NO_LOG", "binlog_row_metadata is NO_LOG, capture needs FULL"),
    ("binlog_expire_logs_seconds", "3600", "binary logs are deleted after 3600 seconds"),
]


@pytest.fixture(scope="module")
def other_server() -> Iterator[MariaDB]:
    """One whose settings may be wrong."""
    with running_mariadb() as server:
        server.run("create database shop", "create table shop.orders (id int primary key)")
        yield server


@pytest.mark.parametrize(("name", "value", "what"), SETTINGS)
async def test_settings(other_server: MariaDB, name: str, value: str, what: str) -> None:
    ((before,),) = other_server.run(f"select @@global.{name}")
    literal = value if value.isdigit() else f"'{value}'"
    other_server.run(f"set global {name} = {literal}")
    try:
        definition = SourceDefinition("s", other_server.url("shop"), "s", (TableSpec("orders"),))
        problem = await _only(definition)
    finally:
        old = before if isinstance(before, int) else f"'{before}'"
        other_server.run(f"set global {name} = {old}")
    assert what in problem.what
    assert name in problem.fix
    assert problem.warning == (name == "binlog_expire_logs_seconds")


async def test_without_a_binary_log() -> None:
    with running_mariadb(skip_log_bin="1") as server:
        server.run("create database shop", "create table shop.orders (id int primary key)")
        definition = SourceDefinition("s", server.url("shop"), "s", (TableSpec("orders"),))
        problem = await _only(definition)
        assert "writes no binary log" in problem.what
        async with opened(definition) as source:
            with pytest.raises(SourceRefused, match="no binary log"):
                await source.start()


async def test_unlogged_database() -> None:
    with running_mariadb(binlog_ignore_db="shop") as server:
        server.run("create database shop", "create table shop.orders (id int primary key)")
        problem = await _only(SourceDefinition("s", server.url("shop"), "s"))
        assert "does not log changes of the database shop" in problem.what


async def test_too_old(driver: MysqlDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """No old server can be installed: this one is taken for one."""
    from headwater.capture.mysql import checks

    monkeypatch.setattr(checks, "_OLDEST", {"mariadb": (99, 1, 0), "mysql": (99, 0, 0)})
    problem = await _only(driver.definition())
    assert "mariadb 10." in problem.what
    assert "is too old" in problem.what
    assert problem.fix == "Use 99.1 or later."
    async with opened(driver.definition()) as source:
        with pytest.raises(SourceRefused, match="is too old"):
            await source.start()


async def test_missing_driver(driver: MysqlDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pymysql", None)
    async with opened(driver.definition()) as source:
        with pytest.raises(ConfigError) as missing:
            await source.start()
    assert missing.value.hint == 'pip install "headwater[mysql]"'
