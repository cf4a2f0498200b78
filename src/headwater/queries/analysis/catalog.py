"""Follows a statement through the catalog: what it reads, through views, functions and policies.

The server itself parses the statement: it becomes the body of a function in a transaction that is
rolled back, and `pg_depend` then has the columns, views and functions that it uses. From there,
views lead to their rules, functions to their bodies, tables under row-level security to their
policies, and types to the functions that the server calls for their values. The node trees have
what `pg_depend` does not record: whole rows, types, system tables, built-in functions.

A body that is stored as text is parsed as it would be when it runs: with the search path of its
function or of its caller, and as the role that it runs as.

All queries run in one snapshot that is older than the parsing. An object that is altered in between
differs from its fingerprint (`fingerprints`), which the next recheck notices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import psycopg
from psycopg import AsyncRawCursor, errors

from headwater.database import Connection, print_path
from headwater.errors import Unavailable
from headwater.log.reconnect import is_lost
from headwater.model import Column, Table
from headwater.queries.analysis.catalog_sql import (
    CODE_IN_DOMAINS,
    FUNCTIONS,
    REFERENCES,
    RELATIONS,
    RULES_AND_POLICIES,
    TYPE_PARTS,
)
from headwater.queries.analysis.fingerprints import (
    ALL_MEMBERSHIPS,
    ALL_SEARCHES,
    FIRST_OF_USERS,
    WHOLE_CATALOG,
    Object,
    Prints,
    path_print,
    prints_of,
)
from headwater.queries.analysis.search_path import NameLookup, resolve, session_of


class UnknownReads(Exception):
    """The server does not accept the statement as the body of a function. The text has why."""


@dataclass(slots=True)
class Use:
    """How a relation is used."""

    columns: set[int] = field(default_factory=set)
    whole: bool = False
    direct: bool = False
    """By the statement itself."""
    indirect: bool = False
    """In a view, a function or a policy, other than as the row that a policy is about."""
    through: dict[str, None] = field(default_factory=dict)


class Relation(msgspec.Struct, frozen=True):
    """A relation as the catalog has it. `roots` are the enabled tables its changes are logged
    under, and `captured` says that all of them are. `feed_only` means that its rows are not
    stored: a source sends only changes of it."""

    oid: int
    schema: str
    name: str
    kind: str
    temporary: bool
    columns: dict[int, str]
    generated: frozenset[int]
    recast: frozenset[int]
    """The columns whose images are made by a cast to JSON of the application: different values may
    have equal images."""
    roots: tuple[int, ...]
    captured: bool
    feed_only: bool

    @property
    def is_read(self) -> bool:
        """Whether it has rows of its own, or is a view of the server."""
        return self.kind in "rpmfS" or (self.kind == "v" and self.oid < FIRST_OF_USERS)

    @property
    def label(self) -> str:
        return self.name if self.schema == "public" else f"{self.schema}.{self.name}"


class Reads(msgspec.Struct, frozen=True):
    """Everything that was found about a statement."""

    uses: dict[int, Use]
    relations: dict[int, Relation]
    tables: dict[int, Table]
    """The enabled tables among the roots."""
    widened: tuple[str, ...]
    """Why it may read anything; empty if it may not."""
    notes: tuple[str, ...]
    printed: str
    parameters: tuple[str, ...]
    prints: Prints


@dataclass(frozen=True, slots=True)
class _CodeBody:
    """Something that refers to relations and functions: a function, a rule, a policy, or a
    condition of a domain."""

    kind: Literal["pg_proc", "pg_rewrite", "pg_policy", "pg_constraint"]
    oid: int
    session: NameLookup
    """How names are found in it, and in what it calls."""
    through: tuple[str, ...] = ()
    about: int = 0
    """The table that a policy is about."""


# Built-in functions that read what a text or a name says, or change what names mean.
_OPAQUE = re.compile(
    r"(query|table|schema|database|cursor)_to_xml.*|ts_stat|ts_rewrite|set_config|lo_.*|loread"
    r"|pg_read_.*|pg_ls_.*|pg_stat_file|pg_logical_slot_.*|pg_get_viewdef|dblink.*"
)
_PASSING = re.compile(
    r"now|clock_timestamp|statement_timestamp|transaction_timestamp|timeofday|random"
    r"|random_normal|gen_random_uuid|uuidv7|pg_current_.*"
)


# Built-in functions whose answer depends on more than rows.
_MEMBERSHIP = re.compile(r"pg_has_role|has_.*_privilege|row_security_active")
_SEARCH = re.compile(r".*to_ts(vector|query).*|ts_.*|get_current_ts_config")


class Walk:
    """Follows one statement, in a transaction that its caller opened and rolls back."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._uses: dict[int, Use] = {}
        self._objects: set[Object] = set()
        self._built_in: set[int] = set()
        self._relations: set[int] = set()
        self._widened: dict[str, None] = {}
        self._notes: dict[str, None] = {}
        self._seen: set[tuple[str, int, NameLookup]] = set()
        self._called: set[tuple[int, NameLookup]] = set()
        self._schemas: dict[NameLookup, tuple[str, ...] | None] = {}
        self._probes = 0
        self._pid = connection.info.backend_pid

    async def follow(
        self,
        sql: str,
        types: Sequence[int],
        session: NameLookup | None = None,
        role: str | None = None,
    ) -> Reads:
        """What the statement reads if names are found as in that session (None for our own), as
        that role. Refused if the server does not accept it."""
        session = session or await session_of(self._connection)
        if role is not None:
            session = msgspec.structs.replace(session, user=role)
        await self._check_types(only_of_columns=True)
        await self._find_names_as(session)
        parameters = await self._parameter_types(sql, types)
        probe = await self._probe(", ".join(parameters), sql)
        await self._find_names_as_usual()
        await self._walk([_CodeBody("pg_proc", probe, session)])
        relations = await self._read_relations()
        await self._read_built_in()
        prints = await prints_of(self._connection, self._objects)
        prints.update({("path", each): path_print(found) for each, found in self._schemas.items()})
        tables = await self._read_tables({r for each in relations.values() for r in each.roots})
        (body,) = await self._one("select pg_catalog.pg_get_function_sqlbody(%s)", probe)
        (named,) = await self._one(
            "select array(select format_type(t, null) from unnest(proargtypes::oid[])"
            " with ordinality a (t, n) order by n) from pg_catalog.pg_proc where oid = %s",
            probe,
        )
        return Reads(
            self._uses,
            relations,
            tables,
            tuple(self._widened),
            tuple(self._notes),
            body or "",
            tuple(named),
            prints,
        )

    # ---- the statement

    async def _find_names_as(self, session: NameLookup) -> None:
        """Refused if we cannot: PostgreSQL would skip a schema that we may not use."""
        self._objects.add(("role", session.user))
        if session not in self._schemas:
            self._schemas[session] = await resolve(self._connection, session)
        schemas = self._schemas[session]
        if schemas is None:
            raise UnknownReads(
                f"names cannot be found with search_path = {session.path} as {session.user}"
            )
        ours = await self._set_path(print_path(schemas))
        if tuple(dict.fromkeys(ours)) != tuple(dict.fromkeys(schemas)):
            missing = ", ".join(sorted(set(schemas) - set(ours)))
            raise UnknownReads(f"Headwater's own role may not use the schema {missing}")

    async def _find_names_as_usual(self) -> None:
        """For our own queries: in another path, a name may mean a function of another owner."""
        await self._set_path("pg_catalog, pg_temp")

    async def _set_path(self, path: str) -> list[str]:
        """Set the path. Returns the schemas that are searched."""
        (found,) = await self._one(
            "with made as materialized (select pg_catalog.set_config('search_path', %s, true))"
            " select pg_catalog.current_schemas(false)::pg_catalog.text[] from made",
            path,
        )
        return list(found)

    async def _parameter_types(self, sql: str, types: Sequence[int]) -> list[str]:
        """The types of the parameters: those given, and those the server infers."""
        if not types and "$" not in sql:
            return []
        known = dict(
            await self._query(
                "select t::bigint, pg_catalog.format_type(t, null)"
                " from pg_catalog.unnest(%s::pg_catalog.oid[]) t",
                sorted(set(types) - {0}),
            )
        )
        listed = ", ".join(known.get(oid, "unknown") for oid in types)
        name = f"headwater_probe_{self._pid}"
        await self._raw(f"prepare {name} {f'({listed})' if listed else ''} as {sql}")
        (found,) = await self._one(
            "select parameter_types::pg_catalog.text[] from pg_catalog.pg_prepared_statements"
            " where name operator(pg_catalog.=) %s::pg_catalog.text",
            name,
        )
        await self._raw(f"deallocate {name}")
        return list(found)

    async def _check_types(self, *, only_of_columns: bool) -> None:
        """Refused if parsing a text could run code of a type's owner with our rights. For the
        application's own statements, only constants that are compared with columns count."""
        for (label,) in await self._query(CODE_IN_DOMAINS, only_of_columns):
            raise UnknownReads(f"the condition of domain {label} is code of another owner")

    async def _probe(self, arguments: str, body: str) -> int:
        """Make a function with that body. Returns its oid."""
        self._probes += 1
        name = f"headwater_probe_{self._pid}_{self._probes}"
        await self._raw(
            f"create function headwater.{name}({arguments}) returns void language sql"
            f" begin atomic {body}\n; end"
        )
        (oid,) = await self._one(
            "select oid::bigint from pg_catalog.pg_proc"
            " where proname operator(pg_catalog.=) %s::pg_catalog.name"
            " and pronamespace operator(pg_catalog.=) 'headwater'::pg_catalog.regnamespace",
            name,
        )
        return int(oid)

    # ---- from body to body

    async def _walk(self, bodies: list[_CodeBody]) -> None:
        while bodies:
            new = [body for body in bodies if (body.kind, body.oid, body.session) not in self._seen]
            self._seen.update((body.kind, body.oid, body.session) for body in new)
            bodies = await self._bodies_behind(new)

    async def _bodies_behind(self, bodies: list[_CodeBody]) -> list[_CodeBody]:
        if not bodies:
            return []
        found = await self._query(
            REFERENCES, [body.kind for body in bodies], [body.oid for body in bodies]
        )
        behind: list[_CodeBody] = []
        for number, tree, classes, oids, columns in found:
            body, references = bodies[number - 1], list(zip(classes, oids, columns, strict=True))
            relations = self._use_relations(body, tree, references)
            functions = {oid for class_, oid, _ in references if class_ == "pg_proc"} - {body.oid}
            conditions, called = await self._behind_types(body, tree)
            behind += await self._behind_relations(body, relations)
            behind += await self._behind_functions(body, functions | called)
            behind += conditions
        return behind

    def _use_relations(
        self, body: _CodeBody, tree: str, references: list[tuple[str, int, int]]
    ) -> set[int]:
        """Store which relations the body uses, and how. Returns them."""
        whole = _WHOLE_ROW.search(tree) is not None
        used = [(oid, column) for class_, oid, column in references if class_ == "pg_class"]
        # Built-in objects are not in pg_depend, but everything is in the tree.
        used += [(int(oid), 0) for oid in set(_RELATION.findall(tree)) - {"0"}]
        own_row = body.about if "{SUBLINK" not in tree else 0
        for oid, column in used:
            use = self._uses.setdefault(oid, Use())
            use.columns.update({column} - {0})
            use.whole |= whole or column < 0
            use.direct |= not body.through
            use.indirect |= bool(body.through) and oid != own_row
            if oid != own_row:
                use.through.update(dict.fromkeys(body.through))
        self._objects |= {("operator", oid) for oid in _oids(_OPERATOR, tree)}
        self._objects |= {("collation", oid) for oid in _oids(_COLLATION, tree)}
        self._built_in |= _oids(_FUNCTION, tree)
        if _WRITES.search(tree):
            self._widened["it writes, or calls a function that writes"] = None
        if "{SQLVALUEFUNCTION" in tree:
            self._notes[_passing("current_date or the like")] = None
        return {oid for oid, _ in used}

    async def _behind_relations(self, body: _CodeBody, relations: set[int]) -> list[_CodeBody]:
        """The rules of views, and the policies of tables under row-level security."""
        self._relations |= relations
        found = await self._query(RULES_AND_POLICIES, list(relations))
        return [
            _CodeBody(
                kind,
                oid,
                body.session,
                (*body.through, label),
                about if kind == "pg_policy" else 0,
            )
            for kind, oid, label, about in found
            if about != body.about or kind == "pg_rewrite"
        ]

    async def _behind_types(self, body: _CodeBody, tree: str) -> tuple[list[_CodeBody], set[int]]:
        """What the server calls by itself for values of a type: conditions of domains, and the
        functions that compare them or convert them to JSON."""
        made = _oids(_TYPE_MADE, tree)
        named = made | _oids(_TYPE_READ, tree)
        self._objects |= {("type", oid) for oid in named}
        users = sorted(oid for oid in named if oid >= FIRST_OF_USERS)
        conditions, functions = [], set[int]()
        for oid, is_made, constraints, label, called in (
            await self._query(TYPE_PARTS, users, sorted(made)) if users else ()
        ):
            self._objects.add(("type", oid))
            functions.update(called)
            if is_made:
                through = (*body.through, f"domain {label}")
                conditions += [
                    _CodeBody("pg_constraint", each, body.session, through) for each in constraints
                ]
        return conditions, functions

    async def _behind_functions(self, body: _CodeBody, functions: set[int]) -> list[_CodeBody]:
        users = sorted(oid for oid in functions if oid >= FIRST_OF_USERS)
        self._objects |= {("function", oid) for oid in users}
        behind: list[_CodeBody] = []
        for found in await self._query(FUNCTIONS, users) if users else ():
            behind += await self._behind_function(body, _Function(*found))
        return behind

    async def _behind_function(self, body: _CodeBody, function: _Function) -> list[_CodeBody]:
        oid, label = function.oid, function.label
        path = body.session.path if function.path is None else function.path
        within = NameLookup(path, function.owner or body.session.user)
        if (oid, within) in self._called:
            return []  # also one that calls itself
        self._called.add((oid, within))
        through, behind = (*body.through, f"{label}()"), []
        self._objects.add(("role", within.user))
        if function.moves:
            self._widened[f"{label}() sets {function.moves}"] = None
        if function.text is not None:
            found = await self._probe_text(function.arguments, function.text, within)
            if found is None:
                self._widened[f"the body of {label}() cannot be analysed"] = None
            else:
                behind.append(_CodeBody("pg_proc", found, within, through))
        if function.is_opaque:
            # What it calls is not known, not even if it reads no table.
            self._objects |= {WHOLE_CATALOG, ALL_MEMBERSHIPS}
        if function.may_read:
            reason = f"{label}() is written in {function.language}: it may read anything"
            self._widened[reason] = None
        return [*behind, _CodeBody("pg_proc", oid, within, through)]

    async def _probe_text(self, arguments: str, text: str, session: NameLookup) -> int | None:
        """The parsed body of a function whose body is stored as text."""
        await self._query("savepoint headwater_probe")
        try:
            await self._check_types(only_of_columns=False)
            await self._find_names_as(session)
            oid = await self._probe(arguments, text)
        except UnknownReads:
            await self._query("rollback to headwater_probe")
            self._objects.add(WHOLE_CATALOG)  # it may be accepted after any change
            return None
        await self._find_names_as_usual()
        return oid

    # ---- what was found

    async def _read_relations(self) -> dict[int, Relation]:
        found = await self._query(RELATIONS, sorted(self._relations))
        self._objects |= {("relation", oid) for oid in self._relations}
        # Tables of a view are read with the rights of its owner.
        self._objects |= {("role", owner) for *_, owner in found if owner is not None}
        return {oid: _relation(oid, *row) for oid, *row, _ in found}

    async def _read_built_in(self) -> None:
        built_in = sorted(oid for oid in self._built_in if oid < FIRST_OF_USERS)
        self._objects |= {("function", oid) for oid in built_in}
        for (name,) in await self._query(
            "select distinct proname::text from pg_catalog.pg_proc where oid = any(%s::oid[])"
            " order by 1",
            built_in,
        ):
            if _OPAQUE.fullmatch(name):
                self._widened[f"{name}() may read anything"] = None
            elif _PASSING.fullmatch(name):
                self._notes[_passing(f"{name}()")] = None
            elif _MEMBERSHIP.fullmatch(name):
                self._objects |= {WHOLE_CATALOG, ALL_MEMBERSHIPS}
            elif _SEARCH.fullmatch(name):
                self._objects.add(ALL_SEARCHES)

    async def _read_tables(self, roots: Iterable[int]) -> dict[int, Table]:
        found = await self._query(
            "select t::bigint, headwater.shape_id(t), headwater.describe(t)"
            " from unnest(%s::oid[]) t",
            sorted(roots),
        )
        return {oid: table_of(oid, shape, described) for oid, shape, described in found}

    # ---- asking

    async def _query(self, question: str, *values: Any) -> list[tuple[Any, ...]]:
        cursor = await self._connection.execute(question.encode(), values)
        return await cursor.fetchall() if cursor.description else []

    async def _one(self, question: str, *values: Any) -> tuple[Any, ...]:
        (row,) = await self._query(question, *values)
        return row

    async def _raw(self, statement: str) -> None:
        """Send SQL of the application so that it can only be one statement: with binary results,
        the driver uses the protocol that accepts only one."""
        try:
            await AsyncRawCursor(self._connection).execute(statement.encode(), (), binary=True)
        except errors.LockNotAvailable as error:
            raise Unavailable(
                f"the database is busy: {error}", hint="It is tried again automatically."
            ) from error
        except psycopg.Error as error:
            if is_lost(error):
                raise
            raise UnknownReads(error.diag.message_primary or str(error)) from error
        except UnicodeError as error:
            raise UnknownReads(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Function:
    """A function of the application, from the catalog."""

    oid: int
    label: str
    language: str
    volatility: str
    is_aggregate: bool
    text: str | None
    """Its body, if that is SQL stored as text, which is parsed when it runs."""
    arguments: str
    path: str | None
    """The search path that it sets."""
    moves: str | None
    """Another setting of it that changes the meaning of names or texts."""
    owner: str | None
    """Its owner, if it runs as its owner."""

    @property
    def is_opaque(self) -> bool:
        return self.language not in ("sql", "internal", "c")

    @property
    def may_read(self) -> bool:
        return self.language != "sql" and self.volatility != "i" and not self.is_aggregate


_WHOLE_ROW = re.compile(r":varattno 0 ")
_RELATION = re.compile(r":relid (\d+)")
_FUNCTION = re.compile(r":(?:funcid|opfuncid|aggfnoid|winfnoid) (\d+)")
_OPERATOR = re.compile(r":(?:opno|eqop|sortop|opnos) (\d+|\(o [\d ]+\))")
_COLLATION = re.compile(r":\w*coll(?:id|ation)s? (\d+|\(o [\d ]+\))")
# A column that is only read has its value already. Values of all other types are made.
_TYPE_READ = re.compile(r":vartype (\d+)")
_TYPE_MADE = re.compile(r":(?!vartype)\w*[tT]ype\w* (\d+|\(o [\d ]+\))")
_WRITES = re.compile(r":commandType [2-7]|:hasModifyingCTE true")


def _relation(
    oid: int, schema: str, name: str, kind: str, persistence: str, columns: dict[str, str] | None,
    generated: list[int], recast: list[int], roots: list[int], captured: bool,
    feed_only: bool,
) -> Relation:  # fmt: skip
    numbered = {int(number): column for number, column in (columns or {}).items()}
    special, above = (frozenset(generated), frozenset(recast)), tuple(roots)
    names, is_temporary = (schema, name, kind), persistence == "t"
    return Relation(oid, *names, is_temporary, numbered, *special, above, captured, feed_only)


def _oids(pattern: re.Pattern[str], tree: str) -> set[int]:
    """The oids in these fields of a tree, single or as a list."""
    found = set(pattern.findall(tree))
    return {int(oid) for text in found for oid in text.strip("()o ").split()} - {0}


def _passing(what: str) -> str:
    return f"{what} returns another value each time, without a change in a table"


def table_of(oid: int, shape: int, described: Mapping[str, Any]) -> Table:
    """A table, from the result of `headwater.describe`."""
    columns = msgspec.convert(described["columns"], tuple[Column, ...])
    return Table(
        shape, described["schema"], described["name"], columns, tuple(described["key"]), oid
    )
