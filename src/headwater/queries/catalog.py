"""Follows a statement through the catalog: what it reads, through views, functions and policies.

The server itself parses the statement: it becomes the body of a function in a transaction that is
rolled back, and `pg_depend` then says which columns, views and functions it uses. From there views
lead to their rules, functions to their bodies, tables under row-level security to their policies.
The node trees tell what `pg_depend` does not record: whole rows, system tables, built-in functions.

All questions are put in one snapshot that is older than the parsing. Whatever is altered meanwhile
differs from the `prints` taken here, and is noticed at the next look.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec
import psycopg
from psycopg import AsyncRawCursor, errors

from headwater.database import Connection
from headwater.errors import Unavailable
from headwater.log.follow import is_lost
from headwater.model import Column, Table

Kind: TypeAlias = Literal["relation", "function"]
Prints: TypeAlias = dict[tuple[Kind, int], str | None]
"""What each object looked like, by its oid; None for one that is not there."""

FIRST_OF_USERS = 16_384
"""Objects with a lower oid came with the server."""


class Refused(Exception):
    """The server does not take the statement as the body of a function; the text says why."""


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
    under, and `captured` says that all of them are."""

    oid: int
    schema: str
    name: str
    kind: str
    temporary: bool
    columns: dict[int, str]
    generated: frozenset[int]
    virtual: frozenset[int]
    roots: tuple[int, ...]
    captured: bool

    @property
    def is_read(self) -> bool:
        """Whether it has rows of its own, or is a view whose inside is the server's business."""
        return self.kind in "rpmfS" or (self.kind == "v" and self.oid < FIRST_OF_USERS)

    @property
    def label(self) -> str:
        return self.name if self.schema == "public" else f"{self.schema}.{self.name}"


class Found(msgspec.Struct, frozen=True):
    """All that was found out about a statement."""

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
class _Body:
    """Something that refers to relations and functions: a function, a rule or a policy."""

    kind: Literal["pg_proc", "pg_rewrite", "pg_policy"]
    oid: int
    through: tuple[str, ...] = ()
    path: str | None = None
    """The search path that texts in it are read with, where it is not the session's."""
    about: int = 0
    """The table that a policy is about."""


# Built-in functions that read whatever a text or a name says, or change what names mean.
_OPAQUE = re.compile(
    r"(query|table|schema|database|cursor)_to_xml.*|ts_stat|ts_rewrite|set_config|lo_.*|loread"
    r"|pg_read_.*|pg_ls_.*|pg_stat_file|pg_logical_slot_.*|pg_get_viewdef|dblink.*"
)
_PASSING = re.compile(
    r"now|clock_timestamp|statement_timestamp|transaction_timestamp|timeofday|random"
    r"|random_normal|gen_random_uuid|uuidv7|pg_current_.*"
)


