-- What gateways are busy with: their sessions and the views that they keep, the costliest of each, as
-- each gateway itself writes it down every few seconds while an admin looks. Nobody looks: no rows. It
-- is captured once the console has been opened, so that live queries can be asked over it.
--
-- Not unlogged, though nothing in it is worth keeping: a crash would empty it, and no log tells of
-- that.

create table headwater.activity (
  gateway text not null,
  kind text not null, -- gateway, session, or view
  id text not null,
  type text, -- a session's transport; what a view is of: live, query, changes, topic
  name text, -- who, or what of
  detail json not null default '{}',
  subscriptions integer not null default 0, -- of a session; to a view
  rows bigint not null default 0, -- that a view holds
  sent bigint not null default 0, -- frames to a session, steps of a view
  bytes bigint not null default 0,
  waiting bigint not null default 0, -- bytes that a session's client has not taken yet
  runs bigint not null default 0, -- how often a view was brought up to date
  seconds double precision not null default 0, -- and how long that took
  since timestamptz not null,
  updated_at timestamptz not null default clock_timestamp(),
  alive_until timestamptz, -- of a gateway: not heard of until then, it is taken for dead
  primary key (gateway, kind, id)
) with (fillfactor = 50);

revoke all on headwater.activity from public;

-- Held, shared, by the gateways whose clients look at the activity: the others see it and write
-- theirs down, too. It ends with the gateway's connection.
create function headwater.looks_at_activity() returns boolean
language sql volatile
set search_path = pg_catalog, pg_temp
as $$ select pg_try_advisory_lock_shared(headwater.lock_class(), 5) $$;

create function headwater.is_activity_looked_at() returns boolean
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
  select exists (
    select from pg_locks
    where locktype = 'advisory' and classid = headwater.lock_class()::oid and objid = 5
      and objsubid = 2 and mode = 'ShareLock' and granted
      and database = (select oid from pg_database where datname = current_database()))
$$;

-- Writes rows of one gateway, removes others of it (by kind and id), and forgets gateways that have
-- not been heard of for as long as they themselves said that they may be silent.
create function headwater.write_activity(
  of_gateway text, written json, removed json, silence interval) returns void
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  insert into headwater.activity (
    gateway, kind, id, type, name, detail, subscriptions, rows, sent, bytes, waiting, runs,
    seconds, since, alive_until)
  select of_gateway, w.*, case when w.kind = 'gateway' then clock_timestamp() + silence end
  from json_to_recordset(written) as w (
    kind text, id text, type text, name text, detail json, subscriptions integer, rows bigint,
    sent bigint, bytes bigint, waiting bigint, runs bigint, seconds double precision,
    since timestamptz)
  on conflict (gateway, kind, id) do update
  set (type, name, detail, subscriptions, rows, sent, bytes, waiting, runs, seconds, updated_at,
       alive_until)
    = (excluded.type, excluded.name, excluded.detail, excluded.subscriptions, excluded.rows,
       excluded.sent, excluded.bytes, excluded.waiting, excluded.runs, excluded.seconds,
       clock_timestamp(), excluded.alive_until);
  delete from headwater.activity a
  using json_to_recordset(removed) as r (kind text, id text)
  where a.gateway = of_gateway and a.kind = r.kind and a.id = r.id;
  delete from headwater.activity a
  where a.gateway <> of_gateway and not exists (
    select from headwater.activity g
    where g.gateway = a.gateway and g.kind = 'gateway'
      and g.alive_until > clock_timestamp());
end $$;

revoke all on function headwater.looks_at_activity() from public;
revoke all on function headwater.is_activity_looked_at() from public;
revoke all on function headwater.write_activity(text, json, json, interval) from public;
