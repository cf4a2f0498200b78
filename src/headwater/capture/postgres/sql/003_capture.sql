-- Capture: triggers that write the log, one function a captured relation.
--
-- A relation's function holds the INSERT for the shape the relation had when it was made, so that a
-- write costs one cached plan. It opens with a guard that PostgreSQL evaluates when it plans, and
-- plans again when the table is altered: while the shape is the same the fixed statement runs, and
-- after DDL the statement is built anew for each write until headwater.sync_tables makes a new
-- function. Either way the statement comes from headwater.capture_statement.

create table headwater.tables (
  relid oid primary key,
  schema_name text not null,
  table_name text not null,
  enabled boolean not null,
  changed_at timestamptz not null default clock_timestamp()
);

-- The relations with triggers: the table itself, its partitions, its inheritance children.
create table headwater.captures (
  member oid primary key,
  root oid not null,
  fingerprint bigint not null
);

create index on headwater.captures (root);

------------------------------------------------------------------------------------------- shapes

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

--------------------------------------------------------------------------------------- statements

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

------------------------------------------------------------------------------------------ triggers

-- Remembers where the log stood when a statement began (see headwater.needs_mark).
create function headwater.mark() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  perform set_config(
    format('headwater.mark_%s_%s', pg_trigger_depth(), lower(tg_op)),
    (select last_value from headwater.log_seq)::text, true);
  return null;
end $$;

-- Row triggers may have written to the same table while the statement was at work; their changes
-- were logged first but happened later. Gives them new numbers behind the statement's own.
create function headwater.settle(root oid, operation text, depth integer, before_own bigint) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  -- For the statements of a cascading foreign key, BEFORE triggers run one level deeper than AFTER.
  settings text[] := array[
    format('headwater.mark_%s_%s', depth, lower(operation)),
    format('headwater.mark_%s_%s', depth + 1, lower(operation))];
  mark text := coalesce(
    nullif(current_setting(settings[1], true), ''), nullif(current_setting(settings[2], true), ''));
  nested record;
begin
  if mark is null then
    return;
  end if;
  perform set_config(settings[1], '', true), set_config(settings[2], '', true);
  for nested in
    select l.slot, l.seq
    from headwater.log l
    where l.xid = pg_current_xact_id() and l.seq > mark::bigint and l.seq <= before_own
      and l.shape in (select id from headwater.shapes where relid = root)
    order by l.seq
  loop
    update headwater.log set seq = nextval('headwater.log_seq')
    where slot = nested.slot and xid = pg_current_xact_id() and seq = nested.seq;
  end loop;
end $$;

-- A row written to a partition that was attached after the table was enabled and has no function of
-- its own yet. Cloned onto it by PostgreSQL; silent while a statement on a parent is at work, which
-- sees the same row.
create function headwater.capture_row() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC' set datestyle = 'ISO' set intervalstyle = 'iso_8601'
set bytea_output = 'hex' set extra_float_digits = 1 set lc_monetary = 'C'
as $$
<<capture_row>>
declare
  root oid := pg_partition_root(tg_relid);
  take text;
  before_image json;
  after_image json;
  key text[];
  shape bigint;
begin
  if exists (
       select from generate_series(pg_trigger_depth(), pg_trigger_depth() + 1) depth,
                   unnest(array['insert', 'update', 'delete']) operation
       where current_setting(format('headwater.mark_%s_%s', depth, operation), true) <> '')
     or not exists (select from headwater.tables where relid = root and enabled)
     or exists (select from headwater.captures c where c.member = tg_relid and c.root = capture_row.root) then
    return null;
  end if;
  take := format('select %s from (select ($1).*) r', headwater.image('r', tg_relid, root));
  if tg_op <> 'INSERT' then
    execute take into before_image using old;
  end if;
  if tg_op <> 'DELETE' then
    execute take into after_image using new;
  end if;
  if before_image::text = after_image::text then
    return null;
  end if;
  shape := headwater.register_shape(root);
  key := (select s.key from headwater.shapes s where s.id = shape limit 1);
  insert into headwater.log (op, shape, before, after, user_id, function_name, trace_id)
  select i.op::"char", shape, i.before, i.after,
         current_setting('headwater.user_id', true),
         current_setting('headwater.function_name', true),
         current_setting('headwater.trace_id', true)
  from (
    select 'U' as op, before_image as before, after_image as after
    where headwater.key_of(before_image, key)::text = headwater.key_of(after_image, key)::text
    union all
    select 'D', before_image, null
    where before_image is not null
      and headwater.key_of(before_image, key)::text is distinct from headwater.key_of(after_image, key)::text
    union all
    select 'I', null, after_image
    where after_image is not null
      and headwater.key_of(before_image, key)::text is distinct from headwater.key_of(after_image, key)::text
  ) i;
  if headwater.may_notify() then
    perform headwater.notify(shape, tg_op, 1, before_image, after_image);
  end if;
  return null;
