"""What a database role may read: decided before a subscription begins, and checked again later.

A live query over a table with row-level security is read as the user's role (`scope_of`). A feed or
a topic sends whole rows to all subscribers, so the role must be allowed to read all rows
(`feed_rights`).
"""

from __future__ import annotations

from collections.abc import Callable

from headwater.errors import Forbidden
from headwater.hub.reading.snapshot_queries import Scope
from headwater.hub.reading.tables import KnownTable, Tables
from headwater.hub.subscriptions.subscriber import Access
from headwater.live.filters.filter import conditions
from headwater.live.query import BoundQuery


async def scope_of(
    tables: Tables, known: KnownTable, query: BoundQuery, access: Access
) -> Scope | None:
    """The role and claims that a query is read with; None for Headwater's own role. Forbidden if
    the role may not read the rows."""
    label = known.table.label
    if access.role is None:
        if known.secured:
            raise Forbidden(
                f"{label} is guarded by row-level security, and this session has no database role",
                hint="Give it one: the setting [auth] role, or the role claim of its token.",
            )
        return None
    rights = await _rights(tables, known.table.oid, known.secured, access.role)
    # Under a policy, rows are read as the role itself, with all columns.
    may_read = rights.table or (not known.secured and rights.columns.issuperset(_used(query)))
    if not may_read:
        raise Forbidden(
            f"role {access.role} may not read {label}",
            hint=f'grant select on {label} to "{access.role}"',
        )
    if not known.secured:
        # Planning a statement executes functions in expressions of indexes and statistics, which
        # are the table owner's. Users of one role share the view, as there are no policies.
        return Scope(access.role, "", checked=False) if rights.is_apart else None
    if not rights.bypasses and not rights.is_safe:
        raise _unsafe(label, rights.owner)
    return Scope(access.role, access.claims, not rights.bypasses)


def _unsafe(label: str, owner: str) -> Forbidden:
    return Forbidden(
        f"{label} is guarded by row-level security, and the code of its owner {owner} would get"
        " Headwater's own rights: question_url is not set",
        hint="Make a role that owns nothing and may read nothing, grant it the users' roles, and"
        " set question_url; docs/howto/authorisation.md shows how.",
    )


async def check_own_reading(tables: Tables, known: KnownTable) -> None:
    """Forbidden if Headwater would execute policies when it reads the table: that is code of the
    table's owner, and it would run with Headwater's rights."""
    if known.secured and (await tables.ask(_POLICIES_APPLY, (known.table.oid,))) == [(True,)]:
        raise Forbidden(
            f"{known.table.label} is guarded by row-level security, which applies to Headwater's"
            " own role too",
            hint="Use a live query; or let row-level security not apply to Headwater's role"
            " (bypassrls).",
        )


def _used(query: BoundQuery) -> set[str]:
    seen = query.columns or tuple(column.name for column in query.table.columns)
    filtered = (condition.column for condition in conditions(query.where))
    return {*seen, *filtered, *(by.column for by in query.order.by)}


class _Rights:
    __slots__ = ("bypasses", "columns", "is_apart", "is_safe", "owner", "table")

    def __init__(
        self,
        table: bool,
        columns: list[str],
        bypasses: bool,
        owner: str,
        *,
        is_safe: bool,
        is_apart: bool,
    ) -> None:
        self.table = table
        self.columns = frozenset(columns)
        self.bypasses = bypasses
        self.owner = owner
        self.is_safe = is_safe
        """Whether code of the table's owner may run over the connections that read as a role."""
        self.is_apart = is_apart
        """Whether the table is read as the role itself although it has no policies: its owner is
        another role, and there is a question role."""


async def _rights(tables: Tables, oid: int, secured: bool, role: str) -> _Rights:
    asking = await tables.question_role()
    rows = await tables.ask(_RIGHTS, {"oid": oid, "role": role, "asking": asking})
    if not rows:
        raise Forbidden(
            f"there is no database role {role}",
            hint="Create it, or correct the setting [auth] role or the token's role claim.",
        )
    ((whole, columns, bypasses, may_become, owner, has_safe_owner),) = rows
    if not may_become and secured:
        if asking is not None:
            raise Forbidden(
                f"the question role {asking} may not act as {role}",
                hint=f'grant "{role}" to "{asking}"',
            )
        raise Forbidden(
            f"question_url is not set, and Headwater's own database role may not act as {role}",
            hint=f'Make a question role, grant "{role}" to it and set question_url;'
            " docs/howto/authorisation.md shows how.",
        )
    return _Rights(
        whole,
        columns,
        bypasses,
        owner,
        is_safe=asking is not None or has_safe_owner,
        is_apart=asking is not None and not has_safe_owner and may_become and whole,
    )


async def feed_rights(
    tables: Tables,
    oid: int,
    label: str,
    secured: bool,
    access: Access,
    no: Callable[[str], Forbidden] | None = None,
) -> None:
    """Forbidden unless the role may read all rows of the table: a feed sends all of them. `no`
    makes the error for something else than a feed."""
    no = no or _no_feed
    role = access.role
    if role is None:
        if secured and not access.whole:
            raise no(label)
        return
    rights = await _rights(tables, oid, secured, role)
    if not rights.table:
        raise Forbidden(
            f"role {role} may not read {label}", hint=f'grant select on {label} to "{role}"'
        )
    if secured and not rights.bypasses:
        raise no(label)


def _no_feed(label: str) -> Forbidden:
    return Forbidden(
        f"{label} is guarded by row-level security, and a change feed would show every row",
        hint="Use a live query, or a database role that row-level security does not apply to.",
    )


_RIGHTS = """
    select has_schema_privilege(r.oid, c.relnamespace, 'usage')
             and has_table_privilege(r.oid, c.oid, 'select'),
           case when has_schema_privilege(r.oid, c.relnamespace, 'usage') then array(
             select a.attname::text from pg_attribute a
             where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
               and has_column_privilege(r.oid, c.oid, a.attnum, 'select'))
           else array[]::text[] end,
           r.rolsuper or r.rolbypassrls
             or (pg_has_role(r.oid, c.relowner, 'usage') and not c.relforcerowsecurity),
           pg_has_role(
             coalesce(%(asking)s::name, session_user), r.oid,
             case when current_setting('server_version_num')::int >= 160000
                  then 'set' else 'member' end),
           o.rolname::text,
           o.rolsuper or (not me.rolsuper and pg_has_role(me.oid, o.oid, 'usage'))
    from pg_class c
    cross join pg_roles r
    join pg_roles o on o.oid = c.relowner
    join pg_roles me on me.rolname = session_user
    where c.oid = %(oid)s and r.rolname = %(role)s
"""
# An owner is safe if its code gains nothing: it is a superuser, or we have its rights anyway.

_POLICIES_APPLY = "select row_security_active(%s::oid)"