class Walk:
    """Follows one statement, in a transaction that its caller opened and rolls back."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._uses: dict[int, Use] = {}
        self._functions: set[int] = set()
        self._built_in: set[int] = set()
        self._relations: set[int] = set()
        self._widened: dict[str, None] = {}
        self._notes: dict[str, None] = {}
        self._seen: set[tuple[str, int, str | None]] = set()
        self._called: set[tuple[int, str | None]] = set()
        self._probes = 0
        self._pid = 0
        self._session_path = ""

    async def follow(self, sql: str, types: Sequence[int], path: str | None = None) -> Found:
        """What the statement reads when names are found by that search path, or by the session's
        own; Refused where the server does not say."""
        await self._use_path(path)
        parameters = await self._parameter_types(sql, types)
        probe = await self._probe(", ".join(parameters), sql)
        await self._walk([_Body("pg_proc", probe)])
        prints = await prints_of(self._connection, self._relations, self._functions)
        relations = await self._look_at_relations()
        await self._look_at_built_in()
        tables = await self._look_at_tables({r for each in relations.values() for r in each.roots})
        await self._set_path("")
        (printed,) = await self._one("select pg_catalog.pg_get_function_sqlbody(%s)", probe)
        (named,) = await self._one(
            "select array(select format_type(t, null) from unnest(proargtypes::oid[])"
            " with ordinality a (t, n) order by n) from pg_catalog.pg_proc where oid = %s",
            probe,
        )
        return Found(
            self._uses,
            relations,
            tables,
            tuple(self._widened),
            tuple(self._notes),
            printed or "",
            tuple(named),
            prints,
        )

    # ---- the statement

    async def _use_path(self, path: str | None) -> None:
        if path is not None:
            await self._set_path(path)
        self._pid, self._session_path = await self._one(
            "select pg_catalog.pg_backend_pid(), pg_catalog.current_setting('search_path')"
        )

    async def _set_path(self, path: str) -> None:
        await self._ask("select pg_catalog.set_config('search_path', %s, true)", path)

    async def _parameter_types(self, sql: str, types: Sequence[int]) -> list[str]:
        """The types of the parameters: those given, and those the server infers."""
        if not types and "$" not in sql:
            return []
        known = dict(
            await self._ask(
                "select t::bigint, format_type(t, null) from unnest(%s::oid[]) t",
                sorted(set(types) - {0}),
            )
        )
        listed = ", ".join(known.get(oid, "unknown") for oid in types)
        name = f"headwater_probe_{self._pid}"
        await self._raw(f"prepare {name} {f'({listed})' if listed else ''} as {sql}")
        (found,) = await self._one(
            "select parameter_types::text[] from pg_catalog.pg_prepared_statements where name = %s",
            name,
        )
        await self._raw(f"deallocate {name}")
        return list(found)

    async def _probe(self, arguments: str, body: str) -> int:
        """A function with that body; its oid."""
        self._probes += 1
        name = f"headwater_probe_{self._pid}_{self._probes}"
        await self._raw(
            f"create function headwater.{name}({arguments}) returns void language sql"
            f" begin atomic {body}\n; end"
        )
        (oid,) = await self._one(
            "select oid::bigint from pg_catalog.pg_proc"
            " where proname = %s and pronamespace = 'headwater'::regnamespace",
            name,
        )
        return int(oid)

    # ---- from body to body

    async def _walk(self, bodies: list[_Body]) -> None:
        while bodies:
            new = [body for body in bodies if (body.kind, body.oid, body.path) not in self._seen]
            self._seen.update((body.kind, body.oid, body.path) for body in new)
            bodies = await self._bodies_behind(new)

    async def _bodies_behind(self, bodies: list[_Body]) -> list[_Body]:
        if not bodies:
            return []
        found = await self._ask(
            _REFERENCES, [body.kind for body in bodies], [body.oid for body in bodies]
        )
        behind: list[_Body] = []
        for number, tree, classes, oids, columns in found:
            body, references = bodies[number - 1], list(zip(classes, oids, columns, strict=True))
            relations = self._use_relations(body, tree, references)
            functions = {oid for class_, oid, _ in references if class_ == "pg_proc"} - {body.oid}
            behind += await self._behind_relations(body, relations)
            behind += await self._behind_functions(body, functions)
        return behind

    def _use_relations(
        self, body: _Body, tree: str, references: list[tuple[str, int, int]]
    ) -> set[int]:
        """Note which relations the body uses, and how; which they are."""
        whole = _WHOLE_ROW.search(tree) is not None
        used = [(oid, column) for class_, oid, column in references if class_ == "pg_class"]
        # Objects of the server's own are not in pg_depend, but everything is in the tree.
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
        self._built_in.update(map(int, _FUNCTION.findall(tree)))
        if _WRITES.search(tree):
            self._widened["it writes, or calls what writes"] = None
        if "{SQLVALUEFUNCTION" in tree:
            self._notes[_passing("current_date or the like")] = None
        return {oid for oid, _ in used}

    async def _behind_relations(self, body: _Body, relations: set[int]) -> list[_Body]:
        """The rules of views, and the policies of tables under row-level security."""
        self._relations |= relations
        found = await self._ask(_RULES_AND_POLICIES, list(relations))
        return [
            _Body(
                kind,
                oid,
                (*body.through, label),
                body.path,
                about if kind == "pg_policy" else 0,
            )
            for kind, oid, label, about in found
            if about != body.about or kind == "pg_rewrite"
        ]

    async def _behind_functions(self, body: _Body, functions: set[int]) -> list[_Body]:
        users = sorted(oid for oid in functions if oid >= FIRST_OF_USERS)
        self._functions.update(users)
        behind = []
        for oid, label, language, volatile, aggregate, text, arguments, path, moved in (
            await self._ask(_FUNCTIONS, users) if users else ()
        ):
            through = (*body.through, f"{label}()")
            within = body.path if path is None else path
            if (oid, within) in self._called:
                continue  # also one that calls itself
            self._called.add((oid, within))
            if language == "sql" and text is not None:
                found = None if moved else await self._probe_text(arguments, text, within)
                if found is None:
                    self._widened[f"the body of {label}() cannot be analysed"] = None
                else:
                    behind.append(_Body("pg_proc", found, through, within))
            elif language != "sql" and volatile != "i" and not aggregate:
                reason = f"{label}() is written in {language}: it may read anything"
                self._widened[reason] = None
            behind.append(_Body("pg_proc", oid, through, within))
        return behind

    async def _probe_text(self, arguments: str, text: str, path: str | None) -> int | None:
        """The body of a function that is kept as text, as the body of one that is parsed."""
        await self._ask("savepoint headwater_probe")
        try:
            if path is not None:
                await self._set_path(path)
            oid = await self._probe(arguments, text)
        except Refused:
            await self._ask("rollback to headwater_probe")
            return None
        await self._set_path(self._session_path)
        return oid

    # ---- what was found

    async def _look_at_relations(self) -> dict[int, Relation]:
        found = await self._ask(_RELATIONS, sorted(self._relations))
        return {
            oid: Relation(
                oid,
                schema,
                name,
                kind,
                persistence == "t",
                {int(number): column for number, column in (columns or {}).items()},
                frozenset(generated),
                frozenset(virtual),
                tuple(roots),
                captured,
            )
            for (
                oid,
                schema,
                name,
                kind,
                persistence,
                columns,
                generated,
                virtual,
                roots,
                captured,
            ) in found
        }

    async def _look_at_built_in(self) -> None:
        built_in = sorted(oid for oid in self._built_in if oid < FIRST_OF_USERS)
        for (name,) in await self._ask(
            "select distinct proname::text from pg_catalog.pg_proc where oid = any(%s::oid[])"
            " order by 1",
            built_in,
        ):
            if _OPAQUE.fullmatch(name):
                self._widened[f"{name}() may read anything"] = None
            elif _PASSING.fullmatch(name):
                self._notes[_passing(f"{name}()")] = None

    async def _look_at_tables(self, roots: Iterable[int]) -> dict[int, Table]:
        found = await self._ask(
            "select t::bigint, headwater.shape_id(t), headwater.describe(t)"
            " from unnest(%s::oid[]) t",
            sorted(roots),
        )
        return {oid: table_of(oid, shape, described) for oid, shape, described in found}

    # ---- asking

    async def _ask(self, question: str, *values: Any) -> list[tuple[Any, ...]]:
        cursor = await self._connection.execute(question.encode(), values)
        return await cursor.fetchall() if cursor.description else []

    async def _one(self, question: str, *values: Any) -> tuple[Any, ...]:
        (row,) = await self._ask(question, *values)
        return row

    async def _raw(self, statement: str) -> None:
        """Send a statement that holds a text of somebody else's: as one statement, whatever is in
        it. With results in binary, the driver uses the protocol that takes only one."""
        try:
            await AsyncRawCursor(self._connection).execute(statement.encode(), (), binary=True)
        except errors.LockNotAvailable as error:
            raise Unavailable(
                f"the database is busy: {error}", hint="It is tried again by itself."
            ) from error
        except psycopg.Error as error:
            if is_lost(error):
                raise
            raise Refused(error.diag.message_primary or str(error)) from error
        except UnicodeError as error:
            raise Refused(str(error)) from error


_WHOLE_ROW = re.compile(r":varattno 0 ")
_RELATION = re.compile(r":relid (\d+)")
_FUNCTION = re.compile(r":(?:funcid|opfuncid|aggfnoid|winfnoid) (\d+)")
_WRITES = re.compile(r":commandType [2-7]|:hasModifyingCTE true")


def _passing(what: str) -> str:
    return f"{what} gives another value each time, which no change announces"


def table_of(oid: int, shape: int, described: Mapping[str, Any]) -> Table:
    """A table out of what `headwater.describe` says of it."""
    columns = msgspec.convert(described["columns"], tuple[Column, ...])
    return Table(
        shape, described["schema"], described["name"], columns, tuple(described["key"]), oid
    )


async def path_of(connection: Connection, role: str) -> str:
    """The search path as that role sees it: `"$user"` is a schema of its own, and what it may not
    use does not count. Refused if we cannot become that role."""
    await connection.execute("savepoint headwater_role")
    try:
        await connection.execute("select pg_catalog.set_config('role', %s, true)", (role,))
        cursor = await connection.execute(
            "select array_to_string(array(select quote_ident(name)"
            " from unnest(current_schemas(false)) with ordinality s (name, n) order by n), ', ')"
        )
        (path,) = await cursor.fetchone() or ("",)
    except psycopg.Error as error:
        if is_lost(error):
            raise
        await connection.execute("rollback to headwater_role")
        raise Refused(error.diag.message_primary or str(error)) from error
    await connection.execute("rollback to headwater_role")
    return str(path)


async def prints_of(
    connection: Connection, relations: Iterable[int], functions: Iterable[int]
) -> Prints:
    """What these objects look like now."""
    relations, functions = list(relations), list(functions)
    prints: Prints = {("relation", oid): None for oid in relations}
    prints.update({("function", oid): None for oid in functions})
    cursor = await connection.execute(_PRINTS, (relations, functions))
    prints.update({(kind, oid): text for kind, oid, text in await cursor.fetchall()})
    return prints


# A rule refers to its own view, which leads nowhere new. Operators stand for their functions.
_REFERENCES = """
    select b.n,
           coalesce(concat(
             (select concat(p.prosqlbody::text, p.proargdefaults::text) from pg_catalog.pg_proc p
              where b.kind = 'pg_proc' and p.oid = b.id),
             (select r.ev_action::text from pg_catalog.pg_rewrite r
              where b.kind = 'pg_rewrite' and r.oid = b.id),
             (select concat(p.polqual::text, p.polwithcheck::text) from pg_catalog.pg_policy p
              where b.kind = 'pg_policy' and p.oid = b.id)), ''),
           coalesce(array_agg(d.class) filter (where d.class is not null), '{}'),
           coalesce(array_agg(d.id) filter (where d.class is not null), '{}'),
           coalesce(array_agg(d.part) filter (where d.class is not null), '{}')
    from unnest(%s::text[], %s::oid[]) with ordinality b (kind, id, n)
    left join lateral (
      select c.relname::text as class, d.refobjid::bigint as id, d.refobjsubid as part
      from pg_catalog.pg_depend d join pg_catalog.pg_class c on c.oid = d.refclassid
      where d.classid = ('pg_catalog.' || b.kind)::regclass and d.objid = b.id
        and d.refclassid in ('pg_catalog.pg_class'::regclass, 'pg_catalog.pg_proc'::regclass)
      union all
      select 'pg_proc', o.oprcode::oid::bigint, 0
      from pg_catalog.pg_depend d join pg_catalog.pg_operator o on o.oid = d.refobjid
      where d.classid = ('pg_catalog.' || b.kind)::regclass and d.objid = b.id
        and d.refclassid = 'pg_catalog.pg_operator'::regclass
    ) d on true
    group by b.n, b.kind, b.id
    order by b.n
