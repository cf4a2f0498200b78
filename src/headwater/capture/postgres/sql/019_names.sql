-- Names: what is a user's own is never chosen for what is ours. Functions have a search path of their
-- own, or name every operator and type with its schema. See docs/howto/existing-database.md.

-- How values of a relation's columns are compared in SQL, for the types that an extension brought: the
-- operators <, <=, =, >=, >, <> of the type's own order, by column. All other types have PostgreSQL's.
-- Only a superuser makes an operator class, so these are no table owner's.
create function headwater.operators(relation oid) returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  with recursive base_types (name, typid) as (
    select a.attname, a.atttypid from pg_attribute a
    where a.attrelid = relation and a.attnum > 0 and not a.attisdropped
    union all
    select b.name, t.typbasetype
    from base_types b join pg_type t on t.oid = b.typid
    where t.typtype = 'd'
  )
  select coalesce(jsonb_object_agg(b.name, found.operators), '{}')
  from base_types b
  join pg_type t on t.oid = b.typid and t.typtype = 'b' and t.typcategory <> 'A'
    and t.typnamespace <> 'pg_catalog'::regnamespace
  cross join lateral (
    select jsonb_agg(format('operator(%I.%s)', n.nspname, o.oprname) order by s.place) as operators
    from pg_opclass c
    join pg_am m on m.oid = c.opcmethod and m.amname = 'btree'
    join pg_amop p on p.amopfamily = c.opcfamily
      and p.amoplefttype = c.opcintype and p.amoprighttype = c.opcintype
    join pg_operator q on q.oid = p.amopopr
    cross join lateral (values (p.amopstrategy::integer, q.oid), (6, q.oprnegate)) s (place, oid)
    join pg_operator o on o.oid = s.oid
    join pg_namespace n on n.oid = o.oprnamespace
    where c.opcintype = t.oid and c.opcdefault and (s.place < 6 or p.amopstrategy = 3)
    having count(*) = 6
  ) found
$$;

-- The schemas that are searched with a path, in their order, but for ours: a bare name is never one of
-- our tables. To a role that is called headwater, "$user" in a path stands for this schema.
create function headwater.schemas_of(path text) returns name[]
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  schemas name[];
begin
  perform set_config('search_path', path, true);
  schemas := pg_catalog.current_schemas(false);
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  return array_remove(schemas, 'headwater');
end $$;

-- The caller's search path. Where that is the path of our own statements, the one that the session began
-- with.
create function headwater.session_path() returns text
language sql stable
as $$
  select case
    when pg_catalog.current_setting('search_path') operator(pg_catalog.=) 'pg_catalog, pg_temp'
    then (select s.reset_val from pg_catalog.pg_settings s where s.name operator(pg_catalog.=) 'search_path')
    else pg_catalog.current_setting('search_path') end
$$;

-- The table that a name means in a search path. A name that only fits when taken as it stands ("Order
-- Lines" without quotes) is found too, and so is a label ("sales.Order Lines").
create function headwater.find_table_in(name text, path text) returns regclass
language plpgsql stable
set search_path = pg_catalog, pg_temp
set standard_conforming_strings = on
as $$
declare
  is_written boolean := name !~ '\s' or name ~ '"';
  found regclass;
begin
  perform set_config('search_path', (
    select coalesce(string_agg(quote_ident(s), ', ' order by place), '')
    from unnest(headwater.schemas_of(path)) with ordinality e (s, place)), true);
  if is_written then
    found := pg_catalog.to_regclass(name);
  end if;
  if found is null then
    found := pg_catalog.to_regclass(pg_catalog.quote_ident(name));
  end if;
  perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  return coalesce(found, (
    select c.oid::regclass
    from pg_namespace n
    join pg_class c on c.relnamespace = n.oid
      and c.relname = substr(name, length(n.nspname) + 2)::name
    where starts_with(name, n.nspname || '.')
    limit 1));
end $$;

-- Finds a table by the name a person typed, in the caller's own search path.
create or replace function headwater.find_table(name text) returns regclass
language sql stable
as $$ select headwater.find_table_in(name, headwater.session_path()) $$;

-- Parsed when they are made: again, now that installing pins the path.
create or replace function headwater.may_notify() returns boolean
language sql volatile
return pg_catalog.current_setting('max_prepared_transactions') operator(pg_catalog.=) '0'
   and headwater.readers_sleep();

-- For statements that no function fits; what they leave set is what was set. It has no path of its own,
-- which would undo what it sets.
create or replace function headwater.swap_formats(relation oid, previous jsonb default null) returns jsonb
language plpgsql
as $$
declare
  setting record;
  found jsonb := '{}';
begin
  for setting in
    select f.name, coalesce(previous operator(pg_catalog.->>) f.name, f.value) as value
    from headwater.format_settings(relation) f
  loop
    found := found operator(pg_catalog.||)
      pg_catalog.jsonb_build_object(setting.name, pg_catalog.current_setting(setting.name));
    perform pg_catalog.set_config(setting.name, setting.value, true);
  end loop;
  return found;
end $$;

-- After a dump was restored or a database copied: oids and transaction ids mean something else here.
-- Begins a new log and captures again, by their names, the tables that were captured. Where the right is
-- missing for one of them, a warning says which, the others are captured, and it is listed as disabled.
--
-- A trigger of a table that is another role's stays: only its owner may drop it. One that stays calls
-- headwater.capture_truncate, which looks up whose it is. What calls a function made for one table goes
-- with that function.
create or replace function headwater.adopt() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  name text;
  root regclass;
  captured text[] := array(
    select format('%I.%I', schema_name, table_name) from headwater.tables where enabled);
begin
  for name in
    select proname from pg_proc
    where pronamespace = 'headwater'::regnamespace and proname ~ '^(capture|mark)_[0-9]+_'
  loop
    execute format('drop function headwater.%I() cascade', name);
  end loop;
  for name in
    select format('%I on %s', own.tgname, own.tgrelid::regclass)
    from (select distinct t.tgrelid from pg_trigger t join pg_class c on c.oid = t.tgrelid
          where pg_has_role(c.relowner, 'usage')) r, headwater.own_triggers(r.tgrelid) own
    where own.tgparentid = 0
  loop
    execute 'drop trigger ' || name;
  end loop;
  truncate headwater.log, headwater.shapes, headwater.captures, headwater.tables;
  perform setval('headwater.log_floor', 0);
  update headwater.installation
  set home = headwater.home(), id = left(md5(random()::text || clock_timestamp()::text), 16);
  foreach name in array captured loop
    root := to_regclass(name);
    if root is not null then
      begin
        perform headwater.enable_table(root);
      exception when insufficient_privilege then
        insert into headwater.tables (relid, schema_name, table_name, enabled)
        select root, n.nspname, c.relname, false
        from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = root;
        raise warning 'headwater: % is not captured in this database: %', headwater.label(root), sqlerrm
          using hint = format(
            case when (select relkind = 'p' or relhassubclass from pg_class where oid = root)
            then 'As a superuser: grant %2$s to %3$I; then: headwater enable %4$s'
            else 'As its owner: grant trigger on %1$s to %3$I; then: headwater enable %4$s' end,
            root, (select relowner::regrole from pg_class where oid = root), current_user, headwater.label(root));
      end;
    end if;
  end loop;
end $$;
