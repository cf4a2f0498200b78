-- Resets: what the log says where a table's rows, or what they mean, changed and no row tells it.
--
-- DDL may do so without changing the shape: a column is rewritten (`alter column a type int using
-- a * 1000`), the label of an enum is renamed, a generated column gets another expression, a
-- composite type gets an attribute; and triggers may be disabled while rows are written. For every
-- relation with triggers, headwater.captures remembers how the catalog stood. What differs is a
-- reset: logged by the first write that notices it, or by the next maintenance. Whether a table is
-- captured at all is a row of the log, too, in the transaction that changes it. See
-- docs/design/003-capture-function.md.

-- How the catalog stood when the last reset, if one was due, had been logged. Unknown (after an
-- upgrade) is not the same as before.
alter table headwater.captures
  add column columns_mark bigint,
  add column triggers_mark bigint,
  add column filenode oid,
  add column meaning jsonb,
  add column remembered_in xid8;

-- A type and all that it is made of: elements, base types, attributes, subtypes of ranges.
create function headwater.parts_of(type oid) returns setof oid
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
      union all
      select r.rngsubtype from pg_range r
      where t.typtype in ('r', 'm') and t.oid in (r.rngtypid, r.rngmultitypid)
    ) part (oid)
  )
  select oid from parts
$$;

