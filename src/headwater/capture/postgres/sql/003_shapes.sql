-- Shapes: what a table looks like, as the log remembers it and as capture functions are made for it.

-- Columns and key of a relation as jsonb; the key is empty where there is no primary key.
create function headwater.describe(relation oid) returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
set quote_all_identifiers = off
as $$
  with recursive base_types (attnum, typid) as (
    select a.attnum, a.atttypid
    from pg_attribute a
    where a.attrelid = relation and a.attnum > 0 and not a.attisdropped
    union all
    select b.attnum, t.typbasetype
    from base_types b join pg_type t on t.oid = b.typid
    where t.typtype = 'd'
  ),
  described as (
    select
      a.attnum,
      jsonb_strip_nulls(jsonb_build_object(
        'name', a.attname,
        'type', format_type(b.typid, null),
        'declared', format_type(a.atttypid, a.atttypmod),
        'enum', case when t.typtype = 'e' then true end,
        'collation', case
          when a.attcollation = 0 then null
          when (case when l.collprovider = 'd' then
                  -- Columns that hold an ICU or built-in locale were renamed from release to release.
                  (select coalesce(to_jsonb(d) ->> 'datlocale', to_jsonb(d) ->> 'daticulocale', datcollate)
                   from pg_database d where datname = current_database())
                else coalesce(to_jsonb(l) ->> 'colllocale', to_jsonb(l) ->> 'colliculocale', l.collcollate) end)
               in ('C', 'POSIX', 'C.UTF-8', 'C.UTF8', 'C.utf8') then 'C'
          else l.collname end)) as col
    from pg_attribute a
    join base_types b on b.attnum = a.attnum
    join pg_type t on t.oid = b.typid and t.typtype <> 'd'
    left join pg_collation l on l.oid = a.attcollation
    where a.attrelid = relation
  )
  select jsonb_build_object(
    'schema', n.nspname,
    'name', c.relname,
    'columns', (select jsonb_agg(col order by attnum) from described),
    'key', coalesce((
      select jsonb_agg(a.attname order by k.ordinality)
      from pg_index i
      cross join unnest(i.indkey::int2[]) with ordinality k (attnum, ordinality)
      join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
      where i.indrelid = relation and i.indisprimary and k.ordinality <= i.indnkeyatts), '[]'))
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
  where c.oid = relation
$$;

create function headwater.shape_id(relation oid) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$ select hashtextextended(relation::text || headwater.describe(relation)::text, 0) $$;

create function headwater.register_shape(relation oid) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  shape bigint := headwater.shape_id(relation);
  d jsonb;
begin
  if not exists (select from headwater.shapes where id = shape) then
    d := headwater.describe(relation);
    insert into headwater.shapes (id, relid, schema_name, table_name, columns, key)
    values (shape, relation, d ->> 'schema', d ->> 'name', d -> 'columns',
            array(select jsonb_array_elements_text(d -> 'key')));
  end if;
  return shape;
end $$;

-- The table and everything below it, by partitioning or inheritance.
create function headwater.members_of(root oid) returns setof oid
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  with recursive members (oid) as (
    select root
    union
    select i.inhrelid from members m join pg_inherits i on i.inhparent = m.oid
  )
  select oid from members
$$;

-- Whether statements on the relation must leave a mark before they start: its AFTER triggers may
-- write to the table again and be logged first, or it hands rows to partitions we do not know yet.
create function headwater.needs_mark(member oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select exists (select from pg_class where oid = member and relkind = 'p')
      or exists (
        select from pg_trigger
        where tgrelid = member
          and tgtype & 66 = 0 -- neither before nor instead of
          and tgname not like 'headwater\_%'
          and (not tgisinternal or exists (
            -- A foreign key to itself that cascades writes to the table as well.
            select from pg_constraint
            where oid = tgconstraint and contype = 'f' and conrelid = confrelid
              and (confdeltype not in ('a', 'r') or confupdtype not in ('a', 'r')))))
$$;

-- Changes whenever the function made for a member no longer fits it.
create function headwater.fingerprint(member oid, root oid) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select hashtextextended(concat_ws(' ',
    headwater.shape_id(root), headwater.describe(member), headwater.needs_mark(member),
    member = root or member in (select headwater.members_of(root)),
    current_setting('max_prepared_transactions'),
    (select string_agg(concat(tgname, tgenabled), ' ' order by tgname)
     from pg_trigger where tgrelid = member and tgname like 'headwater\_%')), 0)
$$;

-- Declared immutable so that it is evaluated when the guard is planned, not at every write. The plan
-- holds the table's oid and is thrown away when the table is altered, so it is never stale. In a
-- transaction with a snapshot of its own the catalog may be older than the table: the answer is no.
create function headwater.fits(member oid, root oid, fingerprint bigint) returns boolean
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select current_setting('transaction_isolation') = 'read committed'
     and coalesce(headwater.fingerprint(member, root) = fingerprint, false)
$$;
