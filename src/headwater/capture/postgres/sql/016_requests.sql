-- Requests that a client may repeat: a mutation's key and result, written in its own transaction. A
-- repetition finds them and gets the same answer. See docs/howto/queries-and-mutations.md.
--
-- A key counts only together with the scope of its user (a hash of tenant, user and role), so a key of
-- another user is neither answered nor known to exist. The tables hold results of users: with row-level
-- security and no policy, a `grant select on all tables` does not open them.

create table headwater.requests (
  scope bytea not null,
  key text not null,
  digest bytea not null, -- of the function's name and arguments
  result bytea, -- JSON; null for one that was too large to be stored
  expires_at timestamptz not null,
  stored_at timestamptz not null default clock_timestamp(),
  primary key (scope, key)
);

create index on headwater.requests (expires_at);
create index on headwater.requests (scope, stored_at);

-- Messages on channels are not stored, so their keys need not survive a crash of the server either.
create unlogged table headwater.published (
  scope bytea not null,
  key text not null,
  digest bytea not null, -- of the channel's name and the message
  expires_at timestamptz not null,
  primary key (scope, key)
);

create index on headwater.published (expires_at);

alter table headwater.requests enable row level security;
alter table headwater.published enable row level security;
revoke all on headwater.requests from public;
revoke all on headwater.published from public;

-- What is known of a request: `outcome` is new, repeated (with its result), reused for another request,
-- or again: begin another transaction. Two transactions with the same key run one after the other: the
-- second waits here until the first has ended. The lock is taken before the row is looked up, so that
-- the statement that looks sees what the first has committed. Above READ COMMITTED it does not: the
-- snapshot may be from before that. There the unique index says whether the row was stored since.
create function headwater.begin_request(
  of_scope bytea, of_key text, of_digest bytea, out outcome text, out result bytea)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  stored bytea;
begin
  perform pg_advisory_xact_lock(hashtextextended(encode(of_scope, 'hex') || of_key, 0));
  select r.digest, r.result into stored, result
  from headwater.requests r where r.scope = of_scope and r.key = of_key;
  outcome := case when stored is null then 'new' when stored = of_digest then 'repeated' else 'reused' end;
  if outcome <> 'repeated' then
    result := null;
  end if;
  if outcome = 'new' and current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
    begin
      insert into headwater.requests (scope, key, digest, expires_at)
      values (of_scope, of_key, of_digest, clock_timestamp());
      raise exception 'headwater: the row is not to stay' using errcode = 'HW001';
    exception
      when unique_violation then outcome := 'again';
      when sqlstate 'HW001' then null;
    end;
  end if;
end $$;

-- Stores a result for as long as `keep`. Only in the transaction of begin_request, which holds the lock:
-- if another has stored it all the same, this one fails and writes nothing.
create function headwater.store_request(
  of_scope bytea, of_key text, of_digest bytea, of_result bytea, keep interval) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  insert into headwater.requests (scope, key, digest, result, expires_at)
  values (of_scope, of_key, of_digest, of_result, clock_timestamp() + keep)
  on conflict do nothing;
  if not found then
    raise exception 'headwater: the request was stored by another transaction'
      using errcode = 'serialization_failure';
  end if;
end $$;

-- Sends messages to all gateways, those with a key once only. `owners` says of each payload, by number
-- from 1, to which message it belongs. Says of each message whether it was sent, now or before; false
-- for a key that stands for another message. Keys are inserted in order, so that two gateways that
-- send the same ones wait for each other and never in a circle.
create function headwater.publish_once(
  scopes bytea[], keys text[], digests bytea[], keep interval, owners integer[], payloads text[])
returns boolean[]
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  fresh integer[];
  sent boolean[];
begin
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

-- Forgets requests whose time is over, at most so many of each kind. Never waits: a row that another
-- session holds is left for the next round.
create function headwater.trim_requests(most integer default 10000) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  requests integer;
  messages integer;
begin
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

-- Removes the oldest requests of one user beyond the latest `keep`, at most `most` of them and none
-- that is younger than `age`. Locks only the rows that it removes: the first of them is found without
-- a lock.
create function headwater.trim_user_requests(
  of_scope bytea, keep integer, age interval, most integer) returns integer
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  last timestamptz;
  removed integer;
begin
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

revoke all on function headwater.begin_request(bytea, text, bytea) from public;
revoke all on function headwater.store_request(bytea, text, bytea, bytea, interval) from public;
revoke all on function
  headwater.publish_once(bytea[], text[], bytea[], interval, integer[], text[]) from public;
revoke all on function headwater.trim_requests(integer) from public;
revoke all on function headwater.trim_user_requests(bytea, integer, interval, integer) from public;
