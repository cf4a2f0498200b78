-- Statements: the INSERT into the log that captures one statement on a relation. Written out once in
-- the relation's function, and built anew for each write after DDL; by the same code either way.

-- Whether a type's owner may be trusted with our rights. to_json calls a cast to json where a type
-- has one, and whoever owns the type can make one: that function would run as the owner of ours.
create function headwater.trusts(type oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  with recursive parts (oid) as (
    select type
    union
    select part.oid
    from parts p
    join pg_type t on t.oid = p.oid
    cross join lateral (
      select t.typelem where t.typelem <> 0
      union all
      select t.typbasetype where t.typbasetype <> 0
      union all
      select a.atttypid from pg_attribute a
      where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped
    ) part (oid)
  )
  select bool_and(t.typowner = current_user::regrole or r.rolsuper)
  from parts p join pg_type t on t.oid = p.oid join pg_roles r on r.oid = t.typowner
$$;

-- The image of a row of `member` as a row of `root`. Mostly that is the row itself; it is put
-- together column by column where a child has columns the table has not, for virtual columns,
-- which triggers see as null, and for types of owners we do not trust, which are taken as text.
create function headwater.image(alias text, member oid, root oid) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  with columns_of as (
    select
      r.attnum,
      a.attname,
      a.attgenerated = 'v' as is_virtual,
      headwater.trusts(a.atttypid) as is_trusted,
      pg_get_expr(d.adbin, d.adrelid) as expression
    from pg_attribute r
    join pg_attribute a on a.attrelid = member and a.attname = r.attname and not a.attisdropped
    left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    where r.attrelid = root and r.attnum > 0 and not r.attisdropped
  )
  select case
    when bool_and(is_trusted and not is_virtual)
         and count(*) = (select count(*) from pg_attribute
                         where attrelid = member and attnum > 0 and not attisdropped)
      then format('pg_catalog.row_to_json(%s.*)', alias)
    else format(
      '(select pg_catalog.row_to_json(image.*) from (select %s from (select %s.*) v) image)',
      string_agg(case
        when is_virtual then format('(%s) as %I', expression, attname)
        when is_trusted then format('v.%I', attname)
        else format(
          'case when v.%1$I is distinct from null then pg_catalog.format(''%%s'', v.%1$I) end as %1$I',
          attname)
      end, ', ' order by attnum),
      alias)
  end
  from columns_of
$$;

-- The settings that decide how values of a relation's types are written; pinned while it is
-- captured, so that images do not depend on the writer's session. Each costs a little every time.
create function headwater.format_settings(relation oid) returns table (name text, value text)
language sql stable
set search_path = pg_catalog, pg_temp
set quote_all_identifiers = off
as $$
  select s.name, s.value
  from (values ('timezone', 'UTC'), ('datestyle', 'ISO'), ('intervalstyle', 'iso_8601'),
               ('bytea_output', 'hex'), ('extra_float_digits', '1'), ('lc_monetary', 'C'))
       s (name, value)
  where exists (
    select from pg_attribute a
    cross join lateral (select case
      when format_type(a.atttypid, null) = 'timestamp with time zone' then 'timezone'
      when format_type(a.atttypid, null) in ('real', 'double precision') then 'extra_float_digits'
      when format_type(a.atttypid, null) = 'bytea' then 'bytea_output'
      when format_type(a.atttypid, null) = 'interval' then 'intervalstyle'
      when format_type(a.atttypid, null) in (
        'smallint', 'integer', 'bigint', 'numeric', 'boolean', 'text', 'character varying',
        'character', 'name', 'uuid', 'date', 'timestamp without time zone', 'json', 'jsonb')
        then 'none'
      else 'all' end) needs (setting)
    where a.attrelid = relation and a.attnum > 0 and not a.attisdropped
      and needs.setting in (s.name, 'all'))
$$;

-- Who writes, as the writer said for its transaction: user, function, trace. A setting that was made
-- local to an earlier transaction is an empty text afterwards; readers take that for nobody.
create function headwater.actor() returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select string_agg(format('pg_catalog.current_setting(%L, true)', 'headwater.' || name), ', ')
  from unnest(array['user_id', 'function_name', 'trace_id']) name
$$;

-- Whether one statement may bring several versions of a row, or several rows of one key: cascades
-- of foreign keys touch a row once for each, and a key is not unique across inheritance children.
create function headwater.may_repeat_rows(member oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select exists (
           select from pg_constraint
           where conrelid = member and contype = 'f'
             and (confupdtype not in ('a', 'r') or confdeltype in ('n', 'd')))
      or exists (
           select from pg_inherits i join pg_class c on c.oid = i.inhparent
           where i.inhparent = member and c.relkind = 'r')
$$;

-- A transition table with its keys, images, and which version of its key each row is.
create function headwater.numbered(alias text, source text, keys text[], image text) returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select format(
    '(select r.*, pg_catalog.row_number() over (partition by %1$s order by r.hw_number) as hw_turn
      from (select %2$s, %3$s as hw_image, pg_catalog.row_number() over () as hw_number
            from %4$s %5$s) r) %5$s',
    (select string_agg('r.' || key, ', ') from unnest(keys) key),
    (select string_agg(alias || '.' || key, ', ') from unnest(keys) key),
    image, source, alias)
$$;

-- The INSERT into the log for one statement on `member`.
create function headwater.capture_statement(member oid, root oid, operation text, shape bigint)
returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  before_image text := headwater.image('o', member, root);
  after_image text := headwater.image('n', member, root);
  actor constant text := headwater.actor();
  first_key text;
  same_key text;
  keys text[];
begin
  if operation = 'INSERT' then
    return format(
      'insert into headwater.log (op, shape, after, user_id, function_name, trace_id)
       select ''I'', %s, %s, %s from new_rows n', shape, after_image, actor);
  elsif operation = 'DELETE' then
    return format(
      'insert into headwater.log (op, shape, before, user_id, function_name, trace_id)
       select ''D'', %s, %s, %s from old_rows o', shape, before_image, actor);
  end if;
  -- Built-in types are compared by the operator of the key's index, text by its bytes, so that a key
  -- that changed only for the eye ('a' to 'A' under a case-blind collation) is a delete and an insert
  -- too. Of other types only the text is looked at: an operator could be somebody's code.
  select
    min(quote_ident(a.attname)) filter (where k.ordinality = 1),
    array_agg(quote_ident(a.attname)),
    string_agg(
      format(
        case
          when a.attcollation = 0 and t.typnamespace = 'pg_catalog'::regnamespace and e.oprname is not null
            then 'o.%1$I operator(pg_catalog.%2$s) n.%1$I'
          when a.attcollation <> 0 and t.typnamespace = 'pg_catalog'::regnamespace
            then 'o.%1$I::pg_catalog.text collate "C" operator(pg_catalog.=) n.%1$I::pg_catalog.text collate "C"'
          else 'pg_catalog.format(''%%s'', o.%1$I) collate "C" operator(pg_catalog.=) pg_catalog.format(''%%s'', n.%1$I) collate "C"'
        end, a.attname, e.oprname),
      ' and ')
  into first_key, keys, same_key
  from pg_index i
  cross join unnest(i.indkey::int2[], i.indclass::oid[]) with ordinality k (attnum, opclass, ordinality)
  join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
  join pg_type t on t.oid = a.atttypid
  left join lateral (
    select o.oprname
    from pg_opclass c
    join pg_am m on m.oid = c.opcmethod and m.amname = 'btree'
    join pg_amop p on p.amopfamily = c.opcfamily and p.amopstrategy = 3
      and p.amoplefttype = c.opcintype and p.amoprighttype = c.opcintype
    join pg_operator o on o.oid = p.amopopr and o.oprnamespace = 'pg_catalog'::regnamespace
    where c.oid = k.opclass
  ) e on true
  where i.indrelid = root and i.indisprimary and k.ordinality <= i.indnkeyatts;
  -- A full join, because a changed key leaves both of its sides alone, and because it is never
  -- planned as a nested loop: the plan is made for one row and must do for a million.
  if not headwater.may_repeat_rows(member) then
    return format(
      'insert into headwater.log (op, shape, before, after, user_id, function_name, trace_id)
       select case when o.%1$s is null then ''I'' when n.%1$s is null then ''D'' else ''U'' end::pg_catalog."char",
              %2$s,
              case when o.%1$s is not null then %3$s end,
              case when n.%1$s is not null then %4$s end,
              %5$s
       from old_rows o full join new_rows n on %6$s
       where (o.* operator(pg_catalog.*=) n.*) is not true',
      first_key, shape, before_image, after_image, actor, same_key);
  end if;
  -- The versions of a row are paired in the order in which they were made.
  return format(
    'insert into headwater.log (op, shape, before, after, user_id, function_name, trace_id)
     select case when o.%1$s is null then ''I'' when n.%1$s is null then ''D'' else ''U'' end::pg_catalog."char",
            %2$s, o.hw_image, n.hw_image, %3$s
     from %4$s full join %5$s on %6$s and o.hw_turn operator(pg_catalog.=) n.hw_turn
     where (o.hw_image::pg_catalog.text operator(pg_catalog.=) n.hw_image::pg_catalog.text) is not true
     order by coalesce(o.hw_turn, n.hw_turn)',
    first_key, shape, actor,
    headwater.numbered('o', 'old_rows', keys, before_image),
    headwater.numbered('n', 'new_rows', keys, after_image),
    same_key);
end $$;

-- Sets what headwater.format_settings names, and returns it as it was before. For statements that
-- no function fits; what they leave set is what was set.
create function headwater.swap_formats(relation oid, previous jsonb default null) returns jsonb
language plpgsql
as $$
declare
  setting record;
  found jsonb := '{}';
begin
  for setting in
    select f.name, coalesce(previous ->> f.name, f.value) as value
    from headwater.format_settings(relation) f
  loop
    found := found operator(pg_catalog.||)
      pg_catalog.jsonb_build_object(setting.name, pg_catalog.current_setting(setting.name));
    perform pg_catalog.set_config(setting.name, setting.value, true);
  end loop;
  return found;
end $$;

-- The same for a statement that no function fits: the table was altered since. Without a key rows
-- cannot be told apart, and all there is to say is that the table must be read again.
create function headwater.fresh_statement(member oid, root oid, operation text) returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  shape bigint;
  statement text;
begin
  if member not in (select headwater.members_of(root)) then
    return null; -- a partition or child that has left the table
  end if;
  shape := headwater.register_shape(root);
  if headwater.describe(root) -> 'key' = '[]' then
    return format('insert into headwater.log (op, shape) select ''R'', %s', shape);
  end if;
  statement := headwater.capture_statement(member, root, operation, shape);
  if current_setting('transaction_isolation') = 'read committed' then
    return statement;
  end if;
  if operation = 'UPDATE' and headwater.may_repeat_rows(member) then
    return statement; -- its images have no table to be looked at through
  end if;
  return statement || format(
    '%s headwater.same_columns(%s, %L)',
    case operation when 'UPDATE' then ' and' else ' where' end,
    case operation when 'DELETE' then headwater.image('o', member, root)
                   when 'INSERT' then headwater.image('n', member, root)
                   else format('coalesce(%s, %s)', headwater.image('n', member, root), headwater.image('o', member, root)) end,
    array(select jsonb_array_elements(headwater.describe(root) -> 'columns') ->> 'name'));
end $$;

-- A transaction with a snapshot of its own writes to a table that was altered after it began, and
-- reads the catalog as it was before. It cannot be logged rightly; a new attempt will be.
create function headwater.same_columns(image json, names text[]) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if array(select json_object_keys(image) order by 1) <> array(select unnest(names) order by 1) then
    raise exception 'headwater: the table was altered after this transaction began'
      using errcode = 'serialization_failure', hint = 'Try the transaction again.';
  end if;
  return true;
end $$;
