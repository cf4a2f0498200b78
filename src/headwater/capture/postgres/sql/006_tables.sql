-- Tables: turning capture on and off, and keeping it in step with tables that change.

create table headwater.tables (
  relid oid primary key,
  schema_name text not null,
  table_name text not null,
  enabled boolean not null,
  changed_at timestamptz not null default clock_timestamp()
);

-- Says why a relation cannot be captured, and what to do; returns it where it can.
create function headwater.check_capturable(relation regclass, name text) returns oid
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  c pg_class;
  parent regclass;
  foreign_member regclass;
begin
  select * into c from pg_class where oid = relation;
  if c.oid is null then
    raise exception 'headwater: there is no table %', coalesce(name, 'null')
      using errcode = 'undefined_table',
            hint = 'Check the spelling and the schema (sales.orders); a name with capitals or '
                   'blanks is quoted: enable_reactivity(''"Order Lines"'').';
  end if;
  if c.relkind in ('v', 'm') then
    raise exception 'headwater: % is a %view, which has no changes of its own', relation,
      case c.relkind when 'm' then 'materialized ' else '' end
      using errcode = 'wrong_object_type', hint = 'Enable the tables it reads from.';
  elsif c.relkind = 'f' then
    raise exception 'headwater: % is a foreign table; its changes happen elsewhere', relation
      using errcode = 'wrong_object_type', hint = 'Install Headwater in the database that holds it.';
  elsif c.relkind not in ('r', 'p') then
    raise exception 'headwater: % is not a table', relation using errcode = 'wrong_object_type';
  elsif c.relpersistence = 't' then
    raise exception 'headwater: % is a temporary table', relation
      using errcode = 'wrong_object_type', hint = 'Only tables that other sessions can read can be watched.';
  elsif c.relnamespace in ('pg_catalog'::regnamespace, 'information_schema'::regnamespace)
     or relation = 'headwater.log'::regclass
     or exists (select from pg_inherits where inhrelid = relation and inhparent = 'headwater.log'::regclass) then
    raise exception 'headwater: % is a system table', relation using errcode = 'wrong_object_type';
  end if;
  select inhparent into parent from pg_inherits where inhrelid = relation limit 1;
  if parent is not null then
    raise exception 'headwater: % is a % of %', relation,
      case when c.relispartition then 'partition' else 'child' end, parent
      using errcode = 'wrong_object_type',
            hint = format('Enable %s: what is below it is captured with it.', parent);
  end if;
  if exists (select from pg_index where indrelid = relation and indisprimary and not indimmediate) then
    raise exception 'headwater: the primary key of table % is deferrable', relation
      using errcode = 'object_not_in_prerequisite_state',
            hint = 'Two rows may share it for a while, so changes could not be told apart. Make it immediate.';
  end if;
  if headwater.describe(relation) -> 'key' = '[]' then
    raise exception 'headwater: table % has no primary key', relation
      using errcode = 'object_not_in_prerequisite_state',
            hint = format('Rows are told apart by their key: alter table %s add primary key (...).', relation);
  end if;
  select m into foreign_member
  from headwater.members_of(relation) m join pg_class f on f.oid = m where f.relkind = 'f' limit 1;
  if foreign_member is not null then
    raise exception 'headwater: % of table % is a foreign table, whose changes cannot be captured',
      foreign_member, relation
      using errcode = 'wrong_object_type', hint = 'Detach it, or enable the other partitions'' table.';
  end if;
  return relation;
end $$;

