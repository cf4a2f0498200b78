"""The queries of `catalog`. All run with only `pg_catalog` in the search path."""

from __future__ import annotations

from headwater.queries.analysis.fingerprints import FIRST_OF_USERS, LOGGED

# A rule also refers to its own view. Operators stand for their functions.
REFERENCES = """
    select b.n,
           coalesce(concat(
             (select concat(p.prosqlbody::text, p.proargdefaults::text) from pg_catalog.pg_proc p
              where b.kind = 'pg_proc' and p.oid = b.id),
             (select r.ev_action::text from pg_catalog.pg_rewrite r
              where b.kind = 'pg_rewrite' and r.oid = b.id),
             (select concat(p.polqual::text, p.polwithcheck::text) from pg_catalog.pg_policy p
              where b.kind = 'pg_policy' and p.oid = b.id),
             (select c.conbin::text from pg_catalog.pg_constraint c
              where b.kind = 'pg_constraint' and c.oid = b.id)), ''),
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

RULES_AND_POLICIES = f"""
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

# `made` are types whose values are made: only those are followed.
TYPE_PARTS = f"""
    with recursive parts (oid, made) as (
      select t.oid, t.oid = any(asked.made)
      from (select %s::oid[] as named, %s::oid[] as made) asked
      join pg_catalog.pg_type t on t.oid = any(asked.named)
      union
      select part.oid, p.made
      from parts p
      join pg_catalog.pg_type t on t.oid = p.oid
      cross join lateral (
        select t.typelem where t.typelem <> 0
        union all
        select t.typbasetype where t.typbasetype <> 0
        union all
        select a.atttypid from pg_catalog.pg_attribute a
        where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped
        union all
        select g.rngsubtype from pg_catalog.pg_range g where t.oid in (g.rngtypid, g.rngmultitypid)
      ) part (oid)
    )
    select p.oid::bigint, bool_or(p.made),
           array(select c.oid::bigint from pg_catalog.pg_constraint c
                 where c.contypid = p.oid and c.conbin is not null order by 1),
           format_type(p.oid, null),
           array(select c.castfunc::bigint from pg_catalog.pg_cast c
                 where c.castsource = p.oid and c.casttarget = 'json'::regtype
                   and c.castfunc >= {FIRST_OF_USERS}
                 union
                 select s.amproc::oid::bigint
                 from pg_catalog.pg_opclass o
                 join pg_catalog.pg_amproc s on s.amprocfamily = o.opcfamily
                 where o.opcintype = p.oid and s.amproc >= {FIRST_OF_USERS})
    from parts p
    group by p.oid
"""

FUNCTIONS = """
    select p.oid::bigint,
           case n.nspname when 'public' then '' else n.nspname || '.' end || p.proname,
           l.lanname::text, p.provolatile::text, p.prokind = 'a',
           case when l.lanname = 'sql' and p.prosqlbody is null then p.prosrc end,
           (select coalesce(string_agg(
              concat_ws(' ', quote_ident(nullif(p.proargnames[a.n], '')),
                        quote_ident(tn.nspname) || '.' || quote_ident(t.typname)),
              ', ' order by a.n), '')
            from unnest(coalesce(p.proallargtypes, p.proargtypes::oid[]))
              with ordinality a (type, n)
            join pg_catalog.pg_type t on t.oid = a.type
            join pg_catalog.pg_namespace tn on tn.oid = t.typnamespace
            where coalesce(p.proargmodes[a.n], 'i') in ('i', 'b', 'v')),
           (select substr(c, 13) from unnest(p.proconfig) c where c like 'search\\_path=%%'),
           (select min(c) from unnest(p.proconfig) c where split_part(c, '=', 1) in
             ('role', 'session_authorization', 'standard_conforming_strings', 'backslash_quote')),
           case when p.prosecdef then pg_catalog.pg_get_userbyid(p.proowner) end
    from pg_catalog.pg_proc p
    join pg_catalog.pg_namespace n on n.oid = p.pronamespace
    join pg_catalog.pg_language l on l.oid = p.prolang
    where p.oid = any(%s::oid[])
"""

RELATIONS = f"""
    select c.oid::bigint, n.nspname::text, c.relname::text, c.relkind::text, c.relpersistence::text,
           (select jsonb_object_agg(a.attnum, a.attname) from pg_catalog.pg_attribute a
            where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped),
           array(select a.attnum from pg_catalog.pg_attribute a
                 where a.attrelid = c.oid and a.attnum > 0 and a.attgenerated <> ''),
           array(select a.attnum from pg_catalog.pg_attribute a
                 join pg_catalog.pg_cast k
                   on k.castsource = a.atttypid and k.casttarget = 'json'::regtype
                 where a.attrelid = c.oid and a.attnum > 0 and k.oid >= {FIRST_OF_USERS}),
           logged.roots, logged.captured, logged.feed_only,
           case when c.relkind = 'v' then pg_catalog.pg_get_userbyid(c.relowner)::text end
    from pg_catalog.pg_class c
    join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    cross join {LOGGED}
    where c.oid = any(%s::oid[])
"""

# Domains of owners whose code is not to run with our rights, and whose conditions may be such code:
# they call more than immutable functions of a superuser. To read a constant of an array, a range or
# a composite type, the server evaluates the conditions of domains in it while it parses. `%s`: only
# those of which a column is made so; a text of theirs could name any.
CODE_IN_DOMAINS = """
    with recursive unsafe (oid) as (
      select d.oid
      from pg_catalog.pg_constraint c
      join pg_catalog.pg_type d on d.oid = c.contypid
      join pg_catalog.pg_roles o on o.oid = d.typowner
      join pg_catalog.pg_roles me on me.rolname = session_user
      where c.contypid <> 0 and c.conbin is not null
        and not (o.rolsuper or (not me.rolsuper and pg_has_role(me.oid, o.oid, 'usage')))
        and exists (
          select from regexp_matches(c.conbin::text, ':(?:funcid|opfuncid) (\\d+)', 'g') f
          join pg_catalog.pg_proc p on p.oid = f[1]::oid
          join pg_catalog.pg_roles made_by on made_by.oid = p.proowner
          where p.provolatile <> 'i' or not made_by.rolsuper)
    ),
    made (oid, domain, is_within) as (
      select u.oid, u.oid, false from unsafe u
      union
      select t.oid, m.domain, m.is_within or t.typtype <> 'd'
      from made m
      join pg_catalog.pg_type t
        on t.typbasetype = m.oid
        or t.typelem = m.oid
        or t.typrelid in (select a.attrelid from pg_catalog.pg_attribute a
                          where a.atttypid = m.oid and a.attnum > 0 and not a.attisdropped)
        or t.oid in (select unnest(array[g.rngtypid, g.rngmultitypid]) from pg_catalog.pg_range g
                     where g.rngsubtype = m.oid)
    )
    select format_type(m.domain, null)
    from made m
    where not %s or (m.is_within and exists (
      select from pg_catalog.pg_attribute a
      join pg_catalog.pg_class c on c.oid = a.attrelid and c.relkind in ('r', 'p', 'v', 'm', 'f')
      where a.atttypid = m.oid and a.attnum > 0 and not a.attisdropped))
    order by 1
    limit 1
"""
