"""Fingerprints of the objects that an analysis depends on, to notice later what has changed.

A *print* is a short text of one object: its `xmin`, the `xmin` of the catalog rows that belong to
it, and the other objects of its name, because a statement may mean a new one. The same text means
that nothing has changed: an altered or recreated object has another `xmin`.

If the objects are not known one by one, there is one print of all: the memberships of roles, if a
statement asks for them; and the whole catalog, if it calls a function whose code we cannot analyse.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from headwater.database import Connection, print_path
from headwater.queries.analysis.search_path import NameLookup, resolve

ObjectKind: TypeAlias = Literal[
    "relation", "function", "operator", "type", "collation",
    "role", "path", "memberships", "searches", "catalog",
]  # fmt: skip
Object: TypeAlias = tuple[ObjectKind, int | str | NameLookup]
"""The kind of an object, and its oid, the name of a role, or the session of a search path; 0 if
there is only one object of the kind."""
Prints: TypeAlias = dict[Object, str | None]
"""The print of each object; None for one that does not exist."""

FIRST_OF_USERS = 16_384
"""Objects with a lower oid came with the server."""

ALL_MEMBERSHIPS: Object = ("memberships", 0)
ALL_SEARCHES: Object = ("searches", 0)
WHOLE_CATALOG: Object = ("catalog", 0)


async def prints_of(connection: Connection, objects: Iterable[Object]) -> Prints:
    """The present prints of these objects."""
    prints: Prints = dict.fromkeys(objects)
    by_kind: dict[ObjectKind, list[Any]] = {}
    for kind, which in prints:
        by_kind.setdefault(kind, []).append(which)
    for session in by_kind.pop("path", ()):
        prints["path", session] = path_print(await resolve(connection, session))
    asked = [kind for kind in _QUESTIONS if kind in by_kind]
    if asked:
        question = " union all ".join(
            f"select '{kind}', * from ({_QUESTIONS[kind]}) of_kind (which, print)" for kind in asked
        )
        values = [by_kind[kind] for kind in asked if "%s" in _QUESTIONS[kind]]
        cursor = await connection.execute(question.encode(), values or None)
        for kind, which, text in await cursor.fetchall():
            prints[kind, which if kind == "role" else int(which)] = text
    return prints


def path_print(schemas: tuple[str, ...] | None) -> str | None:
    """The print of a search path: the schemas that are searched."""
    return None if schemas is None else print_path(schemas)


# Changes of a relation are logged under the enabled table that it is, or that it inherits from.
# Relations below it may be logged under another table, if one inherits from two.
LOGGED = """
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
             exists (select from headwater.source_tables m
                     join headwater.sources s on s.name = m.source and s.feed_only
                     where m.relid = c.oid) as feed_only,
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
    select c.oid::text, md5(concat_ws(' ',
      c.xmin, n.xmin, c.relname, c.relkind, c.relrowsecurity, logged.roots, logged.captured,
      logged.feed_only,
      (select string_agg(
         concat_ws('/', a.attnum, a.attname, a.atttypid, a.attisdropped, a.attacl), ' '
         order by a.attnum)
       from pg_catalog.pg_attribute a where a.attrelid = c.oid and a.attnum > 0),
      (select string_agg(concat_ws('/', d.oid, d.xmin), ' ' order by d.oid)
       from pg_catalog.pg_attrdef d join pg_catalog.pg_attribute a
         on a.attrelid = d.adrelid and a.attnum = d.adnum and a.attgenerated <> ''
       where d.adrelid = c.oid),
      (select string_agg(concat_ws('/', r.oid, r.xmin), ' ' order by r.oid)
       from pg_catalog.pg_rewrite r where r.ev_class = c.oid),
      (select string_agg(concat_ws('/', p.oid, p.xmin), ' ' order by p.oid)
       from pg_catalog.pg_policy p where p.polrelid = c.oid),
      (select string_agg(s.oid::text, ' ' order by s.oid) from pg_catalog.pg_class s
       where s.relname = c.relname and s.relpersistence <> 't')))
    from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    cross join {LOGGED}
    where c.oid = any(%s::oid[])