-- The same as in 004_statements.sql, for roles whose names must be quoted, too.
create or replace function headwater.trusts(type oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select bool_and(r.rolname = current_user or r.rolsuper)
  from headwater.parts_of(type) p join pg_type t on t.oid = p join pg_roles r on r.oid = t.typowner
$$;

-- Columns and key of a relation as jsonb; the key is empty where there is no primary key. Virtual
-- columns (PostgreSQL 18) are only named: they are computed when they are read, which can fail, and
-- are left out of images.
create or replace function headwater.describe(relation oid) returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
set quote_all_identifiers = off
as $$
  with recursive base_types (attnum, typid) as (
    select a.attnum, a.atttypid
    from pg_attribute a
    where a.attrelid = relation and a.attnum > 0 and not a.attisdropped and a.attgenerated <> 'v'
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
  select jsonb_strip_nulls(jsonb_build_object(
    'schema', n.nspname,
    'name', c.relname,
    'columns', (select jsonb_agg(col order by attnum) from described),
    'virtual', (
      select jsonb_agg(attname order by attnum) from pg_attribute
      where attrelid = relation and attnum > 0 and not attisdropped and attgenerated = 'v'),
    'key', coalesce((
      select jsonb_agg(a.attname order by k.ordinality)
      from pg_index i
      cross join unnest(i.indkey::int2[]) with ordinality k (attnum, ordinality)
      join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
      where i.indrelid = relation and i.indisprimary and k.ordinality <= i.indnkeyatts), '[]')))
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
  where c.oid = relation
$$;

-- The image of a row of `member` as a row of `root`. Mostly that is the row itself; it is put
-- together column by column where a child has columns the table has not, where there are virtual
-- columns, and for types of owners we do not trust, which are taken as text.
create or replace function headwater.image(alias text, member oid, root oid) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  with columns_of as (
    select r.attnum, a.attname, headwater.trusts(a.atttypid) as is_trusted
    from pg_attribute r
    join pg_attribute a on a.attrelid = member and a.attname = r.attname and not a.attisdropped
    where r.attrelid = root and r.attnum > 0 and not r.attisdropped and r.attgenerated <> 'v'
  )
  select case
    when bool_and(is_trusted)
         and count(*) = (select count(*) from pg_attribute
                         where attrelid = member and attnum > 0 and not attisdropped)
      then format('pg_catalog.row_to_json(%s.*)', alias)
    else format(
      '(select pg_catalog.row_to_json(image.*) from (select %s) image)',
      string_agg(
        format(
          case
            when is_trusted then '%1$s.%2$I'
            else 'case when %1$s.%2$I is distinct from null then pg_catalog.format(''%%s'', %1$s.%2$I) end as %2$I'
          end, alias, attname),
        ', ' order by attnum))
  end
  from columns_of
$$;

-- Changes with every transaction that alters a column, and with the primary key. A row of the catalog is
-- known by the transaction that wrote it: its place would change when the catalog is vacuumed, and the
-- number of the command is lost in a crash.
create function headwater.columns_mark(relation oid) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select hashtextextended(concat_ws(' ',
    (select string_agg(concat_ws('/', attnum, xmin), ' ' order by attnum)
     from pg_attribute where attrelid = relation and attnum > 0),
    (select concat_ws('/', indkey, indclass) from pg_index where indrelid = relation and indisprimary)), 0)
$$;

-- The triggers of a relation that call a function of ours. A name says too little: a table's owner may
-- call a trigger headwater_something.
create function headwater.own_triggers(relation oid) returns setof pg_trigger
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select t.* from pg_trigger t join pg_proc f on f.oid = t.tgfoid
  where t.tgrelid = relation and f.pronamespace = 'headwater'::regnamespace and not t.tgisinternal
$$;

-- Changes whenever one of our triggers was made, dropped, disabled or enabled: rows may have been
-- written in between that were not captured.
create function headwater.triggers_mark(relation oid, names text default '') returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select hashtextextended(
    string_agg(concat_ws('/', t.tgname, t.tgenabled, t.xmin), ' ' order by t.tgname), 0)
  from pg_trigger t
  where t.tgrelid = relation and t.tgname ~ names
    and t.oid in (select own.oid from headwater.own_triggers(relation) own)
$$;

-- What images of a relation's rows depend on beside the rows: for each column its type, and the
-- expression that it is generated by. For the table itself also what its types are made of: labels,
-- attributes, base types, their owners (who decide whether it is taken as text), casts to json.
-- Built-in types are what they are. New labels are added to it, everything else replaces.
create function headwater.meaning(relation oid, with_types boolean) returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  with columns_of as (
    select a.attnum, a.atttypid, a.attrelid, a.attgenerated
    from pg_attribute a
    where a.attrelid = relation and a.attnum > 0 and not a.attisdropped and a.attgenerated <> 'v'
  ),
  parts (attnum, oid) as (
    select c.attnum, p
    from columns_of c cross join lateral headwater.parts_of(c.atttypid) p
    where with_types and c.atttypid >= 16384 and p >= 16384
  ),
  types as (
    select p.attnum, jsonb_object_agg(p.oid, jsonb_strip_nulls(jsonb_build_object(
      'owner', concat_ws('/', t.typowner, (select r.rolsuper from pg_roles r where r.oid = t.typowner)),
      'base', nullif(t.typbasetype, 0),
      'cast', coalesce((
        select concat_ws('/', k.castfunc, k.castmethod) from pg_cast k
        where k.castsource = t.oid and k.casttarget = 'json'::regtype), 'none'),
      'labels', (select jsonb_object_agg(e.oid, e.enumlabel) from pg_enum e where e.enumtypid = t.oid),
      'attributes', (
        select string_agg(format('%s %I %s', a.attnum, a.attname, a.atttypid), ', ' order by a.attnum)
        from pg_attribute a
        where a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped)))) as parts
    from parts p join pg_type t on t.oid = p.oid
    group by p.attnum
  )
  select coalesce(jsonb_object_agg(c.attnum, jsonb_strip_nulls(jsonb_build_object(
    'type', c.atttypid,
    'expression', case when c.attgenerated = 's' then (
      select md5(d.adbin::text) from pg_attrdef d where d.adrelid = c.attrelid and d.adnum = c.attnum) end,
    'parts', t.parts))), '{}')
  from columns_of c left join types t on t.attnum = c.attnum
$$;

-- How the catalog stands for a relation, as headwater.captures would remember it; all of it in one
-- snapshot (pg_relation_filenode would look past it).
create function headwater.observe(member oid, root oid) returns headwater.captures
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select row(
    member, root, null, headwater.columns_mark(member), headwater.triggers_mark(member),
    (select relfilenode from pg_class where oid = member), headwater.meaning(member, member = root),
    null)::headwater.captures
$$;

-- Whether columns may have been altered after they were remembered, in the same transaction: its
-- savepoints have higher ids than itself. Ids of 32 bits are compared in their circle.
create function headwater.is_altered_since(member oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select exists (
    select from headwater.captures c join pg_attribute a on a.attrelid = c.member
    where c.member = is_altered_since.member and a.attnum > 0
      and mod(a.xmin::text::bigint - mod(c.remembered_in::text::bigint, 4294967296) + 4294967296, 4294967296)
          < 2147483648)
$$;

-- Whether rows changed, or what they mean, since the catalog stood as remembered. TRUNCATE, VACUUM
-- FULL and CLUSTER give a relation new files as a rewriting ALTER does; only the latter writes its
-- columns again. Columns that came without a value, went or were renamed are told by the shape.
create function headwater.is_reset_due(known headwater.captures, seen headwater.captures) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select (known).meaning is null
      or (known).triggers_mark is distinct from (seen).triggers_mark
      or ((known).filenode is distinct from (seen).filenode
          and ((known).columns_mark is distinct from (seen).columns_mark
               or headwater.is_altered_since((seen).member)))
      or not (seen).meaning @> (
        (known).meaning - array(select k from jsonb_object_keys((known).meaning) k where not (seen).meaning ? k))
      or exists ( -- added with a type that may have been altered since it was written
        select from jsonb_each((seen).meaning) c where c.value ? 'parts' and not (known).meaning ? c.key)
      or ((known).columns_mark is distinct from (seen).columns_mark and exists (
        select from pg_attribute a -- added with a default, which the rows before it have now
        where a.attrelid = (seen).member and a.atthasmissing and not (known).meaning ? a.attnum::text))
$$;

-- Changes whenever the function made for a member no longer fits it.
create or replace function headwater.fingerprint(member oid, root oid) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select hashtextextended(concat_ws(' ',
    headwater.shape_id(root),
    headwater.columns_mark(member), headwater.columns_mark(root), headwater.triggers_mark(member),
    headwater.may_repeat_rows(member),
    member = root or member in (select headwater.members_of(root)),
    current_setting('max_prepared_transactions'),
    (select string_agg(concat_ws('/', a.attnum, t.typowner), ' ' order by a.attnum)
     from pg_attribute a join pg_type t on t.oid = a.atttypid
     where a.attrelid = root and a.attnum > 0 and a.atttypid >= 16384)), 0)
$$;

drop function headwater.needs_mark(oid);

-- Says in the log that the table must be read again. Also of one that is gone: in the last shape
-- that it had.
create or replace function headwater.log_reset(root oid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  shape bigint := case
    when exists (select from pg_class where oid = root) then headwater.register_shape(root)
    else (select s.id from headwater.shapes s where s.relid = root order by s.since desc limit 1) end;
begin
  if shape is null then
    return;
  end if;
  insert into headwater.log (op, shape) values ('R', shape);
  if headwater.may_notify() then
    perform headwater.notify(shape, 'RESET', 1);
  end if;
end $$;

-- For a write after DDL: logs the reset that is due. It is remembered for the writes that follow. While
-- another transaction is about to do so, and in one with a snapshot of its own, which must not fail
-- for it, the session remembers it.
create function headwater.log_reset_due(root oid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  name constant text := 'headwater.reset_' || root;
  state text;
begin
  if not exists (
       select from headwater.captures c
       where c.root = log_reset_due.root and headwater.is_reset_due(c, headwater.observe(c.member, c.root))) then
    return;
  end if;
  state := (
    select hashtextextended(string_agg(headwater.observe(c.member, c.root)::text, ' ' order by c.member), 0)
    from headwater.captures c where c.root = log_reset_due.root);
  if current_setting(name, true) = state then
    return;
  end if;
  perform set_config(name, state, false);
  if current_setting('transaction_isolation') = 'read committed' then
    perform from headwater.captures c where c.member = log_reset_due.root for update skip locked;
    if found then
      perform headwater.remember(headwater.observe(c.member, c.root))
      from headwater.captures c where c.root = log_reset_due.root;
    end if;
  end if;
  perform headwater.log_reset(root);
end $$;

create function headwater.remember(seen headwater.captures) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
  update headwater.captures c
  set columns_mark = (seen).columns_mark, triggers_mark = (seen).triggers_mark,
      filenode = (seen).filenode, meaning = (seen).meaning, remembered_in = pg_current_xact_id()
  where c.member = (seen).member
$$;

-- The statement that captures a write that no function fits: the table was altered since. Without a
-- key rows cannot be told apart, and all there is to say is that the table must be read again.
create or replace function headwater.fresh_statement(member oid, root oid, operation text) returns text
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
  if exists (
       select from headwater.captures c
       where c.member in (fresh_statement.member, fresh_statement.root)
         and (c.columns_mark is distinct from headwater.columns_mark(c.member)
              or c.triggers_mark is distinct from headwater.triggers_mark(c.member))) then
    perform headwater.log_reset_due(root);
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

-- Creates or drops a trigger only where it is not as wanted: both take a lock that waits for writers.
-- Ours fire also with session_replication_role = replica, or rows would change in silence; only the
-- table's owner may say that. One that fires in all other sessions is left to headwater.fire_always.
create or replace function headwater.set_trigger(relation oid, name text, definition text, wanted boolean)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  state "char" := (select tgenabled from pg_trigger where tgrelid = relation and tgname = name);
begin
  if not wanted then
    if state is not null then
      execute format('drop trigger %I on %s', name, relation::regclass);
    end if;
    return;
  end if;
  if state is null then
    execute format('create trigger %I %s', name, definition);
  end if;
  if state is null or state in ('D', 'R') then
    if (select pg_has_role(relowner, 'usage') from pg_class where oid = relation) then
      execute format('alter table only %s enable always trigger %I', relation::regclass, name);
    elsif state is not null then
      execute format('alter table only %s enable trigger %I', relation::regclass, name);
    end if;
  end if;
end $$;

-- Has the triggers of a relation fire in every session, where they are older than that or somebody
-- enabled them again. It takes a lock, so only if no one writes; there will be another occasion. That
-- we touch them is no reset; whether somebody else did is asked under the lock.
create function headwater.fire_always(relation oid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  name text;
  untouched boolean;
begin
  if not exists (
       select from headwater.own_triggers(relation) where tgenabled = 'O')
     or not (select pg_has_role(relowner, 'usage') from pg_class where oid = relation) then
    return;
  end if;
  execute format('lock table only %s in share row exclusive mode nowait', relation::regclass);
  untouched := exists (
    select from headwater.captures c
    where c.member = relation and c.triggers_mark = headwater.triggers_mark(relation));
  for name in
    select tgname from headwater.own_triggers(relation) where tgenabled = 'O'
  loop
    execute format('alter table only %s enable always trigger %I', relation::regclass, name);
  end loop;
  update headwater.captures c set triggers_mark = headwater.triggers_mark(relation)
  where c.member = relation and untouched;
exception when lock_not_available then
  null;
end $$;

-- The fingerprint covers the triggers as well, so the functions are made again once these are there.
create or replace function headwater.install_capture(member oid, root oid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  made_for bigint := headwater.make_capture(member, root);
begin
  if made_for <> headwater.fingerprint(member, root) then
    made_for := headwater.make_capture(member, root);
  end if;
  insert into headwater.captures (member, root, fingerprint) values (member, root, made_for)
  on conflict on constraint captures_pkey do update set root = excluded.root, fingerprint = excluded.fingerprint;
end $$;

create or replace function headwater.remove_capture(relation oid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  name text;
begin
  if exists (select from pg_class where oid = relation) then
    for name in
      select tgname from headwater.own_triggers(relation) where tgparentid = 0
    loop
      execute format('drop trigger %I on %s', name, relation::regclass);
    end loop;
  end if;
  for name in select unnest(array['insert', 'update', 'delete']) loop
    execute format('drop function if exists headwater.capture_%1$s_%2$s(), headwater.mark_%1$s_%2$s() cascade',
                   relation, name);
  end loop;
  delete from headwater.captures c where c.member = relation;
end $$;

-- Whether anything is to be done for a table: it, or a relation below it, is not as it was.
create function headwater.is_in_step(root oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select not exists (
           select from headwater.members_of(root) m
           left join headwater.captures c on c.member = m and c.root = is_in_step.root
           where c.fingerprint is distinct from headwater.fingerprint(m, is_in_step.root)
              or headwater.is_reset_due(c, headwater.observe(m, is_in_step.root)))
     and not exists (
           select from headwater.captures c
           where c.root = is_in_step.root and c.member not in (select headwater.members_of(is_in_step.root)))
     and exists (
           select from headwater.tables t
           join pg_class c on c.oid = t.relid join pg_namespace n on n.oid = c.relnamespace
           where t.relid = is_in_step.root and t.schema_name = n.nspname and t.table_name = c.relname)
$$;

-- Brings one table's triggers and functions up to its present shape and members. Returns whether
-- anything was done. Whatever no row told is a reset: partitions that came with rows or went, DDL
-- that changed rows, triggers that were not as they should be.
create or replace function headwater.sync_table(root oid) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  relation record;
  seen headwater.captures;
  logging constant text := '^headwater_(insert|update|delete|truncate)$';
  is_due boolean := false;
  fresh boolean;
begin
  -- Before looking: a write may be about to log the reset itself.
  perform from headwater.captures c where c.member = sync_table.root for update;
  fresh := not found;
  if not fresh and headwater.is_in_step(root) then
    return false;
  end if;
  for relation in
    select m.oid, c.member is null as is_new, c as known, headwater.observe(m.oid, sync_table.root) as seen,
           c.fingerprint is distinct from headwater.fingerprint(m.oid, sync_table.root) as misfits,
           headwater.triggers_mark(m.oid, logging) as triggers
    from headwater.members_of(root) m (oid) left join headwater.captures c on c.member = m.oid
  loop
    seen := relation.seen;
    if fresh then
      null; -- the reset of a table that is enabled is logged by headwater.enable_table
    elsif not relation.is_new then
      is_due := is_due or headwater.is_reset_due(relation.known, seen);
      if (relation.known).triggers_mark <> seen.triggers_mark then
        perform headwater.fire_always(relation.oid);
        relation.triggers := headwater.triggers_mark(relation.oid, logging);
      end if;
    elsif not is_due then
      execute format('lock table only %s in share row exclusive mode', relation.oid::regclass);
      -- Not by a query: the planner could call functions of the table's owner, with our rights.
      is_due := pg_relation_size(relation.oid) > 0;
    end if;
    if relation.is_new or relation.misfits then
      perform headwater.install_capture(relation.oid, root);
      is_due := is_due or not (fresh or relation.is_new)
        and headwater.triggers_mark(relation.oid, logging) is distinct from relation.triggers;
      seen.triggers_mark := headwater.triggers_mark(relation.oid);
    end if;
    -- As it was when it was looked at: what was altered since is found the next time.
    perform headwater.remember(seen);
  end loop;
  for relation in
    select c.member as oid from headwater.captures c
    where c.root = sync_table.root and c.member not in (select headwater.members_of(sync_table.root))
  loop
    perform headwater.remove_capture(relation.oid);
    is_due := true;
  end loop;
  update headwater.tables t
  set schema_name = n.nspname, table_name = c.relname
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
  where t.relid = sync_table.root and c.oid = sync_table.root
    and (t.schema_name, t.table_name) is distinct from (n.nspname::text, c.relname::text);
  if is_due then
    perform headwater.log_reset(root);
  end if;
  return true;
end $$;

-- Whether every write to a table is captured, and its partitions and children with it.
create function headwater.is_watched(root oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select not exists (
    select from headwater.members_of(root) m join headwater.captures c on c.member = m
    where 3 > (
      select count(*) from headwater.own_triggers(m) t
      where t.tgname ~ '^headwater_(insert|update|delete)$' and t.tgenabled in ('O', 'A')))
$$;

-- For the maintenance loop: every enabled table. A table that is gone is no longer enabled; one that
-- is in use or not ours to alter is left as it is, and captured exactly all the same. Where a trigger
-- was disabled that is not ours to enable, the table must be read again each time.
create or replace function headwater.sync_tables() returns integer
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
  for t in
    select relid, exists (select from pg_class where oid = relid) as is_there
    from headwater.tables
    where enabled and not (
      case when exists (select from pg_index where indrelid = relid and indisprimary)
      then headwater.is_in_step(relid) else exists (select from pg_class where oid = relid) end)
    order by relid
  loop
    begin
      if not t.is_there then
        perform headwater.remove_capture(c.member) from headwater.captures c where c.root = t.relid;
        update headwater.tables set enabled = false, changed_at = clock_timestamp() where relid = t.relid;
        perform headwater.log_reset(t.relid);
        done := done + 1;
      elsif headwater.sync_table(t.relid) then
        done := done + 1;
      end if;
    exception when others then
      raise warning 'headwater: % could not be looked after: %', headwater.label(t.relid), sqlerrm;
      if headwater.is_watched(t.relid) then
        perform headwater.log_reset_due(t.relid);
      else
        perform headwater.log_reset(t.relid);
      end if;
    end;
  end loop;
  return done;
end $$;

create or replace function headwater.enable_table(root oid) returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  was_enabled boolean;
begin
  perform pg_advisory_xact_lock(headwater.lock_class(), 4); -- one at a time
  was_enabled := (select enabled from headwater.tables where relid = root);
  perform headwater.fire_always(c.member) from headwater.captures c where c.root = enable_table.root;
  perform headwater.sync_table(root);
  if was_enabled then
    return headwater.label(root);
  end if;
  insert into headwater.tables (relid, schema_name, table_name, enabled)
  select root, n.nspname, c.relname, true
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
  where c.oid = root
  on conflict (relid) do update set enabled = true, changed_at = clock_timestamp();
  -- Readers do not know what happened while the table was not captured.
  perform headwater.log_reset(root);
  return headwater.label(root);
end $$;

create or replace function headwater.disable_table(root oid) returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pg_advisory_xact_lock(headwater.lock_class(), 4);
  perform headwater.remove_capture(c.member) from headwater.captures c where c.root = disable_table.root;
  update headwater.tables set enabled = false, changed_at = clock_timestamp()
  where relid = root and enabled;
  if found then
    -- What readers know of it holds up to here.
    perform headwater.log_reset(root);
  end if;
  return headwater.label(root);
end $$;

-- After a dump was restored or a database copied: oids and transaction ids mean something else here.
-- Begins a new log and captures again, by their names, the tables that were captured.
create or replace function headwater.adopt() returns void
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
    where pronamespace = 'headwater'::regnamespace and proname ~ '^(capture|mark)_[0-9]+_'
  loop
    execute format('drop function headwater.%I() cascade', name);
  end loop;
  for name in
    select format('%I on %s', own.tgname, own.tgrelid::regclass)
    from (select distinct tgrelid from pg_trigger) r, headwater.own_triggers(r.tgrelid) own
    where own.tgparentid = 0
  loop
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
