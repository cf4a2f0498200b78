"""Checks a database for `headwater doctor`: what works, and which right or setting is missing."""

from __future__ import annotations

from typing import Literal

import msgspec

from headwater import limits
from headwater.capture.postgres import functions, schema, triggers
from headwater.capture.postgres.wal.catalog.checks import MAY_REPLICATE
from headwater.database import Connection, connect, is_same_database
from headwater.errors import HeadwaterError
from headwater.limits import SERVER_VERSION_MIN
from headwater.settings import Settings


class Finding(msgspec.Struct, frozen=True):
    """The result of a check. `fail` stops Headwater, `warn` affects one feature; `hint` says what
    to do."""

    topic: str
    level: Literal["ok", "warn", "fail"]
    detail: str
    hint: str | None = None


async def examine(connection: Connection) -> list[Finding]:
    findings = [
        _server(connection.info.server_version),
        await _encoding(connection),
        await _identity(connection),
        await _wal(connection),
        await _commit_times(connection),
        await _tables(connection),
        await _notifications(connection),
    ]
    if await _value(connection, _HIDDEN):
        hint = (
            "As the role that installed it: grant usage on schema headwater, and select on its"
            " tables, to …"
        )
        return [
            *findings,
            Finding("schema", "fail", "this role may not use schema headwater", hint),
        ]
    findings.append(await _installation(connection))
    if await schema.installed_version(connection) == schema.LATEST:
        findings.append(await _functions(connection))
        findings += [of_table(table) for table in await triggers.list_tables(connection)]
        findings += await _wal_capture(connection)
        findings += await _locks(connection)
    return findings


_HIDDEN = """
    select not (has_schema_privilege(n.oid, 'USAGE') and has_table_privilege(c.oid, 'SELECT'))
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname = 'headwater' and c.relname = 'migrations'
"""


def _server(version: int) -> Finding:
    name = f"PostgreSQL {version // 10_000}.{version % 10_000}"
    if version < SERVER_VERSION_MIN:
        return Finding(
            "server", "fail", f"{name} is too old", f"Use {SERVER_VERSION_MIN // 10_000} or newer."
        )
    return Finding("server", "ok", name)


async def _encoding(connection: Connection) -> Finding:
    encoding = await _value(connection, "select current_setting('server_encoding')")
    if encoding != "UTF8":
        return Finding(
            "encoding",
            "warn",
            f"the encoding is {encoding}: text outside ASCII may not be ordered in memory",
            "Use a database with encoding UTF8.",
        )
    return Finding("encoding", "ok", "UTF8")


async def _installation(connection: Connection) -> Finding:
    version = await schema.installed_version(connection)
    if version == schema.LATEST:
        return Finding("schema", "ok", f"schema headwater has version {version}")
    if version:
        return Finding(
            "schema",
            "fail",
            f"schema headwater has version {version}, this release needs {schema.LATEST}",
            "Run: headwater init",
        )
    allowed = await _value(
        connection, "select has_database_privilege(current_database(), 'CREATE')"
    )
    if not allowed:
        return Finding(
            "schema",
            "fail",
            "not installed, and this role may not create a schema",
            "As the database's owner: grant create on database … to …",
        )
    return Finding("schema", "warn", "not installed", "Run: headwater init")


async def _functions(connection: Connection) -> Finding:
    """Functions that act for the gateway may be executed by the owner of the schema only."""
    gateway = sorted(functions.CLASSES["gateway"])
    cursor = await connection.execute(functions.OTHERS, (gateway,))
    found = await cursor.fetchall()
    if found:
        roles = sorted({role for role, _ in found})
        names = ", ".join(roles[:5]) + (f" and {len(roles) - 5} more" if len(roles) > 5 else "")
        return Finding(
            "functions",
            "warn",
            f"{names} may execute functions that act for the gateway, such as {found[0][1]}",
            "Revoke it: revoke execute on all functions in schema headwater from …; then grant by"
            " name, as docs/howto/existing-database.md does.",
        )
    return Finding("functions", "ok", "only the owner may execute what acts for the gateway")