end $$;

-- TRUNCATE of the whole table is one change. Of a partition or of a table with inheritance children
-- it is the deletion of the rows of that relation alone, unless the table was emptied just before.
create function headwater.capture_truncate() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC' set datestyle = 'ISO' set intervalstyle = 'iso_8601'
set bytea_output = 'hex' set extra_float_digits = 1 set lc_monetary = 'C'
as $$
declare
  root oid := (select c.root from headwater.captures c where c.member = tg_relid);
  shape bigint;
  actor text[] := array[
    current_setting('headwater.user_id', true),
    current_setting('headwater.function_name', true),
    current_setting('headwater.trace_id', true)];
  logged bigint;
  whole boolean;
begin
  if root is null or tg_relid not in (select headwater.members_of(root)) then
    return null;
  end if;
  shape := headwater.register_shape(root);
  whole := tg_relid = root and (
    exists (select from pg_class where oid = root and relkind = 'p')
    or not exists (select from pg_inherits where inhparent = root));
  if whole then
    insert into headwater.log (op, shape, user_id, function_name, trace_id)
    values ('T', shape, actor[1], actor[2], actor[3]);
    logged := 1;
  elsif (select l.op from headwater.log l
         where l.xid = pg_current_xact_id()
           and l.shape in (select id from headwater.shapes where relid = root)
         order by l.seq desc limit 1) = 'T' then
    return null;
  elsif not has_table_privilege(tg_relid, 'SELECT') or row_security_active(tg_relid) then
    -- The rows are not ours to read, or not all of them.
    insert into headwater.log (op, shape) values ('R', shape);
    logged := 1;
  else
    execute format(
      'insert into headwater.log (op, shape, before, user_id, function_name, trace_id)
       select ''D'', %s, %s, $1, $2, $3 from only %s o',
      shape, headwater.image('o', tg_relid, root), tg_relid::regclass)
      using actor[1], actor[2], actor[3];
    get diagnostics logged = row_count;
  end if;
  if logged > 0 and headwater.may_notify() then
    perform headwater.notify(shape, case when whole then 'TRUNCATE' else 'DELETE' end, logged);
  end if;
  return null;
end $$;

-- The image of a transition table's row, if it has one row only.
create function headwater.only_image(alias text, source text, member oid, root oid) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select format(
    '(select case when pg_catalog.count(*) operator(pg_catalog.=) 1 then (pg_catalog.array_agg(%1$s))[1] end
      from (select * from %2$s limit 2) %3$s)',
    headwater.image(alias, member, root), source, alias)
$$;

-- Makes (or makes anew) the functions and the triggers of one relation. The functions are short:
-- plpgsql prepares every expression anew in each transaction, and most transactions write one row.
create function headwater.make_capture(member oid, root oid) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $body$
declare
  shape bigint := headwater.register_shape(root);
  fingerprint bigint := headwater.fingerprint(member, root);
  marked boolean := headwater.needs_mark(member);
  settings text := (
    select string_agg(format(' set %s = %L', f.name, f.value), '')
    from headwater.format_settings(member) f);
  operation text;
  transition text;
  source text;
