"""Creates what an attacker with CREATE on a schema can create: operators, functions and types that
fit better than PostgreSQL's own, or equal ones in a schema that comes first. Headwater has more
rights than the attacker, so it must never call any of them.

PostgreSQL counts the calls (`track_functions`), also those of transactions that roll back.
"""

from __future__ import annotations

from headwater.database import Connection

PATH = "public, pg_catalog"
"""In which everything planted comes before PostgreSQL's own."""

CALLED = """
    select distinct funcname::text from pg_stat_user_functions
    where schemaname = 'public' and calls > 0 order by 1
"""


async def plant(connection: Connection) -> None:
    """In the schema public, as the connection's role."""
    await connection.execute(_FUNCTIONS)
    await connection.execute(_OPERATORS)
    await connection.execute(_TYPES)


# Of every function that takes and returns types that a function in plpgsql may have.
_FUNCTIONS = """
    do $do$
    declare
      f record;
    begin
      set local check_function_bodies = off;
      set local search_path = pg_catalog;
      for f in
        select distinct p.proname, pg_get_function_identity_arguments(p.oid) as arguments,
               pg_get_function_result(p.oid) as result
        from pg_proc p
        where p.pronamespace = 'pg_catalog'::regnamespace and p.prokind = 'f' and p.pronargs > 0
          and p.provariadic = 0 and p.prorettype <> 'record'::regtype
          and p.oid < 16384 and not exists (
            select from unnest(p.proargtypes::oid[] || p.prorettype) a join pg_type t on t.oid = a
            where t.typtype = 'p'
                  and t.typname not in ('anyelement', 'anyarray', 'anynonarray', 'void')
               or t.typname in ('refcursor', '_refcursor'))
          and p.proname !~ '(in|out|recv|send)$'
      loop
        begin
          execute format('create function public.%I(%s) returns %s language plpgsql as %L',
                         f.proname, f.arguments, f.result, case
                           when f.result ~ '^(SETOF |void)' then 'begin return; end'
                           else 'begin return null; end' end);
        exception when others then
          null; -- one of PostgreSQL's own has no such name or type for users
        end;
      end loop;
    end $do$
"""

# The same as PostgreSQL's, and those between types of which it turns one into the other.
_OPERATORS = """
    do $do$
    declare
      o record;
      pair text;
    begin
      set local check_function_bodies = off;
      set local search_path = pg_catalog;
      for o in
        select q.oprname, l.oid::regtype as lefts, r.oid::regtype as rights,
               q.oprresult::regtype as result
        from pg_operator q join pg_type l on l.oid = q.oprleft join pg_type r on r.oid = q.oprright
        where l.typtype = 'b' and r.typtype = 'b' and q.oprkind = 'b' and q.oid < 16384
        union
        select s.name, l, r, case s.name when '||' then 'text' else 'boolean' end::regtype
        from (values ('{text,varchar,bpchar,name,"\\"char\\"",unknown}'::regtype[],
                      '{=,<>,<,>,<=,>=,~~,~~*,~,!~,||}'::text[]),
                     ('{int2,int4,int8,oid,numeric,float8,regclass,regtype,regproc,xid}',
                      '{=,<>,<,>,<=,>=}'),
                     ('{date,timestamp,timestamptz}', '{=,<>,<,>,<=,>=}'),
                     ('{json,jsonb,text}', '{=,<>,->,->>}')) v (types, names),
             unnest(v.types) l, unnest(v.types) r, unnest(v.names) s (name)
      loop
        pair := format('planted_%s_%s_%s', o.lefts::oid, o.rights::oid, o.result::oid);
        begin
          execute format(
            'create or replace function public.%I(%s, %s) returns %s language plpgsql as %L',
            pair, o.lefts, o.rights, o.result, 'begin return null; end');
          execute format(
            'create operator public.%s (leftarg = %s, rightarg = %s, function = public.%I)',
            o.oprname, o.lefts, o.rights, pair);
        exception when others then
          null;
        end;
      end loop;
    end $do$
"""

# A value of such a type calls the function of its condition.
_TYPES = """
    do $do$
    declare
      name text;
    begin
      set local search_path = pg_catalog;
      create function public.planted_type() returns boolean
        language plpgsql as 'begin return true; end';
      foreach name in array array[
        'text', 'name', 'oid', 'json', 'jsonb', 'uuid', 'bytea', 'date', 'timestamptz', 'regclass',
        'regtype', 'xid8', 'int8', 'int4', 'int2', 'float8', 'bool', 'varchar', 'bpchar']
      loop
        execute format(
          'create domain public.%1$I as pg_catalog.%1$I check (public.planted_type())', name);
      end loop;
    end $do$
"""