async def _identity(connection: Connection) -> Finding:
    allowed = await _value(
        connection, "select has_function_privilege('pg_catalog.pg_control_system()', 'EXECUTE')"
    )
    if not allowed:
        return Finding(
            "log identity",
            "fail",
            "this role may not call pg_control_system(), which detects a restored database",
            "As a superuser: grant execute on function pg_control_system() to …",
        )
    return Finding("log identity", "ok", "a restored or failed-over database is recognised")


async def _wal(connection: Connection) -> Finding:
    level = await _value(connection, "select current_setting('wal_level')")
    allowed = await _value(
        connection,
        f"select {MAY_REPLICATE}",
    )
    if level != "logical" or not allowed:
        missing = (
            "wal_level is " + str(level) if level != "logical" else "the role may not replicate"
        )
        return Finding(
            "WAL source",
            "warn",
            f"{missing}; capture by triggers does not need it",
            "Set wal_level = logical and: alter role … replication",
        )
    return Finding("WAL source", "ok", "wal_level is logical and the role may replicate")


async def _wal_capture(connection: Connection) -> list[Finding]:
    """The slot that feeds the log, where tables are captured from the WAL. While it does not
    advance, readers of the whole log wait."""
    cursor = await connection.execute(_FEEDING)
    row = await cursor.fetchone()
    if row is None:
        return []
    topic = "WAL capture"
    slot, active, status, behind = row
    run = "Run a gateway (headwater serve): it captures by itself."
    if status is None or status == "lost":
        return [
            Finding(
                topic, "fail",
                f"slot {slot} is lost: readers of the log wait, and its tables will be read again",
                f"{run} It makes a new slot.",
            )
        ]  # fmt: skip
    if not active:
        detail = f"WAL capture is not running: {behind} bytes behind; readers of the log wait"
        if not await _value(connection, f"select {MAY_REPLICATE}"):
            detail += "; this role may not replicate, so its gateways do not capture"
            run = f"As a superuser: alter role {connection.info.user} replication"
        return [Finding(topic, "fail", detail, run)]
    if behind > limits.WAL_CAPTURE_BEHIND_BYTES:
        return [
            Finding(
                topic, "warn",
                f"WAL capture is {behind} bytes behind: readers of the log wait for it",
                "It is slower than writers are. Give the server and the gateway more processors, or"
                " capture fewer tables.",
            )
        ]  # fmt: skip
    return [Finding(topic, "ok", f"slot {slot} is read, {behind} bytes behind")]


_FEEDING = """
    select i.wal_slot, s.active, s.wal_status,
           greatest(coalesce(pg_current_wal_lsn() - s.confirmed_flush_lsn, 0), 0)::bigint
    from headwater.installation i left join pg_replication_slots s on s.slot_name = i.wal_slot
    where i.wal_slot is not null
"""


async def _commit_times(connection: Connection) -> Finding:
    if await _value(connection, "select current_setting('track_commit_timestamp')") != "on":
        return Finding(
            "commit times",
            "warn",
            "track_commit_timestamp is off: a transaction's time is that of its last change",
            "Set track_commit_timestamp = on for exact times in the history.",
        )
    return Finding("commit times", "ok", "track_commit_timestamp is on")


async def _tables(connection: Connection) -> Finding:
    """To enable a table, the role needs the right to create triggers on it."""
    closed = await _names(
        connection,
        "select case when n.nspname = 'public' then '' else quote_ident(n.nspname) || '.' end"
        " || quote_ident(c.relname)"
        " from pg_class c join pg_namespace n on n.oid = relnamespace"
        " where relkind in ('r', 'p') and not relispartition and relpersistence <> 't'"
        " and n.nspname not in ('pg_catalog', 'information_schema', 'headwater')"
        " and not has_table_privilege(c.oid, 'TRIGGER') order by 1",
    )
    if closed:
        return Finding(
            "tables",
            "warn",
            f"this role may not enable {closed}",
            "As their owner: grant trigger on … to …",
        )
    return Finding("tables", "ok", "this role may enable every table")


