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

-- Whether a write may send NOTIFY: not where transactions can be prepared, which it would forbid.
-- Readers of such a server poll.
create function headwater.may_notify() returns boolean
language sql volatile
return current_setting('max_prepared_transactions') = '0' and headwater.readers_sleep();

-- Keeps a field of a notification apart from its punctuation.
create function headwater.notice_field(value text) returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select replace(replace(replace(replace(value, '%', '%25'), ':', '%3A'), ',', '%2C'), '#', '%23')
$$;

-- Sends v1:{table}:{OP}:{key}[:changed,cols]#{seq} for one change and v1:{table}:{OP}:*#{from}-{to}
-- for more, where the range begins with the transaction's first change. The images, where they are
-- given, are those of the one row. The log is not read for it: a serializable writer would conflict
-- with every other one.
create function headwater.notify(
  shape bigint, operation text, changes bigint, before json default null, after json default null
) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  last_seq bigint := currval('headwater.log_seq');
  first_seq bigint := last_seq - changes + 1;
  table_name text;
  key_columns text[];
  head text;
  detail text;
begin
  select case when s.schema_name = 'public' then s.table_name else s.schema_name || '.' || s.table_name end,
         s.key
  into table_name, key_columns
  from headwater.shapes s where s.id = notify.shape limit 1;
  head := 'v1:' || headwater.notice_field(table_name) || ':' || operation || ':';
  if changes > 1 then
    if current_setting('transaction_isolation') <> 'serializable' then
      select coalesce(min(l.seq), first_seq) into first_seq
      from headwater.log l
      where l.slot = headwater.slot_at(clock_timestamp()) and l.xid = pg_current_xact_id();
    end if;
    perform pg_notify('headwater', head || '*#' || first_seq || '-' || last_seq);
    return;
  end if;
  -- A NUL in a json value can be stored, and not be taken out again.
  if strpos(concat(before, after), '\u0000') > 0 then
    perform pg_notify('headwater', head || '#' || last_seq);
    return;
  end if;
  detail := concat(
    (select string_agg(headwater.notice_field(coalesce(after, before) ->> k.name), ',' order by k.ordinality)
     from unnest(key_columns) with ordinality k (name, ordinality)),
    ':' || (select string_agg(headwater.notice_field(c.name), ',' order by c.ordinality)
            from unnest(headwater.changed_columns(before, after)) with ordinality c (name, ordinality)
            where before is not null and after is not null));
  if octet_length(head) + octet_length(detail) > 6950 then
    detail := '';
  end if;
  perform pg_notify('headwater', head || detail || '#' || last_seq);
end $$;
