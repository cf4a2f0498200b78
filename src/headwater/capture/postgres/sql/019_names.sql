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