async def _notifications(connection: Connection) -> Finding:
    """The notification queue is shared by all databases; when it is full, commits fail."""
    usage = float(str(await _value(connection, "select pg_notification_queue_usage()")))
    if usage > 0.5:
        return Finding(
            "notifications",
            "fail",
            f"PostgreSQL's notification queue is {usage:.0%} full: a session listens and does not"
            " read",
            "Find it in pg_stat_activity and end it: pg_terminate_backend(…)",
        )
    if await _value(connection, "select current_setting('max_prepared_transactions')") != "0":
        return Finding(
            "notifications",
            "warn",
            "max_prepared_transactions is not 0: writers send no NOTIFY, and readers poll",
        )
    return Finding("notifications", "ok", "the queue is almost empty")


async def of_questions(connection: Connection, question_url: str | None) -> Finding:
    """Check the role that reads as users' roles. The code of a policy can become that role: so it
    must have no rights of its own."""
    topic = "question role"
    if question_url is None:
        refused = await _names(connection, _UNSAFE_TABLES)
        if not refused:
            return Finding(topic, "ok", "question_url is not set, and no table needs it")
        return Finding(
            topic,
            "warn",
            f"question_url is not set: users' roles may not read {refused}, guarded by policies of"
            " other owners",
            _MAKE_ROLE,
        )
    try:
        asking = await connect(question_url, purpose="doctor")
    except HeadwaterError as error:
        return Finding(topic, "fail", f"question_url: {error}", error.hint)
    async with asking:
        if not await is_same_database(connection, asking):
            return Finding(
                topic,
                "fail",
                "question_url is another database than url",
                "Give the same host, port and database in both.",
            )
        cursor = await asking.execute(_QUESTION_ROLE)
        role, settings, *facts = (await cursor.fetchall())[0]
        readable = await _names(asking, _READABLE)
        becomes = await _names(asking, _MAY_BECOME)
    found = [what for what, is_so in zip(_TOO_MUCH, facts, strict=True) if is_so]
    if readable:
        found.append(f"may read {readable}")
    if becomes:
        found.append(f"may become {becomes}, which can read the log or get that right")
    if found:
        return Finding(topic, "warn", f"{role} {', '.join(found)}: so may every policy", _MAKE_ROLE)
    if settings:
        return Finding(
            topic,
            "warn",
            f"{role} has settings of its own: {settings}. Triggers of mutations can set them",
            f"alter role {role} reset all; and set them for the database: alter database … set …",
        )
    return Finding(topic, "ok", f"{role} owns nothing and may read nothing itself")


_MAKE_ROLE = (
    "create role headwater_questions login noinherit; grant each of the users' roles to it, on"
    " PostgreSQL 16 and newer with inherit false; and set question_url"
)

_TOO_MUCH = (
    "is a superuser", "has BYPASSRLS", "has CREATEROLE", "has REPLICATION", "owns something",
)  # fmt: skip

_QUESTION_ROLE = """
    select r.rolname::text, coalesce((select string_agg(distinct split_part(setting, '=', 1), ', ')
                                      from pg_db_role_setting s, unnest(s.setconfig) setting
                                      where s.setrole = r.oid), ''),
           r.rolsuper, r.rolbypassrls, r.rolcreaterole, r.rolreplication,
           exists (select from pg_shdepend d
                   where d.refclassid = 'pg_authid'::regclass and d.refobjid = r.oid
                     and d.deptype = 'o')
    from pg_roles r where r.rolname = session_user
"""

_READABLE = """
    select case when n.nspname = 'public' then '' else quote_ident(n.nspname) || '.' end
           || quote_ident(c.relname)
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.relkind in ('r', 'p', 'v', 'm', 'f')
      and n.nspname not in ('pg_catalog', 'information_schema') and n.nspname !~ '^pg_'
      and has_schema_privilege(n.oid, 'usage') and has_table_privilege(c.oid, 'select')
      and not has_table_privilege('public', c.oid, 'select')
    order by n.nspname <> 'headwater', 1
"""