"""

_RULES_AND_POLICIES = f"""
    with used as (
      select c.*,
             case n.nspname when 'public' then '' else n.nspname || '.' end || c.relname as label
      from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
      where c.oid = any(%s::oid[]) and c.oid >= {FIRST_OF_USERS}
    )
    select 'pg_rewrite', r.oid::bigint, u.label, u.oid::bigint
    from used u join pg_catalog.pg_rewrite r on r.ev_class = u.oid and r.ev_type = '1'
    where u.relkind = 'v'
    union all
    select 'pg_policy', p.oid::bigint, format('policy %%I of %%s', p.polname, u.label),
           u.oid::bigint
    from used u join pg_catalog.pg_policy p on p.polrelid = u.oid
    where u.relrowsecurity
"""

# `moved`: the function runs as its owner, who has a schema of that name first in the search path.
_FUNCTIONS = """
    select p.oid::bigint,
           case n.nspname when 'public' then '' else n.nspname || '.' end || p.proname,
           l.lanname::text, p.provolatile::text, p.prokind = 'a',
           case when l.lanname = 'sql' and p.prosqlbody is null then p.prosrc end,
           (select coalesce(string_agg(
              concat_ws(' ', quote_ident(nullif(p.proargnames[a.n], '')),
                        format_type(a.type, null)), ', ' order by a.n), '')
            from unnest(coalesce(p.proallargtypes, p.proargtypes::oid[]))
              with ordinality a (type, n)
            where coalesce(p.proargmodes[a.n], 'i') in ('i', 'b', 'v')),
           path.value,
           p.prosecdef and path.value is null and exists (
             select from pg_catalog.pg_namespace s
             where s.nspname = pg_catalog.pg_get_userbyid(p.proowner))
    from pg_catalog.pg_proc p
    join pg_catalog.pg_namespace n on n.oid = p.pronamespace
    join pg_catalog.pg_language l on l.oid = p.prolang
    left join lateral (
      select substr(c, 13) as value from unnest(p.proconfig) c where c like 'search\\_path=%%'
    ) path on true
    where p.oid = any(%s::oid[])
