-- Waking readers. While all sleep, a writer sends NOTIFY; while one polls, it holds a lock that a
-- writer can see, and no writer pays for NOTIFY's database-wide lock. See docs/design/002-waking.md.

-- 'hwdr' in ASCII; the second number says what the lock is for.
create function headwater.lock_class() returns integer
language sql immutable parallel safe
return 1752654962;

-- True while no reader polls, and then also a promise: no reader can begin to rely on polling alone
-- before this transaction ends.
create function headwater.readers_sleep() returns boolean
language sql volatile
return pg_catalog.pg_try_advisory_xact_lock_shared(1752654962, 1);

-- Keeps a field of a notification apart from its punctuation.
create function headwater.notice_field(value text) returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select replace(replace(replace(replace(value, '%', '%25'), ':', '%3A'), ',', '%2C'), '#', '%23')
$$;

-- Sends v1:{table}:{OP}:{key}[:changed,cols]#{seq} for one change and v1:{table}:{OP}:*#{from}-{to}
-- for more, where the range begins with the transaction's first change.
create function headwater.notify(shape bigint, operation text, changes bigint) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  last_seq bigint := currval('headwater.log_seq');
  current_slot smallint := headwater.slot_at(clock_timestamp());
  head text;
  key_text text;
  detail text;
  changed text[];
begin
  select 'v1:' || headwater.notice_field(
           case when s.schema_name = 'public' then s.table_name else s.schema_name || '.' || s.table_name end)
         || ':' || operation || ':'
  into head
  from headwater.shapes s where s.id = notify.shape limit 1;
  if changes > 1 then
    perform pg_notify('headwater', head || '*#' || coalesce(min(seq), last_seq) || '-' || last_seq)
    from headwater.log
    where slot = current_slot and xid = pg_current_xact_id();
    return;
  end if;
  select
    (select string_agg(headwater.notice_field(coalesce(l.after, l.before) ->> k.name), ',' order by k.ordinality)
     from unnest(s.key) with ordinality k (name, ordinality)),
    case when l.op = 'U' then headwater.changed_columns(l.before, l.after) end
  into key_text, changed
  from headwater.log l
  cross join lateral (select key from headwater.shapes where id = l.shape limit 1) s
  where l.slot = current_slot and l.xid = pg_current_xact_id() and l.seq = last_seq
    and l.op in ('I', 'U', 'D');
  detail := coalesce(key_text, '') || coalesce(
    ':' || (select string_agg(headwater.notice_field(c.name), ',' order by c.ordinality)
            from unnest(changed) with ordinality c (name, ordinality)), '');
  if octet_length(head) + octet_length(detail) > 6950 then
    detail := '';
  end if;
  perform pg_notify('headwater', head || detail || '#' || last_seq);
end $$;