begin
  foreach operation in array array['insert', 'update', 'delete'] loop
    source := format(
      $function$
#variable_conflict use_column
declare
  logged bigint;
  statement text;
  formats jsonb;
  mark bigint;
begin
  %1$s
  if (tg_relid = '%2$s'::oid or tg_relid = '%3$s'::oid)
     and headwater.fits('%2$s'::oid, '%3$s'::oid, %4$L::bigint) then
    %5$s;
    get diagnostics logged = row_count;
    %6$s
  else
    statement := headwater.fresh_statement(tg_relid, '%3$s'::oid, tg_op);
    if statement is not null then
      formats := headwater.swap_formats(tg_relid);
      execute statement;
      get diagnostics logged = row_count;
      perform headwater.swap_formats(tg_relid, formats);
    end if;
    if logged > 0 and headwater.may_notify() then
      perform headwater.notify(%7$L::bigint, tg_op, logged);
    end if;
  end if;
  %8$s
  return null;
end $function$,
      case when marked then 'select last_value into mark from headwater.log_seq;' end,
      member, root, fingerprint,
      headwater.capture_statement(member, root, upper(operation), shape),
      case when current_setting('max_prepared_transactions') = '0' then
        format(
          'if logged > 0 and headwater.readers_sleep() then
             perform headwater.notify(%L::bigint, tg_op, logged, %s, %s);
           end if;',
          shape,
          case when operation = 'insert' then 'null' else headwater.only_image('o', 'old_rows', member, root) end,
          case when operation = 'delete' then 'null' else headwater.only_image('n', 'new_rows', member, root) end)
      end,
      shape,
      case when marked then
        format('perform headwater.settle(''%s''::oid, tg_op, pg_trigger_depth(), mark);', root) end);
    execute format(
      'create or replace function headwater.capture_%s_%s() returns trigger'
      ' language plpgsql security definer set search_path = pg_catalog, pg_temp%s as %L',
      member, operation, settings, source);
    execute format('revoke execute on function headwater.capture_%s_%s() from public', member, operation);

    transition := case operation
      when 'insert' then 'new table as new_rows'
      when 'update' then 'old table as old_rows new table as new_rows'
      else 'old table as old_rows' end;
    perform headwater.set_trigger(member, 'headwater_' || operation, format(
      'after %1$s on %2$s referencing %3$s for each statement execute function headwater.capture_%4$s_%1$s()',
      operation, member::regclass, transition, member), true);
    perform headwater.set_trigger(member, 'headwater_mark_' || operation, format(
      'before %s on %s for each statement execute function headwater.mark()',
      operation, member::regclass), marked);
  end loop;
  perform headwater.set_trigger(member, 'headwater_truncate', format(
    'before truncate on %s for each statement execute function headwater.capture_truncate()',
    member::regclass), true);
  if member = root then
    perform headwater.set_trigger(member, 'headwater_row', format(
      'after insert or update or delete on %s for each row execute function headwater.capture_row()',
      member::regclass), (select relkind = 'p' from pg_class where oid = member));
  elsif exists (select from pg_trigger where tgrelid = member and tgname = 'headwater_row' and tgenabled <> 'D')
    and exists (select from pg_class where oid = member and relkind = 'r') then
    execute format('alter table only %s disable trigger headwater_row', member::regclass);
  end if;

  return fingerprint;
end $body$;

-- The fingerprint covers the triggers as well, so the functions are made again once these are there.
create function headwater.install_capture(member oid, root oid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  made_for bigint := headwater.make_capture(member, root);
begin
  if made_for <> headwater.fingerprint(member, root) then
    made_for := headwater.make_capture(member, root);
  end if;
  insert into headwater.captures values (member, root, made_for)
  on conflict on constraint captures_pkey do update set root = excluded.root, fingerprint = excluded.fingerprint;
end $$;

-- Creates or drops a trigger only where it is not as wanted: both take a lock that waits for writers.
create function headwater.set_trigger(relation oid, name text, definition text, wanted boolean) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  present boolean := exists (select from pg_trigger where tgrelid = relation and tgname = name);
begin
  if wanted and not present then
    execute format('create trigger %I %s', name, definition);
  elsif present and not wanted then
    execute format('drop trigger %I on %s', name, relation::regclass);
  elsif present and exists (select from pg_trigger where tgrelid = relation and tgname = name and tgenabled = 'D') then
    execute format('alter table only %s enable trigger %I', relation::regclass, name);
  end if;
end $$;

create function headwater.remove_capture(relation oid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  name text;
begin
  if exists (select from pg_class where oid = relation) then
    for name in
      select tgname from pg_trigger
      where tgrelid = relation and tgname like 'headwater\_%' and not tgisinternal
        and tgparentid = 0
    loop
      execute format('drop trigger %I on %s', name, relation::regclass);
    end loop;
  end if;
  for name in select unnest(array['insert', 'update', 'delete']) loop
    execute format('drop function if exists headwater.capture_%s_%s() cascade', relation, name);
  end loop;
  delete from headwater.captures c where c.member = relation;
end $$;

------------------------------------------------------------------------------- enable and disable

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
