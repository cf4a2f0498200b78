"""Installs, upgrades and removes the schema `headwater` in the user's database.

The files in `sql/` are the versions: `001_…`, `002_…`, applied in order, once each, all in one
transaction and under a lock, so that any number of processes may start at the same time. A released
file is never edited; a later file changes what it made.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib import resources
from typing import Any

from psycopg.errors import (
    DeadlockDetected,
    Diagnostic,
    LockNotAvailable,
    ObjectInUse,
    UndefinedObject,
)

from headwater.capture.postgres import functions
from headwater.database import PINNED_PATH, Connection, translated
from headwater.errors import DatabaseError, NotInstalled
from headwater.limits import (
    MIGRATION_LOCK_TIMEOUT,
    SERVER_VERSION_MIN,
    UNINSTALL_ATTEMPTS_MAX,
)

logger = logging.getLogger(__name__)

MIGRATION_LOCK = (1752654962, 2)  # see headwater.lock_class() in 002_waking.sql


def versions() -> dict[int, str]:
    """The SQL of every version there is, by number."""
    folder = resources.files(__package__).joinpath("sql")
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".sql"))
    return {int(name.split("_")[0]): folder.joinpath(name).read_text("utf-8") for name in files}


LATEST = max(versions())


async def installed_version(connection: Connection) -> int:
    """The version in the database; 0 when Headwater is not installed."""
    if not await _exists(connection, "headwater.migrations"):
        return 0
    cursor = await connection.execute("select coalesce(max(version), 0) from headwater.migrations")
    version: int = _first(await cursor.fetchone())
    return version


async def install(connection: Connection, *, upto: int = LATEST) -> int:
    """Bring the schema to a version; returns how many files were applied, 0 for none."""
    with translated():
        version = await installed_version(connection)
        if version == LATEST:
            await _adopt_copy(connection)
        if version >= upto:
            return 0
        await _check_server(connection)
        async with _locked(connection):
            present = await installed_version(connection)
            if present == 0:
                await connection.execute(_BOOTSTRAP)
            await connection.execute(_AS_OWNER)
            missing = {
                number: text for number, text in versions().items() if present < number <= upto
            }
            for number, text in missing.items():
                await connection.execute(text.encode())
                await connection.execute(
                    "insert into headwater.migrations (version) values (%s)", (number,)
                )
            await connection.execute(functions.RIGHTS.encode())
            await connection.execute("reset role")
            # The functions of tables that are captured already are made again by the new code.
            await connection.execute(_RESYNC)
        if upto == LATEST:
            await _adopt_copy(connection)
        return len(missing)


async def require(connection: Connection) -> None:
    """Raise NotInstalled unless the schema is there in this release's version."""
    with translated():
        version = await installed_version(connection)
    if version == 0:
        raise NotInstalled(
            "Headwater is not installed in this database", hint="Run: headwater init"
        )
    if version < LATEST:
        raise NotInstalled(
            f"the schema headwater has version {version}, this release needs {LATEST}",
            hint="Run: headwater init (it upgrades in place; nothing is lost)",
        )


async def uninstall(connection: Connection) -> bool:
    """Remove the schema and every trigger. The user's tables and rows stay as they are."""
    with translated():
        if await installed_version(connection) == 0:
            return False
        await _drop_slots(connection)
        for _ in range(UNINSTALL_ATTEMPTS_MAX - 1):
            with suppress(DeadlockDetected):
                await _drop(connection)
                return True
        await _drop(connection)
    return True


async def _drop_slots(connection: Connection) -> None:
    """A slot that stays would have the server keep its WAL for ever. The process that reads it is
    ended; when it comes again, there is no slot to read."""
    if not await _exists(connection, "headwater.wal_capture"):
        return
    ending = await connection.execute(_END_WAL_CAPTURE)
    for (slot,) in await ending.fetchall():
        for _ in range(UNINSTALL_ATTEMPTS_MAX):
            try:
                await connection.execute("select pg_drop_replication_slot(%s)", (slot,))
                break
            except ObjectInUse:
                await connection.execute(_END_READER, (slot,))
            except UndefinedObject:
                break


