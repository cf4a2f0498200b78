-- Marks that a writer cannot forge. The settings of 014_order.sql can be set by every writer, so they are
-- believed only where something that it cannot write says the same; whatever is not believed ends in an
-- order that is taken from all that the transaction logged, or in a reset.
-- See docs/design/003-capture-function.md.
--
-- headwater.mark_<oid>, a sequence of each captured table that only the roles of capture can set. It is
-- never counted: its `currval` is a value of the session that no rollback and no writer changes. It is the
-- hash of the newest setting headwater.open_<oid> that capture itself made. An older one, or one that was
-- rolled back to, does not match.
--
-- How deep a statement is nested is measured by the text of PostgreSQL's call stack (PG_CONTEXT). It is the
-- same when a statement begins and when it ends, and longer for all that functions and triggers do
-- meanwhile. So a statement recognises its own entry, also if another one's is set in its place.

-- The setting as a value of the sequence.
create function headwater.mark_hash(state text) returns bigint
language sql immutable
return ('x0' operator(pg_catalog.||) pg_catalog.substr(pg_catalog.md5(state), 1, 15))::pg_catalog."bit"(64)::pg_catalog.int8
  operator(pg_catalog.+) 1;

-- The length of the call stack without the function that asks, and without the statement that called it: that
-- of a foreign key begins with this line and ends without it. What the statement calls is longer all the same.
create function headwater.nesting(context text) returns integer
language sql immutable
return case when pg_catalog.strpos(context, e'\n') operator(pg_catalog.=) 0 then 0 else
  pg_catalog.length(pg_catalog.regexp_replace(context, e'^[^\n]*\n(SQL statement "[^\n]*(\n|$))?', '')) end;

-- The setting if it is the newest that capture made, otherwise an empty one.
create function headwater.known_state(root oid, state text) returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  return case when currval(format('headwater.mark_%s', root)) = headwater.mark_hash(state) then state else '' end;
exception when object_not_in_prerequisite_state or undefined_table or insufficient_privilege then
  return '';
end $$;

-- The entries of statements at work on a table, as far as they are known.
create or replace function headwater.open_entries(root oid) returns text[]
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
  select array_remove(string_to_array(
    headwater.known_state(root, coalesce(current_setting('headwater.open_' || root, true), '')), ' '), '')
$$;