create function headwater.log_reset(root oid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  shape bigint := headwater.register_shape(root);
begin
  insert into headwater.log (op, shape) values ('R', shape);
  perform headwater.notify(shape, 'RESET', 1);
end $$;

-- Brings one table's triggers and functions up to its present shape and members. Returns whether
-- anything was done. Partitions that came with rows or went are a reset: no row told us.
create function headwater.sync_table(root oid) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  relation oid;
  filled boolean := false;
  done boolean := false;
  moved boolean := false;
  fresh boolean := not exists (select from headwater.captures c where c.member = sync_table.root);
begin
  for relation in
    select m from headwater.members_of(root) m
    where not exists (
      select from headwater.captures c
      where c.member = m and c.fingerprint = headwater.fingerprint(m, sync_table.root))
  loop
    if not fresh and not exists (select from headwater.captures c where c.member = relation) then
      execute format('lock table only %s in share row exclusive mode', relation::regclass);
      if not has_table_privilege(relation, 'SELECT') or row_security_active(relation) then
        filled := true; -- it may be
      else
        execute format('select exists (select from only %s)', relation::regclass) into filled;
      end if;
      moved := moved or filled;
    end if;
    perform headwater.install_capture(relation, root);
    done := true;
  end loop;
  for relation in
    select c.member from headwater.captures c
    where c.root = sync_table.root and c.member not in (select headwater.members_of(sync_table.root))
  loop
    perform headwater.remove_capture(relation);
    moved := true;
    done := true;
  end loop;
  update headwater.tables t
  set schema_name = n.nspname, table_name = c.relname
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
  where t.relid = sync_table.root and c.oid = sync_table.root
    and (t.schema_name, t.table_name) is distinct from (n.nspname::text, c.relname::text);
  if moved then
    perform headwater.log_reset(root);
  end if;
  return done;
end $$;

-- For the maintenance loop: every enabled table. A table that is gone is no longer enabled; one that
-- is in use or not ours to alter is left as it is, and captured exactly all the same.
create function headwater.sync_tables() returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  t record;
  done integer := 0;
begin
  perform pg_advisory_xact_lock(headwater.lock_class(), 4);
  if (select home <> headwater.home() from headwater.installation) then
    return 0; -- the oids here are of another database, see headwater.adopt
  end if;
  for t in select * from headwater.tables where enabled order by relid loop
    begin
      if not exists (select from pg_class where oid = t.relid) then
        perform headwater.remove_capture(c.member) from headwater.captures c where c.root = t.relid;
        update headwater.tables set enabled = false, changed_at = clock_timestamp() where relid = t.relid;
        done := done + 1;
      elsif headwater.describe(t.relid) -> 'key' <> '[]' and headwater.sync_table(t.relid) then
        done := done + 1;
      end if;
    exception when others then
      raise warning 'headwater: % could not be looked after: %', headwater.label(t.relid), sqlerrm;
    end;
  end loop;
  return done;
end $$;

-- After a dump was restored or a database copied: oids and transaction ids mean something else here.
-- Begins a new log and captures again, by their names, the tables that were captured.
create function headwater.adopt() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  name text;
  captured text[] := array(
    select format('%I.%I', schema_name, table_name) from headwater.tables where enabled);
begin
  for name in
    select proname from pg_proc
    where pronamespace = 'headwater'::regnamespace and proname ~ '^capture_[0-9]+_'
  loop
    execute format('drop function headwater.%I() cascade', name);
  end loop;
  for name in select format('%I on %s', tgname, tgrelid::regclass) from pg_trigger
              where tgname like 'headwater\_%' and tgparentid = 0 and not tgisinternal loop
    execute 'drop trigger ' || name;
  end loop;
  truncate headwater.log, headwater.shapes, headwater.captures, headwater.tables;
  perform setval('headwater.log_floor', 0);
  update headwater.installation
  set home = headwater.home(), id = left(md5(random()::text || clock_timestamp()::text), 16);
  foreach name in array captured loop
    if to_regclass(name) is not null then
      perform headwater.enable_table(to_regclass(name));
    end if;
  end loop;
end $$;

create function headwater.enable_table(root oid) returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  was_enabled boolean;
begin
  perform pg_advisory_xact_lock(headwater.lock_class(), 4); -- one at a time
  was_enabled := (select enabled from headwater.tables where relid = root);
  perform headwater.sync_table(root);
  if was_enabled then
    return headwater.label(root);
  end if;
  insert into headwater.tables (relid, schema_name, table_name, enabled)
  select root, n.nspname, c.relname, true
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
  where c.oid = root
  on conflict (relid) do update set enabled = true, changed_at = clock_timestamp();
  -- Whoever watched before does not know what happened while nobody captured.
  perform headwater.log_reset(root);
  return headwater.label(root);
end $$;

create function headwater.disable_table(root oid) returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pg_advisory_xact_lock(headwater.lock_class(), 4);
  perform headwater.remove_capture(c.member) from headwater.captures c where c.root = disable_table.root;
  update headwater.tables set enabled = false, changed_at = clock_timestamp()
  where relid = root and enabled;
  return headwater.label(root);
end $$;

-- How people call a table: orders, or sales.orders outside the public schema.
create function headwater.label(relation oid) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select case when n.nspname = 'public' then c.relname else n.nspname || '.' || c.relname end
  from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = relation
$$;

-- Finds a table by the name a person typed, in the caller's own search path; a name that only fits
-- when taken as it stands ("Order Lines" without quotes) is found too.
create function headwater.find_table(name text) returns regclass
language sql stable
as $$
  select coalesce(
    case when name !~ '\s' or name ~ '"' then pg_catalog.to_regclass(name) end,
    pg_catalog.to_regclass(pg_catalog.quote_ident(name)))
$$;

create function headwater.enable_reactivity(name text) returns text
language sql volatile
as $$
  select headwater.enable_table(headwater.check_capturable(headwater.find_table(name), name))
$$;

create function headwater.disable_reactivity(name text) returns text
language plpgsql
as $$
declare
  relation pg_catalog.regclass := headwater.find_table(name);
begin
  if relation is null then
    raise exception 'headwater: there is no table %', name
      using errcode = 'undefined_table', hint = 'headwater status lists the tables that are enabled.';
  end if;
  return headwater.disable_table(relation);
end $$;

revoke all on all functions in schema headwater from public;
