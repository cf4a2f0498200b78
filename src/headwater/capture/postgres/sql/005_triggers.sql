-- Triggers: what runs at a write, and how it is made for a relation.
--
-- A relation's functions hold the statement for the shape the relation had when they were made, so
-- that a write costs one cached plan. Each opens with a guard that PostgreSQL evaluates when it
-- plans, and plans again when the table is altered: while the shape is the same the fixed statement
-- runs, and after DDL headwater.fresh_statement until headwater.sync_tables makes new functions. See
-- docs/design/003-capture-function.md.

-- The relations with triggers: the table itself, its partitions, its inheritance children.
create table headwater.captures (
  member oid primary key,
  root oid not null,
  fingerprint bigint not null
);

create index on headwater.captures (root);

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

-- Triggers may have written to the same table while the statement was at work; their changes
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
