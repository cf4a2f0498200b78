"""Everything that may be wrong with a PostgreSQL source, each with its fix.

Nothing here changes the source. A `Problem` that is a warning does not prevent capture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headwater.capture.postgres.wal.catalog.describe import CatalogTable, chosen, source_table
from headwater.capture.postgres.wal.catalog.filtering import checked_filter
from headwater.capture.postgres.wal.catalog.mirror_types import TypeCatalog
from headwater.capture.postgres.wal.catalog.publication import publication_exists, publishes
from headwater.capture.postgres.wal.connecting import fetch, fetch_value
from headwater.capture.postgres.wal.slots import read_slot
from headwater.capture.source import Problem, TableSpec
from headwater.database import Connection
from headwater.errors import InvalidQuery

OLDEST = 140000


async def server_problems(connection: Connection, slot: str) -> list[Problem]:
    """Version, settings, rights and free slots."""
    (row,) = await fetch(connection, _SERVER, slot)
    facts = dict(zip(_FACTS, row, strict=True))
    return [Problem(what, fix) for wrong, what, fix in _server_rules(facts, slot) if wrong]


def _server_rules(facts: dict[str, Any], slot: str) -> list[tuple[bool, str, str]]:
    return [
        (
            facts["version"] < OLDEST,
            f"the server is PostgreSQL {facts['version'] // 10000}, which cannot stream large"
            " transactions",
            "Use PostgreSQL 14 or later.",
        ),
        (
            facts["recovering"],
            "the server is a standby",
            "Give the URL of the primary.",
        ),
        (
            facts["wal_level"] != "logical",
            f"wal_level is {facts['wal_level']}",
            "Set it and restart the server: alter system set wal_level = 'logical'",
        ),
        (
            not facts["may_replicate"],
            f"the role {facts['role']} may not replicate",
            f'Give it the right: alter role "{facts["role"]}" replication',
        ),
        (
            not facts["slot_exists"] and facts["slots"] >= facts["max_slots"],
            f"all {facts['max_slots']} replication slots are in use",
            "Raise max_replication_slots and restart the server, or drop a slot that nothing uses.",
        ),
        (
            facts["senders"] >= facts["max_senders"] and not facts["slot_active"],
            f"all {facts['max_senders']} WAL senders are in use",
            "Raise max_wal_senders and restart the server.",
        ),
        (
            facts["slot_elsewhere"],
            f"the slot {slot} exists and belongs to another database or plugin",
            "Give the source the option slot with another name.",
        ),
    ]


_FACTS = (
    "version", "recovering", "wal_level", "role", "may_replicate", "slots", "max_slots",
    "senders", "max_senders", "slot_exists", "slot_active", "slot_elsewhere",
)  # fmt: skip

MAY_REPLICATE = """
    (select rolsuper or rolreplication from pg_roles where rolname = current_user)
      or exists (select from pg_roles
                 where rolname = 'rds_replication' and pg_has_role(oid, 'MEMBER'))
"""
"""Whether this role may read the WAL. A role does not get that by membership in one that may."""

_SERVER = f"""
    select current_setting('server_version_num')::int, pg_is_in_recovery(),
           current_setting('wal_level'), current_user::text,
           {MAY_REPLICATE},
           (select count(*) from pg_replication_slots),
           current_setting('max_replication_slots')::int,
           (select count(*) from pg_stat_activity where backend_type = 'walsender'),
           current_setting('max_wal_senders')::int,
           s.slot_name is not null, coalesce(s.active, false),
           s.slot_name is not null
             and (s.database is distinct from current_database() or s.plugin <> 'pgoutput')
    from (select) one left join pg_replication_slots s on s.slot_name = %s
"""


# ------------------------------------------------------------------------ the publication


async def publication_problems(
    connection: Connection,
    name: str,
    managed: bool,
    tables: Sequence[tuple[TableSpec, CatalogTable]],
) -> list[Problem]:
    """Whether we may make the publication; or whether that of an administrator has the tables."""
    if managed:
        return await _ownership(connection, name, tables)
    if not await publication_exists(connection, name):
        fix = f"Make it: {_statement(name, tables)}"
        return [Problem(f"the publication {name} does not exist", fix)]
    published = await publishes(connection, name)
    return [
        Problem(
            f"the publication {name} does not have the table {table.quoted}",
            f'Add it: alter publication "{name}" add table {table.quoted}',
        )
        for _, table in tables
        if (table.schema, table.name) not in published
    ]


async def _ownership(
    connection: Connection, name: str, tables: Sequence[tuple[TableSpec, CatalogTable]]
) -> list[Problem]:
    ((role, database, may_create, foreign),) = await fetch(connection, _RIGHTS, name)
    found = []
    if foreign_tables := [table.quoted for _, table in tables if not table.owned]:
        which, them = ("table", "it") if len(foreign_tables) == 1 else ("tables", "them")
        found.append(
            Problem(
                f"the role {role} does not own the {which} {', '.join(foreign_tables)}, so it"
                f" cannot publish {them}",
                f"Create the publication as the owner: {_statement(name, tables)}; and give the"
                f' source the option publication = "{name}".',
            )
        )
    if not may_create:
        fix = f'Give it the right: grant create on database "{database}" to "{role}"'
        found.append(Problem(f"the role {role} may not make a publication", fix))
    if foreign:
        what = f"the publication {name} exists and belongs to another role"
        fix = f'Use it as it is, with the option publication = "{name}", or drop it.'
        found.append(Problem(what, fix))
    return found


def _statement(name: str, tables: Sequence[tuple[TableSpec, CatalogTable]]) -> str:
    """Makes the publication, of all tables: a second statement would find it existing."""
    names = ", ".join(table.quoted for _, table in tables) or "…"
    return f'create publication "{name}" for table {names} with (publish_via_partition_root)'


_RIGHTS = """
    select current_user::text, current_database()::text,
           has_database_privilege(current_database(), 'CREATE')
             or exists (select from pg_publication p where p.pubname = n.name),
           exists (select from pg_publication p where p.pubname = n.name
                     and not pg_has_role(p.pubowner, 'USAGE'))
    from (select %s::text as name) n