"""

_FUNCTIONS = f"""
    select p.oid::text, md5(concat_ws(' ', p.xmin, n.xmin,
      (select string_agg(s.oid::text, ' ' order by s.oid) from pg_catalog.pg_proc s
       where s.proname = p.proname and s.oid >= {FIRST_OF_USERS})))
    from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
    where p.oid = any(%s::oid[])
"""

_OPERATORS = f"""
    select o.oid::text, md5(concat_ws(' ', o.xmin, n.xmin,
      (select p.xmin from pg_catalog.pg_proc p where p.oid = o.oprcode),
      (select string_agg(s.oid::text, ' ' order by s.oid) from pg_catalog.pg_operator s
       where s.oprname = o.oprname and s.oid >= {FIRST_OF_USERS})))
    from pg_catalog.pg_operator o join pg_catalog.pg_namespace n on n.oid = o.oprnamespace
    where o.oid = any(%s::oid[])
"""

# With its labels, attributes and conditions, and what the server does with its values by itself:
# casts, comparisons.
_TYPES = f"""
    select t.oid::text, md5(concat_ws(' ', t.xmin, n.xmin,
      (select string_agg(concat_ws('/', e.oid, e.xmin), ' ' order by e.oid)
       from pg_catalog.pg_enum e where e.enumtypid = t.oid),
      (select string_agg(concat_ws('/', a.attnum, a.attname, a.atttypid, a.attisdropped), ' '
                         order by a.attnum)
       from pg_catalog.pg_attribute a where a.attrelid = t.typrelid and a.attnum > 0),
      (select string_agg(concat_ws('/', d.oid, d.xmin), ' ' order by d.oid)
       from pg_catalog.pg_constraint d where d.contypid = t.oid and d.contypid <> 0),
      (select string_agg(concat_ws('/', c.oid, c.xmin, p.xmin), ' ' order by c.oid)
       from pg_catalog.pg_cast c left join pg_catalog.pg_proc p on p.oid = c.castfunc
       where t.oid in (c.castsource, c.casttarget) and c.oid >= {FIRST_OF_USERS}),
      (select string_agg(concat_ws('/', o.oid, o.xmin, s.oid, s.xmin, p.xmin), ' '
                         order by o.oid, s.oid)
       from pg_catalog.pg_opclass o
       left join pg_catalog.pg_amproc s on s.amprocfamily = o.opcfamily
       left join pg_catalog.pg_proc p on p.oid = s.amproc
       where o.opcintype = t.oid and o.oid >= {FIRST_OF_USERS}),
      (select string_agg(s.oid::text, ' ' order by s.oid)
       from pg_catalog.pg_type s join pg_catalog.pg_namespace sn on sn.oid = s.typnamespace
       where s.typname = t.typname and s.oid >= {FIRST_OF_USERS}
         and sn.nspname !~ '^pg_(toast_)?temp')))
    from pg_catalog.pg_type t join pg_catalog.pg_namespace n on n.oid = t.typnamespace
    where t.oid = any(%s::oid[])
"""

_COLLATIONS = """
    select c.oid::text, md5(concat_ws(' ', c.xmin, n.xmin,
      (select string_agg(s.oid::text, ' ' order by s.oid) from pg_catalog.pg_collation s
       where s.collname = c.collname)))
    from pg_catalog.pg_collation c join pg_catalog.pg_namespace n on n.oid = c.collnamespace
    where c.oid = any(%s::oid[])
