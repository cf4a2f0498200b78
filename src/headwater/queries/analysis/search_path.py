"""How a session finds names: its search path, and the role it acts as.

The setting alone is not enough. `"$user"` stands for a schema with the name of the current role,
and schemas that the role may not use do not count. A function that runs as its owner, or has its
own search path, finds names in another way than its caller, and so does everything that it calls.
So a setting is always resolved together with a role.
"""

from __future__ import annotations

import msgspec

from headwater.database import PINNED_PATH, Connection, application_path, split_path


class NameLookup(msgspec.Struct, frozen=True):
    """The setting `search_path` as a text, and the current role."""

    path: str
    user: str


async def session_of(connection: Connection) -> NameLookup:
    """How that connection finds names now. If it has our own path, how the application's sessions
    do."""
    cursor = await connection.execute(_SESSION)
    row = await cursor.fetchone()
    assert row is not None
    path, user = row
    return NameLookup(application_path(path, user), user)


async def resolve(connection: Connection, session: NameLookup) -> tuple[str, ...] | None:
    """The schemas in which it finds names, in order. None if there is no such role, or if the
    setting cannot be parsed."""
    names = split_path(session.path)
    if names is None:
        return None
    cursor = await connection.execute(_RESOLVE, (list(names), session.user))
    row = await cursor.fetchone()
    return None if row is None else tuple(row[0])


_PATH = f"""
    case when pg_catalog.current_setting('search_path') operator(pg_catalog.=) '{PINNED_PATH}'
    then (select s.reset_val from pg_catalog.pg_settings s
          where s.name operator(pg_catalog.=) 'search_path')
    else pg_catalog.current_setting('search_path') end
"""

_SESSION = f"select {_PATH}, current_user::pg_catalog.text"

# There is no schema with the name `pg_temp`, and these sessions have no temporary tables.
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