"""

# Changes are logged under the enabled table that a relation is, or is below of. What is below it
# may be logged under yet another, where somebody inherits from two.
_LOGGED = """
    lateral (
      with recursive up (oid) as (
        select c.oid
        union
        select i.inhparent from up join pg_catalog.pg_inherits i on i.inhrelid = up.oid
      ),
      above as (
        select t.relid from headwater.tables t where t.enabled and t.relid in (select oid from up)
      )
      select exists (select from above) as captured,
             array(
               select relid::bigint from above
               union
               select k.root::bigint
               from headwater.members_of(c.oid) m
               join headwater.captures k on k.member = m
               join headwater.tables t on t.relid = k.root and t.enabled
               order by 1) as roots
    ) logged
"""

_RELATIONS = f"""
    select c.oid::bigint, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text,
           (select jsonb_object_agg(a.attnum, a.attname) from pg_catalog.pg_attribute a
            where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped),
           array(select a.attnum from pg_catalog.pg_attribute a
                 where a.attrelid = c.oid and a.attnum > 0 and a.attgenerated <> ''),
           array(select a.attnum from pg_catalog.pg_attribute a
                 where a.attrelid = c.oid and a.attnum > 0 and a.attgenerated = 'v'),
           logged.roots, logged.captured
    from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    cross join {_LOGGED}
    where c.oid = any(%s::oid[])