"""

# A role and all roles that it is a member of.
_ROLES = """
    with recursive held (name, oid) as (
      select r.rolname::text, r.oid from pg_catalog.pg_roles r where r.rolname = any(%s::text[])
      union
      select h.name, m.roleid
      from held h join pg_catalog.pg_auth_members m on m.member = h.oid
    )
    select h.name, md5(string_agg(
      concat_ws('/', r.oid, r.rolname, r.rolsuper, r.rolinherit, r.rolbypassrls,
        (select string_agg(to_jsonb(m)::text, ' ' order by m.roleid, m.grantor)
         from pg_catalog.pg_auth_members m where m.member = r.oid)),
      ' ' order by r.oid))
    from held h join pg_catalog.pg_roles r on r.oid = h.oid
    group by h.name
"""

_MEMBERSHIPS = """
    select '0', md5(concat_ws(' ',
      (select string_agg(to_jsonb(m)::text, ' ' order by m.roleid, m.member, m.grantor)
       from pg_catalog.pg_auth_members m),
      (select string_agg(concat_ws('/', r.oid, r.rolname, r.rolsuper, r.rolbypassrls), ' '
                         order by r.oid)
       from pg_catalog.pg_roles r)))
"""

_SEARCHES = """
    select '0', md5(concat_ws(' ',
      (select string_agg(concat_ws('/', c.oid, c.xmin), ' ' order by c.oid)
       from pg_catalog.pg_ts_config c),
      (select string_agg(concat_ws('/', m.mapcfg, m.xmin), ' ' order by m.mapcfg, m.ctid)
       from pg_catalog.pg_ts_config_map m),
      (select string_agg(concat_ws('/', d.oid, d.xmin), ' ' order by d.oid)
       from pg_catalog.pg_ts_dict d)))
"""


def _all_of(catalog: str, row: str = "o.oid", condition: str = "") -> str:
    """One number for all rows of a catalog that users have made."""
    return (
        f"(select sum(hashtextextended(concat_ws('/', {row}, o.xmin), 0))"
        f" from pg_catalog.{catalog} o where {condition or f'o.oid >= {FIRST_OF_USERS}'})"
    )


# Without our own schema, in which objects are often made and dropped, and temporary tables.
_CATALOG = f"""
    with ours as materialized (
      select n.oid from pg_catalog.pg_namespace n
      where n.nspname ~ '^(headwater$|pg_toast|pg_temp)'
    ),
    relations as materialized (
      select c.oid, c.xmin from pg_catalog.pg_class c
      where c.oid >= {FIRST_OF_USERS} and c.relkind in ('r', 'v', 'm', 'f', 'p', 'c')
        and c.relpersistence <> 't' and c.relnamespace not in (select oid from ours)
    )
    select '0', md5(concat_ws(' ',
      (select sum(hashtextextended(concat_ws('/', c.oid, c.xmin), 0)) from relations c),
      (select sum(hashtextextended(concat_ws('/', a.attrelid, a.attnum, a.xmin), 0))
       from pg_catalog.pg_attribute a join relations c on c.oid = a.attrelid),
      {_all_of("pg_proc", condition="o.pronamespace not in (select oid from ours)")},
      {_all_of("pg_type", condition="o.typtype in ('d', 'e', 'r')")},
      {_all_of("pg_constraint", condition="o.contypid <> 0")},
      {_all_of("pg_attrdef", condition="o.adrelid in (select oid from relations)")},
      {_all_of("pg_enum")}, {_all_of("pg_policy")}, {_all_of("pg_operator")}, {_all_of("pg_cast")},
      {_all_of("pg_rewrite")}, {_all_of("pg_collation")}, {_all_of("pg_opclass")},
      {_all_of("pg_namespace", condition="o.nspname !~ '^pg_(toast|temp)'")}))
"""

_QUESTIONS: dict[ObjectKind, str] = {
    "relation": _RELATIONS,
    "function": _FUNCTIONS,
    "operator": _OPERATORS,
    "type": _TYPES,
    "collation": _COLLATIONS,
    "role": _ROLES,
    "memberships": _MEMBERSHIPS,
    "searches": _SEARCHES,
    "catalog": _CATALOG,
}
