-- The log: every change of every captured table, written in the writer's own transaction.
--
-- It is a ring of 32 partitions over time. A writer's clock says which slot its rows go to, so a
-- partition can never be missing, and retention empties the slot that will be used next with
-- TRUNCATE: no writer touches it, none waits. See docs/design/001-log.md.

-- Which database this is: another one for a dump restored elsewhere and for a copied database.
create function headwater.home() returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select concat_ws('/',
    (select system_identifier from pg_control_system()),
    (select oid from pg_database where datname = current_database()))
$$;

create table headwater.installation (
  id text primary key default left(md5(random()::text || clock_timestamp()::text), 16),
  home text not null default headwater.home(),
  retention interval not null
);

insert into headwater.installation (retention) values (interval '30 days');

create sequence headwater.log_seq;

-- Every change of a transaction below this id may be gone. A sequence, because it must be read past
-- the reader's snapshot: TRUNCATE is not bound by snapshots either.
create sequence headwater.log_floor minvalue 0 start 0;

-- Replaced by headwater.set_retention with the length of one slot for that retention.
create function headwater.slot_at(at timestamptz) returns smallint
language sql stable parallel safe as $$ select 0::smallint $$;

create table headwater.log (
  seq bigint not null default nextval('headwater.log_seq'),
  xid xid8 not null default pg_current_xact_id(),
  at timestamptz not null default clock_timestamp(),
  shape bigint not null,
  slot smallint not null default headwater.slot_at(clock_timestamp()),
  op "char" not null,
  before json,
  after json,
  user_id text,
  function_name text,
  trace_id text
) partition by list (slot);

do $$
begin
  for slot in 0 .. 31 loop
    execute format(
      'create table headwater.log_%1$s partition of headwater.log for values in (%1$s)', slot);
    -- By transaction: what is new between two snapshots, and what a transaction wrote last.
    execute format('create index on headwater.log_%s (xid, seq)', slot);
    -- By number, for catching up page by page: rows lie in this order on disk, so a few bytes do.
    execute format(
      'create index on headwater.log_%s using brin (seq) with (autosummarize = on)', slot);
    -- headwater.settle updates rows; a publication of all tables would refuse that otherwise.
    execute format('alter table headwater.log_%s replica identity full', slot);
  end loop;
end $$;

-- What a table looked like when a change was written. The id is a hash of the rest, so that writers
-- register a shape without waiting for each other; a shape may stand here more than once.
create table headwater.shapes (
  id bigint not null,
  relid oid not null,
  schema_name text not null,
  table_name text not null,
  columns jsonb not null,
  key text[] not null,
  since timestamptz not null default clock_timestamp()
);

create index on headwater.shapes (id);
create index on headwater.shapes (relid);

-- Where a named consumer has come to, saved after its effect.
create table headwater.cursors (
  name text primary key,
  position text not null,
  saved_at timestamptz not null default clock_timestamp()
);

-- The name of this log in positions. Another cluster, another timeline (a restored backup, a
-- failover) or a fresh installation is another log: its transaction ids mean something else.
create function headwater.log_id() returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select left(md5(concat_ws('/',
    (select id from headwater.installation),
    headwater.home(),
    case
      when pg_is_in_recovery()
        then lpad(upper(to_hex((select timeline_id from pg_control_checkpoint()))), 8, '0')
      else left(pg_walfile_name(pg_current_wal_lsn()), 8)
    end)), 8)
$$;

create function headwater.set_retention(keep interval) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  slot_seconds double precision := extract(epoch from keep) / 30;
begin
  if keep < interval '1 second' then
    raise exception 'headwater: a retention of % is too short', keep
      using errcode = 'invalid_parameter_value', hint = 'Keep at least one second.';
  end if;
  update headwater.installation set retention = keep;
  execute format(
    $f$create or replace function headwater.slot_at(at timestamptz) returns smallint
       language sql stable parallel safe
       return pg_catalog.mod(
         pg_catalog.floor(pg_catalog.date_part('epoch', at)
           operator(pg_catalog./) %L::double precision)::bigint, 32)::smallint$f$,
    slot_seconds);
end $$;

select headwater.set_retention(retention) from headwater.installation;

-- Whether a slot holds changes, none of which must be kept. Volatile, to see what was just committed.
create function headwater.is_over(slot integer, keep_from timestamptz) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  newest record;
begin
  execute format('select xid, at from headwater.log_%s order by xid desc limit 1', slot) into newest;
  return coalesce(
    newest.at < keep_from
    and newest.xid < pg_snapshot_xmin(pg_current_snapshot())
    and slot <> headwater.slot_at(clock_timestamp()), false);
end $$;

-- Empties every slot whose newest change is older than the retention. Never waits: a slot that
-- somebody reads or writes is left for the next time, and so is one with changes of a transaction
-- that readers may still call running.
create function headwater.trim_log() returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  keep_from timestamptz := clock_timestamp() - (select retention from headwater.installation);
  emptied integer := 0;
begin
  for slot in 0 .. 31 loop
    if headwater.is_over(slot, keep_from) then
      begin
        execute format('lock table headwater.log_%s in access exclusive mode nowait', slot);
      exception when lock_not_available then
        continue;
      end;
      -- Looked at again, now that nobody can write to it.
      if headwater.is_over(slot, keep_from) then
        execute format(
          'select setval(''headwater.log_floor'',
             greatest(max(xid::text::bigint) + 1, (select last_value from headwater.log_floor)))
           from (select xid from headwater.log_%s order by xid desc limit 1) newest', slot);
        execute format('truncate headwater.log_%s', slot);
        emptied := emptied + 1;
      end if;
    end if;
  end loop;
  return emptied;
end $$;

-- The columns of an update whose values differ, in the table's order.
create function headwater.changed_columns(before json, after json) returns text[]
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select array_agg(n.key order by n.ordinality)
  from json_each(after) with ordinality n
  where before is null or (before -> n.key)::text is distinct from n.value::text
$$;

create function headwater.key_of(image json, key text[]) returns json
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select json_object_agg(k.name, image -> k.name order by k.ordinality)
  from unnest(key) with ordinality k (name, ordinality)
$$;

-- The log as people read it.
create view headwater.changes as
select
  l.seq,
  l.xid,
  l.at,
  s.schema_name,
  s.table_name,
  case l.op when 'I' then 'insert' when 'U' then 'update' when 'D' then 'delete'
            when 'T' then 'truncate' when 'R' then 'reset' end as op,
  case when l.op in ('I', 'U', 'D')
       then headwater.key_of(coalesce(l.after, l.before), s.key) end as key,
  l.before,
  l.after,
  case when l.op = 'U' then headwater.changed_columns(l.before, l.after) end as changed,
  nullif(l.user_id, '') as user_id,
  nullif(l.function_name, '') as function_name,
  nullif(l.trace_id, '') as trace_id,
  l.shape
from headwater.log l
cross join lateral (select * from headwater.shapes where id = l.shape limit 1) s;