"""


# ------------------------------------------------------------------------ tables


def table_problems(
    spec: TableSpec, table: CatalogTable | None, types: TypeCatalog, version: int
) -> Iterator[Problem]:
    """What prevents a mirror of the table, or will be missing in it."""
    if table is None:
        yield Problem(
            f"there is no table {spec.name}",
            "Write its name as the source has it, with the schema unless that is public.",
            missing=spec.name,
        )
        return
    if wrong := _KINDS.get(table.kind):
        yield Problem(f"{spec.name} is {wrong}", "Name the tables that it reads from instead.")
        return
    if table.is_partition:
        yield Problem(f"{spec.name} is a partition", "Name the partitioned table instead.")
    if table.persistence != "p":
        yield Problem(
            f"the table {spec.name} is not in the server's log, because it is unlogged",
            f"Run: alter table {table.quoted} set logged",
        )
    if not table.readable:
        yield Problem(
            f"the role may not read the table {spec.name}",
            f"Run: grant usage on schema … to …; grant select on {table.quoted} to …",
        )
    elif table.hides_rows:
        yield Problem(
            f"row-level security hides rows of {spec.name} from the role",
            "Run: alter role … bypassrls",
        )
    yield from _identity_problems(spec, table)
    yield from _column_problems(spec, table, types, version)


_KINDS = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "S": "a sequence",
    "c": "a composite type",
    "i": "an index",
    "I": "an index",
    "t": "a TOAST table",
}


def _identity_problems(spec: TableSpec, table: CatalogTable) -> Iterator[Problem]:
    if table.identity == "n" or (table.identity == "i" and not table.identity_key):
        yield Problem(
            f"the table {spec.name} has REPLICA IDENTITY NOTHING, so the log does not say which"
            " rows were updated or deleted",
            f"Run: alter table {table.quoted} replica identity default",
        )
    elif not table.key:
        yield Problem(
            f"the table {spec.name} has no primary key",
            f"Run: alter table {table.quoted} add primary key (…); or, with a unique index on"
            f" columns that are NOT NULL: alter table {table.quoted} replica identity using index"
            " …; or list the other tables (tables = […], --table)",
        )
    wrong = [leaf for leaf in table.leaves if leaf.identity != table.identity]
    if table.kind == "p" and wrong and table.key:
        word = {"f": "full", "d": "default"}.get(table.identity, "using index …")
        yield Problem(
            f"the partition {wrong[0].name} of {spec.name} has another replica identity than the"
            " partitioned table",
            f"Run: alter table {wrong[0].name} replica identity {word}",
        )
    if table.children:
        yield Problem(
            f"{spec.name} has child tables that inherit from it; their rows are not part of its"
            " mirror",
            "Name the child tables, too, if they are wanted.",
            warning=True,
        )


def _column_problems(
    spec: TableSpec, table: CatalogTable, types: TypeCatalog, version: int
) -> Iterator[Problem]:
    names = [column.name for column in table.columns]
    published = {column.name for column in table.published(version)}
    for name in (*(spec.columns or ()), *spec.exclude, *spec.types):
        if name not in names:
            yield Problem(f"the table {spec.name} has no column {name}", "Correct the name.")
    for name in table.key:
        if name not in chosen(spec, published):
            yield Problem(
                f"the column {name} of {spec.name} belongs to its key and is left out",
                "Mirror all columns of the key.",
            )
    for name in chosen(spec, names):
        if name not in published:
            yield Problem(
                f"the generated column {name} of {spec.name} is not in the log of this server, so"
                " the mirror does not have it",
                "PostgreSQL 18 logs stored generated columns. Or compute it in a view.",
                warning=True,
            )
    for column in table.columns:
        mirrored = column.name in chosen(spec, published) and column.name not in spec.types
        if mirrored and types.becomes_text(column.type):
            yield Problem(
                f"the column {column.name} of {spec.name} has a type that the mirror's database may"
                " not have; the mirror has it as text",
                "Nothing to do, or choose a type with the option types.",
                warning=True,
            )
    yield from _filter_problems(spec, table, types, version)


def _filter_problems(
    spec: TableSpec, table: CatalogTable, types: TypeCatalog, version: int
) -> Iterator[Problem]:
    if spec.where is None:
        return
    try:
        checked_filter(spec, source_table(spec, table, types, version))
    except InvalidQuery as error:
        yield Problem(f"the filter of {spec.name} does not fit: {error}", "Correct the filter.")
        return
    if table.identity != "f":
        yield Problem(
            f"{spec.name} has a filter: of a row that begins to match, large values that were not"
            " changed are not in the log",
            f"Run: alter table {table.quoted} replica identity full",
            warning=True,
        )


async def slot_in_use(connection: Connection, slot: str) -> list[Problem]:
    """Another program reads the slot. A runner of Headwater is expected to, usually our own; a
    second one is refused by the server."""
    found = await read_slot(connection, slot)
    if found is None or not found.active:
        return []
    program = await fetch_value(connection, _PROGRAM, found.active_pid)
    if program is not None and program.startswith("headwater"):
        return []
    what = (
        f"the slot {slot} is read by another program ({program or 'unnamed'}, process"
        f" {found.active_pid} of the server)"
    )
    fix = "Stop that program, or give this source the option slot with another name."
    return [Problem(what, fix, warning=True)]


_PROGRAM = "select application_name from pg_stat_activity where pid = %s"
