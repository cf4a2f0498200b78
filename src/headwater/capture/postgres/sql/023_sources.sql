-- Sources: databases elsewhere, whose tables are mirrored into this one. One transaction of a source
-- is one transaction here, which also stores the source's position in headwater.source_transactions:
-- so each change is applied exactly once. See docs/reference/sql.md and headwater/capture/mirror.

-- What was declared, and what was requested since. Only Headwater's role reads it: URLs may contain
-- passwords.
create table headwater.source_definitions (
  name text primary key,
  definition json not null, -- capture/source.py: SourceDefinition without its name
  declared_by text not null check (declared_by in ('command', 'application', 'file')),
  paused boolean not null default false,
  resnapshot text[], -- tables to copy again; {*} for all
  removing boolean not null default false,
  drop_mirrors boolean not null default false, -- when it is removed
  declared_at timestamptz not null default clock_timestamp()
);

revoke all on headwater.source_definitions from public;

-- What people and the console see. Written at most about once a second.
create table headwater.sources (
  name text primary key,
  kind text not null,
  into_schema text not null,
  feed_only boolean not null default false,
  tables json not null default '[]', -- name, target, state, copied, estimate of each
  position text,
  committed_at timestamptz, -- at the source, of the last transaction that was applied
  lag double precision, -- seconds from the commit at the source to the commit here
  state text not null default 'waiting' check (state in (
    'waiting', 'checking', 'copying', 'running', 'paused', 'failed', 'refused', 'lost', 'diverged',
    'stopped', 'removing')),
  error text,
  hint text,
  changes bigint not null default 0,
  transactions bigint not null default 0,
  lag_bytes bigint, -- what the source stores for us
  warning text,
  runner text, -- the process that runs it
  updated_at timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

revoke all on headwater.sources from public;

-- The tables of each source. `cursor` is the key up to which a copy has come.
create table headwater.source_tables (
  source text not null,
  name text not null, -- as the definition writes it
  target text not null, -- in the schema of the mirrors
  relid oid not null,
  state text not null check (state in ('copying', 'live', 'recopying', 'dropped', 'removed')),
  cursor json,
  copied bigint not null default 0,
  estimate bigint,
  follows boolean not null default false, -- changes are also applied to the mirror while it is copied again
  description jsonb not null, -- capture/source.py: SourceTable
  primary key (source, name)
);

-- Checked at the end of a statement: headwater.adopt_sources may give one table the former oid of another.
alter table headwater.source_tables add unique (relid) deferrable;
revoke all on headwater.source_tables from public;

-- One row for each transaction of a source that was applied, written by that very transaction: the
-- newest row of a source has its position, and a change in the log is traced to its source by the
-- transaction. The position is null after a source was removed.
create table headwater.source_transactions (
  xid xid8 primary key default pg_current_xact_id(),
  source text not null,
  position text,
  committed_at timestamptz
);

create index on headwater.source_transactions (source, xid);
revoke all on headwater.source_transactions from public;

-- Raises unless the source is where this runner left it: a second runner, or one that comes back to
-- life, never applies a transaction twice.
create function headwater.save_position(
  of_source text, expected text, reached text, committed timestamptz) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  present text;
begin
  select t.position into present from headwater.source_transactions t
  where t.source = of_source order by t.xid desc limit 1;
  if present is distinct from expected then
    raise exception 'headwater: source % is not at the position at which this runner left it', of_source
      using errcode = 'serialization_failure',
            hint = 'Another runner has advanced it. This one starts again from the new position.';
  end if;
  insert into headwater.source_transactions (source, position, committed_at)
  values (of_source, reached, committed);
end $$;

-- Raises unless a statement changed this many rows of a mirror: the mirror would not equal its source.
create function headwater.expect_rows(changed bigint, expected bigint, relation oid, operation text)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if changed is distinct from expected then
    raise exception 'headwater: the mirror % no longer equals its source: % of % rows to % are there',
      headwater.label(relation), changed, expected, operation
      using errcode = 'triggered_data_change_violation';
  end if;
end $$;

-- A mirror is written by the runner of its source only. Other roles are refused whatever they were
-- granted; Headwater's own role must also say that it is the runner, which prevents accidents.
create function headwater.guard_mirror() returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if not (select pg_has_role(c.relowner, 'usage') from pg_class c where c.oid = tg_relid)
     or current_setting('headwater.applies', true) is distinct from tg_argv[0] then
    raise exception 'headwater: % is the mirror of a table of source %: it is read-only',
      tg_relid::regclass, tg_argv[0]
      using errcode = 'insufficient_privilege',
            hint = 'Write to the source. To make it an ordinary table: headwater source remove '
                   || tg_argv[0];
  end if;
  return null;
end $$;

-- The guard is not a trigger of capture: it stays when capture is removed, and a change of it is no
-- reason to read the table again.
create or replace function headwater.own_triggers(relation oid) returns setof pg_trigger
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select t.* from pg_trigger t join pg_proc f on f.oid = t.tgfoid
  where t.tgrelid = relation and f.pronamespace = 'headwater'::regnamespace and not t.tgisinternal
    and f.proname <> 'guard_mirror'
$$;

-- Appends changes of a feed-only table to the log and wakes readers, as the triggers do for others.
create function headwater.append_changes(
  relation oid, operation "char", before json[], after json[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  shape constant bigint := headwater.register_shape(relation);
  logged bigint;
begin
  insert into headwater.log (op, shape, before, after)
  select operation, shape, c.before, c.after
  from unnest(before, after) with ordinality c (before, after, number) order by c.number;
  get diagnostics logged = row_count;
  if operation = 'T' then
    insert into headwater.log (op, shape) values (operation, shape);
    logged := 1;
  end if;
  if logged > 0 and headwater.may_notify() then
    perform headwater.notify(shape, case operation
      when 'I' then 'INSERT' when 'U' then 'UPDATE' when 'D' then 'DELETE' else 'TRUNCATE' end,
      logged, case when logged = 1 then before[1] end, case when logged = 1 then after[1] end);
  end if;
end $$;

-- For maintenance: forgets transactions whose changes the log no longer has. Each source's newest
-- stays, because it is the source's position.
create function headwater.trim_source_transactions() returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  removed integer;
begin
  delete from headwater.source_transactions t
  where t.xid < (select last_value::text::xid8 from headwater.log_floor)
    and exists (select from headwater.source_transactions n
                where n.source = t.source and n.xid > t.xid);
  get diagnostics removed = row_count;
  return removed;
end $$;

-- In a copied or restored database, transaction ids and oids mean something else, and another runner
-- may be reading the source for the original: positions stay, and sources are paused until somebody
-- resumes them here.
create function headwater.adopt_sources() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  newest headwater.source_transactions[] := array(
    select n from (select distinct on (t.source) t.* from headwater.source_transactions t
                   order by t.source, t.xid desc) n);
begin
  delete from headwater.source_transactions;
  insert into headwater.source_transactions (xid, source, position, committed_at)
  select n.number::text::xid8, n.source, n.position, n.committed_at
  from unnest(newest) with ordinality n (xid, source, position, committed_at, number);
  update headwater.source_tables t
  set relid = to_regclass(format('%I.%I', s.into_schema, t.target))
  from headwater.sources s
  where s.name = t.source and to_regclass(format('%I.%I', s.into_schema, t.target)) is not null;
  update headwater.source_definitions set paused = true;
end $$;

do $do$
begin
  execute replace(
    pg_get_functiondef('headwater.adopt()'::regprocedure),
    '  update headwater.secret set key', $new$  perform headwater.adopt_sources();
  update headwater.secret set key$new$);
end $do$;

revoke all on function headwater.save_position(text, text, text, timestamptz),
  headwater.expect_rows(bigint, bigint, oid, text), headwater.guard_mirror(),
  headwater.append_changes(oid, "char", json[], json[]), headwater.trim_source_transactions(),
  headwater.adopt_sources() from public;