_MAY_BECOME = """
    select r.rolname::text
    from pg_roles r
    where r.rolname <> session_user and pg_has_role(r.oid, 'member')
      and (r.rolsuper or r.rolcreaterole or r.rolreplication
           or has_table_privilege(r.oid, to_regclass('headwater.log'), 'select'))
      and not (select rolsuper from pg_roles where rolname = session_user)
    order by 1
"""

_UNSAFE_TABLES = """
    select case when n.nspname = 'public' then '' else quote_ident(n.nspname) || '.' end
           || quote_ident(c.relname)
    from pg_class c
    join pg_namespace n on n.oid = c.relnamespace and n.nspname <> 'headwater'
    join pg_roles o on o.oid = c.relowner
    join pg_roles me on me.rolname = session_user
    where c.relkind in ('r', 'p') and c.relrowsecurity
      and exists (select from pg_trigger t where t.tgrelid = c.oid and t.tgname ~ '^headwater')
      and not (o.rolsuper or (not me.rolsuper and pg_has_role(me.oid, o.oid, 'usage')))
    order by 1
"""


async def _names(connection: Connection, statement: str) -> str:
    """The first five names, and how many more; empty for none."""
    cursor = await connection.execute(statement.encode())
    names = [name for (name,) in await cursor.fetchall()]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def of_clients(settings: Settings, has_hook: bool | None = None) -> Finding:
    """Which tables clients may read through a gateway with these settings. `has_hook` says whether
    its application has an authorize hook; None where that is not known."""
    topic = "clients"
    if not settings.auth.has_key and not has_hook:
        return Finding(topic, "ok", "no authentication is configured: a gateway asks for no token")
    if has_hook or not settings.opens_every_table:
        return Finding(topic, "ok", "not every token opens every enabled table")
    unless = "" if has_hook is False else ", unless the application has an @hw.authorize"
    return Finding(
        topic,
        "warn",
        f"every client with a token may read every enabled table{unless}",
        'Declare @hw.authorize, set [auth] role, or set [gateway] tables = "closed" and declare'
        " tables.",
    )


async def _locks(connection: Connection) -> list[Finding]:
    """Headwater's advisory locks that other roles hold: every role can take them."""
    cursor = await connection.execute(
        "select number, pid, role from headwater.lock_holders() where not is_ours order by 1, 2"
    )
    return [
        Finding(
            "locks",
            "warn",
            f"process {pid} of role {role} holds the advisory lock for {_LOCKS[number]}",
            f"End it: select pg_terminate_backend({pid})",
        )
        for number, pid, role in await cursor.fetchall()
        if number in _LOCKS
    ]


_LOCKS = {
    1: "readers that poll: changes arrive within a second instead of at once",
    2: "installing: headwater init waits",
    3: "maintenance, which runs anyway",
    4: "enabling tables, which fails",
    5: "activity, which gateways record meanwhile",
}


def of_table(table: triggers.CapturedTable) -> Finding:
    """The state of a table that was enabled."""
    topic = f"table {table.name}"
    if not table.exists:
        return Finding(topic, "warn", "was enabled, and no longer exists")
    if not table.enabled:
        return Finding(
            topic,
            "warn",
            "is disabled: its changes are not captured",
            f"Run: headwater enable {table.name}",
        )
    if table.altered:
        return Finding(
            topic,
            "warn",
            "was altered: its changes are captured exactly but slowly until the next maintenance",
            f"To repair it now: headwater enable {table.name}",
        )
    way = " from the WAL" if table.capture == "wal" else ""
    return Finding(topic, "ok", f"is captured{way}")


async def _value(connection: Connection, statement: str) -> object:
    cursor = await connection.execute(statement.encode())
    row = await cursor.fetchone()
    return row[0] if row else None
