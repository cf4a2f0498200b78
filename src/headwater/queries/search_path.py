"""How a session finds names: its search path, and the role it acts as.

The setting alone does not say it. `"$user"` stands for a schema with the name of the current role,
and a schema that the role may not use does not count. A function that runs as its owner, or has a
path of its own, finds names in another way than its caller, and so does everything it calls. So a
setting is always resolved together with a role.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from headwater.database import Connection


class Session(msgspec.Struct, frozen=True):
    """The setting `search_path` as a text, and the current role."""

    path: str
    user: str


async def session_of(connection: Connection) -> Session:
    """How that connection finds names now."""
    cursor = await connection.execute(
        "select pg_catalog.current_setting('search_path'), current_user::text"
    )
    row = await cursor.fetchone()
    assert row is not None
    return Session(*row)


async def resolve(connection: Connection, session: Session) -> tuple[str, ...] | None:
    """The schemas in which it finds names, in their order. None where there is no such role, or
    where the setting is not understood."""
    names = split(session.path)
    if names is None:
        return None
    cursor = await connection.execute(_RESOLVE, (list(names), session.user))
    row = await cursor.fetchone()
    return None if row is None else tuple(row[0])


def printed(schemas: Iterable[str]) -> str:
    """The schemas as a value of the setting.

    >>> printed(["public", "Sales"])
    '"public", "Sales"'
    """
    return ", ".join('"' + name.replace('"', '""') + '"' for name in schemas)


def split(path: str) -> tuple[str, ...] | None:
    """The names in a value of the setting, as the server reads it; None if it would not.

    >>> split('"$user", Public,"a ""b, "'), split(""), split("a b"), split("a,")
    (('$user', 'public', 'a "b, '), (), None, None)
    """
    if not path.strip():
        return ()
    names, at = list[str](), 0
    while (match := _NAME.match(path, at)) is not None:
        quoted, plain, comma = match.groups()
        names.append(plain.lower() if quoted is None else quoted.replace('""', '"'))
        at = match.end()
        if not comma:
            return tuple(names)
    return None


_NAME = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([^\s",]+))\s*(,|\Z)')

# `pg_temp` is no schema of that name, and no session that we look at has temporary tables.
_RESOLVE = """
    select array(
      select n.nspname::text
      from unnest(%s::text[]) with ordinality named (name, place)
      join pg_catalog.pg_namespace n
        on n.nspname = case named.name when '$user' then r.rolname else named.name::name end
      where pg_catalog.has_schema_privilege(r.oid, n.oid, 'usage')
      order by named.place)
    from pg_catalog.pg_roles r where r.rolname = %s
"""