-- Where there is no sequence yet, or it is not ours to set, a statement at work does not notice this one.
create or replace function headwater.set_entries(root oid, entries text[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  perform setval(format('headwater.mark_%s', root), headwater.mark_hash(set_config('headwater.open_' || root,
    (select coalesce(string_agg(' ' || entry, '' order by place), '')
     from unnest(entries) with ordinality e (entry, place)), true)));
exception when undefined_table or insufficient_privilege then
  perform headwater.log_reset(root);
end $$;

-- The sequence belongs to the role that makes the functions, or, where that is a superuser, to the owner of the
-- schema. Both and the owner of the functions set it.
create function headwater.make_mark(root oid, member oid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  name constant text := format('headwater.mark_%s', root);
  owner constant regrole := (select nspowner from pg_namespace where nspname = 'headwater');
  other regrole;
begin
  if to_regclass(name) is null then
    -- Not logged, so that a statement that changes nothing has nothing to write.
    execute format('create %s sequence %s',
                   case when current_setting('server_version_num')::integer >= 150000 then 'unlogged' end, name);
    if (select rolsuper from pg_roles where rolname = current_user) then
      execute format('alter sequence %s owner to %s', name, owner);
    end if;
  end if;
  for other in
    select owner union
    select proowner from pg_proc
    where pronamespace = 'headwater'::regnamespace and proname ~ format('^(capture|mark)_%s_', member)
  loop
    if not has_sequence_privilege(other, name, 'usage') or not has_sequence_privilege(other, name, 'update') then
      execute format('grant usage, update on sequence %s to %s', name, other);
    end if;
  end loop;
end $$;

-- Says in the log that a table must be read again, unless what is missing is found: then the line is taken
-- back. `reason` says what that is; it stands where other lines have a trace.
create function headwater.log_pending(root oid, reason text) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$ insert into headwater.log (op, shape, trace_id) values ('R', headwater.register_shape(root), reason) $$;

-- What this transaction has logged since a number is in order: resets for the want of it are taken back.
create function headwater.take_back(root oid, since bigint) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
  delete from headwater.log l
  where l.xid = pg_current_xact_id() and l.seq > since and l.op = 'R'
    and l.shape = any(array(select id from headwater.shapes where relid = root))
    and l.trace_id ~ '^headwater since [0-9]+$' and split_part(l.trace_id, ' ', 3)::bigint >= since
$$;

-- Removes the entry of a statement whose rows are logged behind the number `first`, and orders what was
-- logged since it began, if it was not alone. Where its entry is not there, it orders all that the
-- transaction logged of the table. What cannot be ordered is a reset; the statements that are still at work
-- on the table try again, and take it back.
create function headwater.settle(
  root oid, member oid, operation text, first bigint, logged bigint, context text)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  entries text[] := headwater.open_entries(root);
  own integer := (
    select max(place) from unnest(entries) with ordinality e (entry, place)
    where entry ~ format('^%s:%s(@[0-9.]+)?~(%s|%s)(:|$)', left(operation, 1), member, headwater.nesting(context),
                         length(substr(context, strpos(context || chr(10), chr(10)) + 1))));
  since bigint := case when own is null then 0 else headwater.since_of(entries[own]) end;
  doubted constant boolean := own is null or entries[own] like '%!';
begin
  if logged > 0 then
    entries := headwater.add_since(entries, first);
  end if;
  if since is null and logged > 1 and operation = 'UPDATE' and headwater.may_repeat_rows(member)
     and exists (select from pg_inherits where inhparent = member) then
    since := first; -- its rows may not be paired, or take each other's keys
  end if;
  if since is not null and (logged > 0 or doubted) then
    if not headwater.put_in_order(root, since) then
      entries := headwater.add_doubt(entries, since, own);
      perform headwater.log_pending(root, 'headwater since ' || since);
    elsif doubted then
      perform headwater.take_back(root, since);
    end if;
  end if;
  if own is not null then
    entries := entries[:own - 1] || entries[own + 1:];
  end if;
  perform headwater.set_entries(root, entries);
end $$;

-- Called by functions that were made before this version and are not ours to make again.
create or replace function headwater.settle(root oid, member oid, operation text, first bigint, logged bigint)
returns void
language sql
set search_path = pg_catalog, pg_temp
as $$ select headwater.settle(root, member, operation, first, logged, '') $$;

-- The number that the log stands at before a row alone is logged. Its statement left no entry. So it is
-- 0, and the row is ordered among all that the transaction logged of the table, if anything but such
-- rows was logged since the last of them.
create or replace function headwater.begin_row(root oid) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  return case when headwater.known_state(root, 'row ' || currval('headwater.log_seq')) <> ''
         then nextval('headwater.log_seq') else 0 end;
exception when object_not_in_prerequisite_state then
  return 0;
end $$;

create or replace function headwater.settle_row(root oid, first bigint) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  entries text[] := headwater.open_entries(root);
begin
  if first = 0 and not headwater.put_in_order(root, 0) then
    entries := headwater.add_doubt(entries, 0, null);
    perform headwater.log_pending(root, 'headwater since 0');
  end if;
  perform headwater.set_entries(root, headwater.add_since(entries, first));
  if cardinality(entries) = 0 then
    perform setval(format('headwater.mark_%s', root),
                   headwater.mark_hash('row ' || currval('headwater.log_seq')));
  end if;
exception when undefined_table or insufficient_privilege then
  perform headwater.log_reset(root);
end $$;

-- Rows that a statement at work is expected to see are noted in the log, as a reset each, until it has seen
-- them. The setting headwater.noted_<oid> only says whether to look, and how many there are. Where there are
-- too many to note, a reset stays that is the last line of the log.
create or replace function headwater.may_note(root oid, alone boolean) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  name constant text := 'headwater.noted_' || root;
  noted constant text := coalesce(current_setting(name, true), '');
begin
  if noted ~ '^[0-9]{0,3}$' then
    perform set_config(name, (coalesce(nullif(noted, '')::integer, 0) + 1)::text, true);
    return true;
  end if;
  if not headwater.is_noted(root, null) then
    perform headwater.log_reset(root);
    perform set_config(name, '!', true);
  end if;
  return false;
end $$;

-- Whether the last that this session logged is this note; without one: a reset that stays.
create function headwater.is_noted(root oid, note text) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  return current_setting('transaction_isolation') <> 'serializable' and exists (
    select from headwater.log l
    where l.xid = pg_current_xact_id() and l.seq = currval('headwater.log_seq') and l.op = 'R'
      and l.shape = any(array(select id from headwater.shapes where relid = root))
      and l.trace_id is not distinct from is_noted.note);
exception when object_not_in_prerequisite_state then
  return false;
end $$;

-- The statement that notes the row $2, as one that is before ($1 is 'B') or after ('A') a change. It
-- is not noted twice in a row: headwater.note_move and headwater.capture_row see the same.
create or replace function headwater.note_version(member oid, root oid) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select format(
    'select headwater.log_pending(%1$s, note)
     from (select ''headwater note '' || $1 || md5(r::text) as note from %2$s r) n
     where not headwater.is_noted(%1$s, note)',
    root, headwater.as_root('(select ($2).*) row', member, root))
$$;

-- Takes the notes of rows that a statement has seen back, one for each time.
create or replace function headwater.strike_noted(root oid, seen text[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if current_setting('transaction_isolation') = 'serializable' then
    return; -- to read the log would make its neighbours fail
  end if;
  delete from headwater.log l
  using (
    select n.slot, n.seq, n.trace_id as note,
           row_number() over (partition by n.trace_id order by n.seq) as place
    from headwater.log n
    where n.xid = pg_current_xact_id() and n.op = 'R'
      and n.shape = any(array(select id from headwater.shapes where relid = root))
      and starts_with(n.trace_id, 'headwater note ')
  ) noted
  join (select note, count(*) as times from unnest(seen) s (note) group by note) s using (note)
  where noted.place <= s.times and l.slot = noted.slot and l.xid = pg_current_xact_id() and l.seq = noted.seq;
end $$;

create or replace function headwater.strike_source(member oid, root oid, operation text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $body$
  select format(
    $source$if current_setting('headwater.noted_%1$s', true) <> '' then
      perform headwater.strike_noted('%1$s'::oid, array(%2$s));
    end if;$source$,
    root,
    (select string_agg(
       format('select %L || md5(r::text) from %s r', 'headwater note ' || side, headwater.as_root(source, member, root)), ' union all ')
     from (values ('B', 'old_rows', 'insert'), ('A', 'new_rows', 'delete')) v (side, source, without)
     where operation <> without))
$body$;

-- The entry of a statement that the client itself sent, where it is the same each time.
create function headwater.client_entry(member oid, operation text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select format(' %s:%s~0', upper(left(operation, 1)), member)
  from pg_class where oid = member and relkind <> 'p' and not relispartition
$$;

-- The function that adds a statement's entry when it begins. It has the rights of capture, and the writer's
-- search path, because to change that costs more than all it does: every name has its schema.
create or replace function headwater.mark_source(member oid, root oid, operation text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $body$
  select format(
    $function$
declare
  context pg_catalog.text;
  state pg_catalog.text;
  mark pg_catalog.int8;
begin
  get diagnostics context = pg_context;%3$s
  state := pg_catalog.current_setting('headwater.open_%1$s', true);
  if state operator(pg_catalog.<>) '' then
    state := headwater.known_state('%1$s'::pg_catalog.oid, state);
  end if;
  mark := pg_catalog.setval('headwater.mark_%1$s', headwater.mark_hash(pg_catalog.set_config('headwater.open_%1$s',
    pg_catalog.concat(state, %2$s, '~', headwater.nesting(context)), true)));
  return null;
end $function$,
    root, headwater.own_entry(member, operation),
    -- What a client's own statement sets is mostly known beforehand, with its hash.
    (select string_agg(format(
       $source$
  if pg_catalog.strpos(context, pg_catalog.chr(10)) operator(pg_catalog.=) 0
     and coalesce(pg_catalog.current_setting('headwater.open_%1$s', true), '') operator(pg_catalog.=) %2$L
     and %3$s
     and pg_catalog.setval('headwater.mark_%1$s',
           case when pg_catalog.set_config('headwater.open_%1$s', %4$L, true) is not null then %5$s end) is not null then
    return null;
  end if;$source$,
       root, before, case when before = '' then 'true' else format(
         'pg_catalog.currval(''headwater.mark_%s'') operator(pg_catalog.=) %s', root, headwater.mark_hash(before)) end,
       before || entry, headwater.mark_hash(before || entry)), '' order by before)
     from (select headwater.client_entry(member, operation) as entry, '' as before
           union all
           select headwater.client_entry(member, operation), headwater.client_entry(member, 'insert')
           where operation = 'update' and member = root) known
     where entry is not null))
$body$;

-- The function that logs a statement's rows when it ends.
create or replace function headwater.capture_source(member oid, root oid, operation text, fingerprint bigint) returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $body$
declare
  shape bigint := headwater.register_shape(root);
  is_partitioned boolean := (select relkind = 'p' from pg_class where oid = member);
  has_children boolean := exists (select from pg_inherits where inhparent = member);
begin
  return format(
    $function$
#variable_conflict use_column
declare
  logged bigint := 0;
  first bigint;
  statement text;
  formats jsonb;
  context text;
  state text;
begin
  get diagnostics context = pg_context;
  if (case %11$s when current_setting('headwater.open_%2$s', true) = concat(%7$s, '~', headwater.nesting(context))
      then currval('headwater.mark_%2$s') = headwater.mark_hash(current_setting('headwater.open_%2$s', true)) end)
     is not true%8$s then
    first := nextval('headwater.log_seq');
  end if;
  if (tg_relid = '%1$s'::oid or tg_relid = '%2$s'::oid)
     and headwater.fits('%1$s'::oid, '%2$s'::oid, %3$L::bigint) then
    %4$s;
    get diagnostics logged = row_count;
    %5$s
    %10$s
  else
    statement := headwater.fresh_statement(tg_relid, '%2$s'::oid, tg_op);
    if statement is not null then
      formats := headwater.swap_formats(tg_relid);
      execute statement;
      get diagnostics logged = row_count;
      perform headwater.swap_formats(tg_relid, formats);
    end if;
    if logged > 0 and headwater.may_notify() then
      perform headwater.notify(%6$L::bigint, tg_op, logged);
    end if;
  end if;
  if first is null then
    state := set_config('headwater.open_%2$s', '', true);%9$s
  else
    perform headwater.settle('%2$s'::oid, tg_relid, tg_op, first, logged, context);
  end if;
  return null;
end $function$,
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
    headwater.own_entry(member, operation),
    -- There may be rows that it does not see, and if rows may repeat, they may not be paired or take the
    -- keys of each other.
    case
      when not (is_partitioned or has_children) then ''
      when operation = 'update' and headwater.may_repeat_rows(member) then ' or true'
      else format(' or current_setting(''headwater.noted_%s'', true) <> ''''', root) || case operation
        when 'update' then format(
          ' or not headwater.fits(''%s''::oid, ''%s''::oid, %L::bigint)', member, root, fingerprint)
        else '' end
    end,
    case when member = root and not is_partitioned then headwater.upsert_source(member, root, operation) end,
    case when is_partitioned then headwater.strike_source(member, root, operation) end,
    (select format(
       $source$when strpos(context, chr(10)) = 0 and current_setting('headwater.open_%1$s', true) = %2$L
      then currval('headwater.mark_%1$s') = %3$s$source$, root, entry, headwater.mark_hash(entry))
     from headwater.client_entry(member, operation) entry where entry is not null));
end $body$;

-- INSERT ... ON CONFLICT DO UPDATE leaves two entries, and mostly one of them logs nothing: what
-- headwater.settle would do for them, without calling it.
create or replace function headwater.upsert_source(member oid, root oid, operation text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $body$
  select format(case operation
    when 'update' then $branch$
  elsif strpos(context, chr(10)) = 0 and current_setting('headwater.open_%2$s', true) = %3$L
        and currval('headwater.mark_%2$s') = %4$s then
    first := setval('headwater.mark_%2$s', headwater.mark_hash(set_config('headwater.open_%2$s',
      concat(' I:%1$s~0', case when logged > 0 then ':' || first end), true)));$branch$
    when 'insert' then $branch$
  elsif logged = 0 and strpos(context, chr(10)) = 0
        and current_setting('headwater.open_%2$s', true) ~ '^ I:%1$s~0:[0-9]+$'
        and currval('headwater.mark_%2$s') = headwater.mark_hash(current_setting('headwater.open_%2$s', true)) then
    state := set_config('headwater.open_%2$s', '', true);$branch$
    end, member, root, states, headwater.mark_hash(states))
  from (select headwater.client_entry(member, 'insert') || headwater.client_entry(member, 'update') as states) s
$body$;

-- Makes (or makes again) the functions and the triggers of one relation. The functions are short:
-- plpgsql prepares every expression again in each transaction, and most transactions write one row.
create or replace function headwater.make_capture(member oid, root oid) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $body$
declare
  fingerprint bigint := headwater.fingerprint(member, root);
  is_partitioned boolean := (select relkind = 'p' from pg_class where oid = member);
  settings text := (
    select string_agg(format(' set %s = %L', f.name, f.value), '')
    from headwater.format_settings(member) f);
  operation text;
  transition text;
begin
  perform headwater.make_mark(root, member);
  foreach operation in array array['insert', 'update', 'delete'] loop
    execute format(
      'create or replace function headwater.mark_%s_%s() returns trigger language plpgsql security definer as %L',
      member, operation, headwater.mark_source(member, root, operation));
    execute format(
      'create or replace function headwater.capture_%s_%s() returns trigger'
      ' language plpgsql security definer set search_path = pg_catalog, pg_temp%s as %L',
      member, operation, settings, headwater.capture_source(member, root, operation, fingerprint));
    execute format(
      'revoke execute on function headwater.mark_%1$s_%2$s(), headwater.capture_%1$s_%2$s() from public',
      member, operation);

    transition := case operation
      when 'insert' then 'new table as new_rows'
      when 'update' then 'old table as old_rows new table as new_rows'
      else 'old table as old_rows' end;
    perform headwater.set_trigger(member, 'headwater_mark_' || operation, format(
      'before %1$s on %2$s for each statement execute function headwater.mark_%3$s_%1$s()',
      operation, member::regclass, member), true);
    perform headwater.set_trigger(member, 'headwater_' || operation, format(
      'after %1$s on %2$s referencing %3$s for each statement execute function headwater.capture_%4$s_%1$s()',
      operation, member::regclass, transition, member), true);
  end loop;
  perform headwater.set_trigger(member, 'headwater_truncate', format(
    'before truncate on %s for each statement execute function headwater.capture_truncate()',
    member::regclass), true);
  if member = root then
    perform headwater.set_trigger(member, 'headwater_pass', format(
      'before insert on %s for each row when (false) execute function headwater.pass_row()',
      member::regclass), is_partitioned);
    perform headwater.set_trigger(member, 'headwater_row', format(
      'after insert or update or delete on %s for each row execute function headwater.capture_row()',
      member::regclass), is_partitioned);
    foreach operation in array array['insert', 'delete'] loop
      perform headwater.set_trigger(member, 'headwater_move_' || operation, format(
        'after %s on %s for each row when (%s) execute function headwater.note_move()',
        operation, member::regclass, headwater.moves(root, operation)), is_partitioned);
    end loop;
  elsif exists (select from pg_trigger where tgrelid = member and tgname = 'headwater_row' and tgenabled <> 'D')
    and not is_partitioned then
    execute format('alter table only %s disable trigger headwater_row', member::regclass);
  end if;

  return fingerprint;
end $body$;

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
  execute format('drop sequence if exists headwater.mark_%s', relation);
  delete from headwater.captures c where c.member = relation;
end $$;

-- A copied database has other oids: headwater.adopt drops the sequences with the functions.
do $do$
begin
  execute replace(
    pg_get_functiondef('headwater.adopt()'::regprocedure),
    '  truncate headwater.log,', $new$  for name in
    select relname from pg_class
    where relnamespace = 'headwater'::regnamespace and relkind = 'S' and relname ~ '^mark_[0-9]+$'
      and pg_has_role(relowner, 'usage')
  loop
    execute format('drop sequence headwater.%I', name);
  end loop;
  truncate headwater.log,$new$);
end $do$;

do $do$
begin
  -- The key is compared as text: to make JSON of it would call a cast that the owner of a type has made.
  execute replace(replace(pg_get_functiondef('headwater.capture_row()'::regprocedure), '(:| |$)', '(~|:| |$)'),
    $old$format('r.%I', name)$old$, $new$format('pg_catalog.format(''%%s'', r.%I)', name)$new$);
end $do$;

-- A relation of another owner is not read when it is truncated: the planner could call functions of its
-- owner, with our rights. It is a reset then.
do $do$
begin
  execute replace(pg_get_functiondef('headwater.capture_truncate()'::regprocedure),
    'or row_security_active(tg_relid) then', $new$or row_security_active(tg_relid)
     or exists (select from pg_class c join pg_roles o on o.oid = c.relowner
                where c.oid = tg_relid and o.rolname <> current_user and not o.rolsuper) then$new$);
end $do$;
