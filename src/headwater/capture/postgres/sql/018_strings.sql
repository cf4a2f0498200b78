-- Strings that PostgreSQL stores and cannot always read: escapes in JSON, backslashes in literals.

-- Sends what 002_waking.sql describes. A row with an escape in it is named by its number alone.
create or replace function headwater.notify(
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
  -- A NUL, or half of a surrogate pair, in a json value can be stored, and not be taken out again.
  if strpos(concat(before, after), '\u') > 0 then
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

-- The same as in 001_log.sql; null where an image has such an escape, so that one row does not make the
-- log unreadable.
create or replace function headwater.key_of(image json, key text[]) returns json
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
  return (
    select json_object_agg(k.name, image -> k.name order by k.ordinality)
    from unnest(key) with ordinality k (name, ordinality));
exception when data_exception then
  return null;
end $$;

create or replace function headwater.changed_columns(before json, after json) returns text[]
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
  return (
    select array_agg(n.key order by n.ordinality)
    from json_each(after) with ordinality n
    where before is null or (before -> n.key)::text is distinct from n.value::text);
exception when data_exception then
  return null;
end $$;

-- A writer may have set standard_conforming_strings = off. The body of a function is read with the
-- writer's setting, and a backslash in a literal would then be an escape: '\u0000' made every write
-- fail. Functions without a backslash need no setting, which costs a little at every call.
do $$
declare
  function regprocedure;
begin
  for function in
    select p.oid::regprocedure from pg_catalog.pg_proc p
    where p.pronamespace = 'headwater'::regnamespace and strpos(p.prosrc, chr(92)) > 0
      and p.proname !~ '^capture_[0-9]'
  loop
    execute format('alter function %s set standard_conforming_strings = on', function);
  end loop;
end $$;
