-- Tickets: what an EventSource, which cannot send a header, shows instead of a token. Any gateway of
-- this database takes a ticket that another one gave out, once.
--
-- Only a hash is here, so whoever reads the table has no ticket. It still tells who is signed in:
-- with row-level security and no policy, a `grant select on all tables` does not open it either. A
-- crash of the server empties it, and its tickets are asked for again.

create unlogged table headwater.tickets (
  hash bytea primary key,
  account text not null,
  identity text not null,
  expires_at timestamptz not null
);

create index on headwater.tickets (account);
create index on headwater.tickets (expires_at);

alter table headwater.tickets enable row level security;
revoke all on headwater.tickets from public;

-- Forgets tickets that nobody came for. Never waits: what another session holds it is removing.
create function headwater.trim_tickets() returns integer
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
  with removed as (
    delete from headwater.tickets
    where hash in (
      select hash from headwater.tickets where expires_at <= clock_timestamp()
      for update skip locked)
    returning 1)
  select count(*)::integer from removed
$$;

-- Keeps a ticket, unless the account has as many as it may: then `accepted` is false and `at` says
-- when the first of them ends. Otherwise `at` is when this one ends.
create function headwater.issue_ticket(
  ticket bytea, for_account text, for_identity text, lasts interval, most integer,
  out accepted boolean, out at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  held bigint;
begin
  perform headwater.trim_tickets();
  -- One at a time for an account, or two gateways would both find room for the last one. A class of
  -- its own: the second number comes from a name that users choose.
  perform pg_advisory_xact_lock(headwater.lock_class() + 1, hashtext(for_account));
  select count(*), min(t.expires_at) into held, at from headwater.tickets t
  where t.account = for_account and t.expires_at > clock_timestamp();
  accepted := held < most;
  if accepted then
    insert into headwater.tickets (hash, account, identity, expires_at)
    values (ticket, for_account, for_identity, clock_timestamp() + lasts)
    returning expires_at into at;
  end if;
end $$;

-- Who the ticket was given to; null for one that is unknown, used or over. It cannot be used again.
create function headwater.redeem_ticket(ticket bytea) returns text
language sql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
  with removed as (
    delete from headwater.tickets where hash = ticket returning identity, expires_at)
  select identity from removed where expires_at > clock_timestamp()
$$;

revoke all on function headwater.trim_tickets() from public;
revoke all on function headwater.issue_ticket(bytea, text, text, interval, integer) from public;
revoke all on function headwater.redeem_ticket(bytea) from public;