_END_WAL_CAPTURE = """
    with publication as (select headwater.disable_table(relid) from headwater.tables
                         where enabled and capture = 'wal'),
         done as (select headwater.end_wal_capture() from (select count(*) from publication) c)
    select s.slot_name from pg_replication_slots s, headwater.installation i, done
    where s.slot_name ~ ('^headwater_' || i.id || '_[0-9a-f]+$') and s.database = current_database()
"""

_END_READER = """
    select pg_terminate_backend(active_pid, 1000) from pg_replication_slots
    where slot_name = %s and active
"""


async def _drop(connection: Connection) -> None:
    async with _locked(connection):
        # Readers take their locks one by one; having this first mostly keeps clear of a deadlock.
        if await _exists(connection, "headwater.log"):
            await connection.execute("lock table headwater.log in access exclusive mode")
        await connection.execute("drop schema if exists headwater cascade")


async def _adopt_copy(connection: Connection) -> None:
    """Begin a new log where the schema came here with a dump or a copy of its database."""
    moved = "select home <> headwater.home() from headwater.installation"
    if _first(await (await connection.execute(moved)).fetchone()):
        connection.add_notice_handler(_warn)
        try:
            async with _locked(connection):
                if _first(await (await connection.execute(moved)).fetchone()):
                    await connection.execute("select headwater.adopt()")
                    # A dump without privileges comes without those of our own functions.
                    await connection.execute(_AS_OWNER)
                    await connection.execute(_PUBLIC_GRANTS)
                    await connection.execute(functions.RIGHTS.encode())
                    await connection.execute("reset role")
        finally:
            connection.remove_notice_handler(_warn)


def _warn(notice: Diagnostic) -> None:
    """Log a table that cannot be captured in this database; everything else works."""
    message = (notice.message_primary or "").removeprefix("headwater: ")
    logger.warning("%s (%s)", message, notice.message_hint)


@asynccontextmanager
async def _locked(connection: Connection) -> AsyncIterator[None]:
    """A transaction under the installation lock. Its search path is the one that our functions run
    with, because some expressions are parsed only once."""
    async with connection.transaction():
        await connection.execute(f"set local search_path = {PINNED_PATH}")
        await connection.execute(f"set local lock_timeout = '{MIGRATION_LOCK_TIMEOUT}'")
        try:
            await connection.execute("select pg_advisory_xact_lock(%s, %s)", MIGRATION_LOCK)
        except LockNotAvailable as error:
            raise DatabaseError(
                "another process installs or upgrades Headwater, or holds the lock for that",
                hint="Find it in pg_locks: classid 1752654962, objid 2.",
            ) from error
        await connection.execute("set local lock_timeout to default")
        yield


async def _check_server(connection: Connection) -> None:
    version = connection.info.server_version
    if version < SERVER_VERSION_MIN:
        raise NotInstalled(
            f"the server is PostgreSQL {version // 10_000}, which is too old",
            hint=f"Headwater needs PostgreSQL {SERVER_VERSION_MIN // 10_000} or newer.",
        )


_BOOTSTRAP = """
create schema headwater;
create table headwater.migrations (
  version integer primary key,
  applied_at timestamptz not null default clock_timestamp()
);
"""

# What a superuser, or another member of the owning role, adds belongs to the owner of the schema.
_AS_OWNER = """
select set_config('role', owner, true)
from (select pg_get_userbyid(nspowner) as owner from pg_namespace where nspname = 'headwater') s
where owner <> current_user and pg_has_role(
  owner, case when current_setting('server_version_num')::int < 160000 then 'member' else 'set' end)
"""

_PUBLIC_GRANTS = """
grant usage on schema headwater to public;
grant select on headwater.trimmed to public;
"""

_RESYNC = """
do $$
begin
  if to_regprocedure('headwater.sync_tables()') is not null then
    update headwater.captures set fingerprint = fingerprint + 1;
    perform headwater.sync_tables();
  end if;
end $$
"""


async def _exists(connection: Connection, relation: str) -> bool:
    cursor = await connection.execute("select to_regclass(%s) is not null", (relation,))
    return bool(_first(await cursor.fetchone()))


def _first(row: tuple[Any, ...] | None) -> Any:
    assert row is not None
    return row[0]