"""

# Names count as well: with a new object of the same name, a statement may mean another one.
_PRINTS = f"""
    select 'relation', c.oid::bigint, md5(concat_ws(' ',
      c.xmin, c.relnamespace, c.relname, c.relkind, c.relrowsecurity, logged.roots, logged.captured,
      (select string_agg(
         concat_ws('/', a.attnum, a.attname, a.atttypid, a.attisdropped, a.attacl), ' '
         order by a.attnum)
       from pg_catalog.pg_attribute a where a.attrelid = c.oid and a.attnum > 0),
      (select string_agg(concat_ws('/', r.oid, r.xmin), ' ' order by r.oid)
       from pg_catalog.pg_rewrite r where r.ev_class = c.oid),
      (select string_agg(concat_ws('/', p.oid, p.xmin), ' ' order by p.oid)
       from pg_catalog.pg_policy p where p.polrelid = c.oid),
      (select string_agg(s.oid::text, ' ' order by s.oid) from pg_catalog.pg_class s
       where s.relname = c.relname and s.relpersistence <> 't')))
    from pg_catalog.pg_class c cross join {_LOGGED}
    where c.oid = any(%s::oid[])
    union all
    select 'function', p.oid::bigint, md5(concat_ws(' ', p.xmin,
      (select string_agg(s.oid::text, ' ' order by s.oid) from pg_catalog.pg_proc s
       where s.proname = p.proname)))
    from pg_catalog.pg_proc p
    where p.oid = any(%s::oid[])
"""
