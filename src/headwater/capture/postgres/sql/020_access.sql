-- Functions that act for the gateway check who calls them. They run with the rights of the schema's
-- owner; a role that was given EXECUTE on all functions must not get tickets or publish by them.

-- Raises unless the session's login role and the role that it has taken may both act for the owner
-- of the calling function.
create function headwater.check_gateway() returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  taken name := nullif(current_setting('role'), 'none');
begin
  if not pg_has_role(session_user, current_user, 'usage')
     or not pg_has_role(coalesce(taken, session_user), current_user, 'usage') then
    raise exception 'headwater: this function is for the gateway''s role only'
      using errcode = 'insufficient_privilege',
            hint = format('Run the gateway as role %s, or as a member of it.', current_user);
  end if;
end $$;

create or replace function headwater.trim_tickets() returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  removed integer;
begin
  perform headwater.check_gateway();
  delete from headwater.tickets
  where hash in (
    select hash from headwater.tickets where expires_at <= clock_timestamp()
    for update skip locked);
  get diagnostics removed = row_count;
  return removed;
end $$;

create or replace function headwater.issue_ticket(
  ticket bytea, for_account text, for_identity text, lasts interval, most integer,
  out accepted boolean, out at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  class constant integer := headwater.lock_class() + 1;
  number constant integer := hashtext(for_account);
  held bigint;
begin
  perform headwater.check_gateway();
  perform headwater.trim_tickets();
  -- One at a time for an account, or two gateways would both find room for the last one. A class of
  -- its own: the second number comes from a name that users choose. Every role can take that lock. One of
  -- ours that has it is waited for, another one is not: all tickets of a gateway would wait for it.
  if not pg_try_advisory_xact_lock(class, number) and not exists (
    select from pg_locks l left join pg_stat_activity a on a.pid = l.pid
    where l.locktype = 'advisory' and l.classid = class::oid and l.objsubid = 2 and l.granted
      and l.objid = (number::bigint & 4294967295)::oid
      and l.database = (select oid from pg_database where datname = current_database())
      and (a.usesysid is null or not pg_has_role(a.usesysid, current_user, 'member')))
  then
    perform pg_advisory_xact_lock(class, number);
  end if;
  select count(*), min(t.expires_at) into held, at from headwater.tickets t
  where t.account = for_account and t.expires_at > clock_timestamp();
  accepted := held < most;
  if accepted then
    insert into headwater.tickets (hash, account, identity, expires_at)
    values (ticket, for_account, for_identity, clock_timestamp() + lasts)
    returning expires_at into at;
  end if;
end $$;

create or replace function headwater.redeem_ticket(ticket bytea) returns text
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  found_identity text;
  ends timestamptz;
begin
  perform headwater.check_gateway();
  delete from headwater.tickets where hash = ticket
  returning identity, expires_at into found_identity, ends;
  return case when ends > clock_timestamp() then found_identity end;
end $$;

create or replace function headwater.publish_once(
  scopes bytea[], keys text[], digests bytea[], keep interval, owners integer[], payloads text[])
returns boolean[]
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  fresh integer[];
  sent boolean[];
begin
  perform headwater.check_gateway();
  with asked as (
    select distinct on (a.scope, a.key) a.*
    from unnest(scopes, keys, digests) with ordinality as a (scope, key, digest, number)
    where a.key is not null
    order by a.scope, a.key, a.number),
  added as (
    insert into headwater.published (scope, key, digest, expires_at)
    select a.scope, a.key, a.digest, clock_timestamp() + keep from asked a order by a.scope, a.key
    on conflict do nothing
    returning published.scope, published.key)
  select coalesce(array_agg(a.number::integer), '{}') into fresh
  from asked a join added d on d.scope = a.scope and d.key = a.key;
  perform pg_notify('headwater:bus', p.payload)
  from unnest(owners, payloads) with ordinality as p (owner, payload, number)
  where keys[p.owner] is null or p.owner = any(fresh)
  order by p.number;
  select array_agg(a.key is null or coalesce(p.digest = a.digest, false) order by a.number) into sent
  from unnest(scopes, keys, digests) with ordinality as a (scope, key, digest, number)
  left join headwater.published p on p.scope = a.scope and p.key = a.key;
  return sent;
end $$;

create or replace function headwater.trim_requests(most integer default 10000) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  requests integer;
  messages integer;
begin
  perform headwater.check_gateway();
  delete from headwater.requests r
  using (select o.scope, o.key from headwater.requests o where o.expires_at <= clock_timestamp()
         order by o.expires_at limit most for update skip locked) as over
  where r.scope = over.scope and r.key = over.key;
  get diagnostics requests = row_count;
  delete from headwater.published r
  using (select o.scope, o.key from headwater.published o where o.expires_at <= clock_timestamp()
         order by o.expires_at limit most for update skip locked) as over
  where r.scope = over.scope and r.key = over.key;
  get diagnostics messages = row_count;
  return greatest(requests, messages);
end $$;

create or replace function headwater.trim_user_requests(
  of_scope bytea, keep integer, age interval, most integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  last timestamptz;
  removed integer;
begin
  perform headwater.check_gateway();
  select o.stored_at into last from headwater.requests o
  where o.scope = of_scope order by o.stored_at desc offset keep limit 1;
  delete from headwater.requests r
  using (select o.key from headwater.requests o
         where o.scope = of_scope and o.stored_at <= least(last, clock_timestamp() - age)
           and last is not null
         order by o.stored_at limit most for update skip locked) as over
  where r.scope = of_scope and r.key = over.key;
  get diagnostics removed = row_count;
  return removed;
end $$;

revoke all on function headwater.check_gateway() from public;
