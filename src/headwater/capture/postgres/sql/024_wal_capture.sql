-- Capture from the write-ahead log (WAL), for tables whose writers want no trigger.
--
-- A runner (headwater.capture.postgres.wal.append) reads a replication slot and appends the changes to
-- headwater.log with the ids of the transactions that made them. So positions mean what they mean with
-- triggers, but the log is complete up to a snapshot only when the slot was confirmed up to there. Readers
-- wait for that (headwater.log.complete). See docs/howto/sources/wal-capture.md.

-- The slot that feeds this log; null where no table is captured from the WAL. Another slot is another
-- name, so a reader never waits for one slot with the position of another.
alter table headwater.installation add column wal_slot text;

alter table headwater.tables
  add column capture text not null default 'trigger' check (capture in ('trigger', 'wal'));

-- Everything up to this place in the WAL is in the log. Written in the transaction that appends.
create table headwater.wal_capture (
  slot text primary key,
  lsn pg_lsn not null,
  appended_at timestamptz not null default clock_timestamp()
);

-- The replica identity that a relation had before it was captured from the WAL: d, n, f, or the name of
-- an index after "i:".
create table headwater.wal_members (
  member oid primary key,
  root oid not null,
  identity text not null
);

create function headwater.wal_publication() returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$ select 'headwater_' || id from headwater.installation $$;

create function headwater.is_wal_captured(root oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$ select exists (select from headwater.tables t where t.relid = root and t.enabled and t.capture = 'wal') $$;

-- What the owner of a table must do before this role can capture it from the WAL, as statements; null if
-- there is nothing to do. The role that owns the publication makes it, and is the one that alters it later.
create function headwater.wal_preparation(root oid) returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  publication text := headwater.wal_publication();
  statements text;
begin
  select nullif(concat_ws('; ',
      case when bool_or(needs.table_added) and not exists (select from pg_publication where pubname = publication)
           then format('set role %I; select headwater.make_wal_publication(); reset role', current_user) end,
      nullif(string_agg(concat_ws('; ',
        case when needs.identity then format('alter table only %s replica identity full', m::regclass) end,
        case when needs.table_added then format('alter publication %I add table only %s', publication, m::regclass) end,
        case when needs.lock then format('grant update on %s to %I', m::regclass, current_user) end), '; '), '')), '')
  into statements
  from headwater.members_of(root) m join pg_class c on c.oid = m
  cross join lateral (
    select c.relkind = 'r' and c.relreplident <> 'f' as identity,
           not c.relispartition and not exists (
             select from pg_publication_rel r join pg_publication p on p.oid = r.prpubid
             where p.pubname = publication and r.prrelid = m) as table_added,
           m = root and not has_table_privilege(m, 'update, delete, truncate') as lock) needs
  where not pg_has_role(c.relowner, 'usage');
  return statements;
end $$;

-- Says why a table cannot be captured from the WAL, and what to do.
create function headwater.check_wal(root oid) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  found text;
  own pg_class;
begin
  if current_setting('wal_level') <> 'logical' then
    raise exception 'headwater: % cannot be captured from the WAL: wal_level is %',
      headwater.label(root), current_setting('wal_level')
      using errcode = 'object_not_in_prerequisite_state',
            hint = 'As a superuser: alter system set wal_level = logical; restart the server. Or capture it by triggers.';
  end if;
  select string_agg(m::regclass::text, ', ') into found
  from headwater.members_of(root) m join pg_class c on c.oid = m where c.relpersistence <> 'p';
  if found is not null then
    raise exception 'headwater: % is unlogged: its changes are not in the WAL', found
      using errcode = 'wrong_object_type',
            hint = format('alter table %s set logged; or capture it by triggers.', found);
  end if;
  select string_agg(quote_ident(attname), ', ') into found
  from pg_attribute
  where attrelid = root and attnum > 0 and not attisdropped and attgenerated = 's'
    and current_setting('server_version_num')::integer < 180000;
  if found is not null then
    raise exception 'headwater: % has generated columns (%), which PostgreSQL before 18 does not send from the WAL',
      headwater.label(root), found
      using errcode = 'feature_not_supported', hint = 'Capture it by triggers.';
  end if;
  select * into own from pg_class where oid = root;
  found := headwater.wal_preparation(root);
  if found is not null or (own.relkind = 'p' and not pg_has_role(own.relowner, 'usage')) then
    raise exception 'headwater: % is owned by another role, and only its owner can have the WAL say all of its changes',
      headwater.label(root)
      using errcode = 'insufficient_privilege',
            hint = case
              when not (select rolsuper from pg_roles where oid = own.relowner) then format(
                'As a superuser: grant %s to %I. Or capture it by triggers.', own.relowner::regrole, current_user)
              when own.relkind = 'p' then 'Let a role own it that is not a superuser. Or capture it by triggers.'
              else format('As its owner %s: %s; then enable it again. Or capture it by triggers.',
                          own.relowner::regrole, found) end;
  end if;
end $$;

-- The publication whose tables the slot is read for. Before PostgreSQL 18 a slot cannot be read for a
-- publication that is younger than the slot, so it is made in an earlier transaction. Where it was dropped
-- while a slot was read for it, changes are missing: that slot counts as lost. Returns whether it was made
-- now.
create function headwater.make_wal_publication() returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  slot text;
begin
  if exists (select from pg_publication where pubname = headwater.wal_publication()) then
    return false;
  end if;
  perform headwater.take_turn();
  if exists (select from pg_publication where pubname = headwater.wal_publication()) then
    return false;
  end if;
  execute format('create publication %I with (publish = ''insert, update, delete, truncate''%s)',
    headwater.wal_publication(),
    case when current_setting('server_version_num')::integer >= 180000
         then ', publish_generated_columns = stored' else '' end);
  slot := (select wal_slot from headwater.installation);
  if slot is not null then
    update headwater.installation set wal_slot = format('headwater_%s_0', id); -- there is none of that name
    perform headwater.drop_wal_slot(slot);
  end if;
  return true;
end $$;

-- The slot that feeds the log; makes one where there is none, or the present one is lost. PostgreSQL
-- makes a slot only in a transaction that has not written yet, and it stays if that is rolled back.
create function headwater.make_wal_slot() returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  name text := (select wal_slot from headwater.installation);
begin
  if current_setting('server_version_num')::integer < 180000
     and not exists (select from pg_publication where pubname = headwater.wal_publication()) then
    raise exception 'headwater: before PostgreSQL 18, the publication for the WAL is made first, by itself'
      using errcode = 'object_not_in_prerequisite_state', hint = 'select headwater.make_wal_publication();';
  end if;
  if name is not null and exists (
       select from pg_replication_slots
       where slot_name = name and wal_status is distinct from 'lost') then
    return name;
  end if;
  name := format('headwater_%s_%s', (select id from headwater.installation),
                 to_hex((extract(epoch from clock_timestamp()) * 1000000)::bigint));
  begin
    perform pg_create_logical_replication_slot(name, 'pgoutput');
  exception when insufficient_privilege then
    raise exception 'headwater: role % may not read the WAL', current_user
      using errcode = 'insufficient_privilege',
            hint = format('As a superuser: alter role %I replication. Or capture the table by triggers.', current_user);
  when configuration_limit_exceeded then
    raise exception 'headwater: all replication slots of the server are in use'
      using errcode = 'configuration_limit_exceeded',
            hint = 'Raise max_replication_slots and restart the server, or drop a slot that nothing reads.';
  end;
  return name;
end $$;

-- Has the log fed by this slot, unless another one feeds it. Where that one is lost, changes may be
-- missing: every table that is captured from the WAL must be read again.
create function headwater.use_wal_slot(slot text) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  previous text;
begin
  select wal_slot into previous from headwater.installation for update;
  if exists (select from pg_replication_slots
             where slot_name = previous and wal_status is distinct from 'lost') then
    return;
  end if;
  if not exists (select from pg_replication_slots where slot_name = slot) then
    raise exception 'headwater: slot % was dropped before it was used', slot
      using errcode = 'object_not_in_prerequisite_state', hint = 'Try again.';
  end if;
  update headwater.installation set wal_slot = slot;
  delete from headwater.wal_capture;
  insert into headwater.wal_capture (slot, lsn)
  select slot_name, confirmed_flush_lsn from pg_replication_slots where slot_name = slot;
  perform headwater.log_reset(relid) from headwater.tables where enabled and capture = 'wal';
end $$;

-- Ends capture from the WAL where no table needs it: from here on readers do not wait. The slot itself is
-- dropped when this is committed, by headwater.drop_wal_slot. Returns its name, or null where capture
-- does not end.
create function headwater.end_wal_capture() returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  slot text;
begin
  perform headwater.take_turn();
  if exists (select from headwater.tables where enabled and capture = 'wal') then
    return null;
  end if;
  select wal_slot into slot from headwater.installation for update;
  if slot is not null then
    update headwater.installation set wal_slot = null;
    delete from headwater.wal_capture;
    execute format('drop publication if exists %I', headwater.wal_publication());
  end if;
  return slot;
end $$;

-- Drops a slot, unless it feeds the log or a process reads it. Returns whether it was dropped.
create function headwater.drop_wal_slot(slot text) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  perform headwater.take_turn(); -- a table may be about to be enabled with it
  if slot = (select wal_slot from headwater.installation) then
    return false;
  end if;
  perform pg_drop_replication_slot(slot);
  return true;
exception when object_in_use or undefined_object then
  return false;
end $$;

-- Drops the slots of this installation that feed nothing and that no process reads. One that was made a
-- moment ago may be about to be used. Returns how many.
create function headwater.drop_wal_slots(older_than interval default interval '1 hour') returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  name text;
  dropped integer := 0;
begin
  perform headwater.take_turn();
  for name in
    select s.slot_name
    from pg_replication_slots s, headwater.installation i
    where s.slot_name ~ ('^headwater_' || i.id || '_[0-9a-f]+$') and s.database = current_database()
      and not s.active and s.slot_name is distinct from i.wal_slot
      and to_timestamp(('x' || lpad(split_part(s.slot_name, '_', 3), 16, '0'))::bit(64)::bigint / 1000000)
          <= clock_timestamp() - older_than
  loop
    dropped := dropped + headwater.drop_wal_slot(name)::integer;
  end loop;
  return dropped;
end $$;

-- Whether all changes of a relation are sent. Those of a partition are sent with its table, unless the
-- publication says something of the partition itself.
create function headwater.is_published(relation oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select coalesce(
    (select p.pubinsert and p.pubupdate and p.pubdelete and p.pubtruncate and not p.pubviaroot
            -- PostgreSQL 14 has no such columns
            and to_jsonb(r) ->> 'prqual' is null and to_jsonb(r) ->> 'prattrs' is null
     from pg_publication_rel r join pg_publication p on p.oid = r.prpubid
     where p.pubname = headwater.wal_publication() and r.prrelid = relation),
    (select c.relispartition from pg_class c where c.oid = relation))
$$;

-- Whether changes of a table that is captured from the WAL are not in the WAL, or are not sent.
create function headwater.misses_changes(root oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select exists (
    select from headwater.members_of(root) m join pg_class c on c.oid = m
    where c.relpersistence <> 'p' or not headwater.is_published(m))
$$;

-- Has the WAL say all of a relation's changes: whole rows, also those before an update or a delete.
create function headwater.add_wal_member(member oid, root oid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  c pg_class;
  publication text := headwater.wal_publication();
begin
  select * into c from pg_class where oid = member;
  insert into headwater.wal_members (member, root, identity)
  select member, root, case c.relreplident
    when 'i' then 'i:' || (select i.indexrelid::regclass::text from pg_index i
                           where i.indrelid = member and i.indisreplident)
    else c.relreplident::text end
  on conflict on constraint wal_members_pkey do update set root = excluded.root;
  if c.relkind = 'r' and c.relreplident <> 'f' then
    execute format('alter table only %s replica identity full', member::regclass);
  end if;
  perform headwater.make_wal_publication();
  if not headwater.is_published(member) then
    perform headwater.unpublish(member);
    execute format(
      'alter publication %I set (publish = ''insert, update, delete, truncate'', publish_via_partition_root = false)',
      publication);
    if not c.relispartition then
      execute format('alter publication %I add table only %s', publication, member::regclass);
    end if;
  end if;
  insert into headwater.captures (member, root, fingerprint) values (member, root, 0)
  on conflict on constraint captures_pkey do update set root = excluded.root, fingerprint = 0;
  perform headwater.remember(headwater.observe(member, root));
end $$;

create function headwater.unpublish(relation oid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  publication text := headwater.wal_publication();
begin
  if exists (select from pg_publication_rel r join pg_publication p on p.oid = r.prpubid
             where p.pubname = publication and r.prrelid = relation) then
    execute format('alter publication %I drop table only %s', publication, relation::regclass);
  end if;
end $$;

create function headwater.remove_wal_member(relation oid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  former text := (select m.identity from headwater.wal_members m where m.member = relation);
begin
  perform headwater.unpublish(relation);
  if former <> 'f' and exists (select from pg_class where oid = relation and relkind = 'r' and relreplident = 'f') then
    execute format('alter table only %s replica identity %s', relation::regclass, case
      when former = 'n' then 'nothing'
      when former like 'i:%' and to_regclass(substr(former, 3)) is not null
        then format('using index %I', (select relname from pg_class where oid = to_regclass(substr(former, 3))))
      else 'default' end);
  end if;
  delete from headwater.wal_members m where m.member = relation;
  delete from headwater.captures c where c.member = relation;
end $$;

-- Whether nothing is to be done for a table that is captured from the WAL.
create function headwater.is_in_step_with_wal(root oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select not headwater.misses_changes(root)
     and not exists (
           select from headwater.members_of(root) m
           join pg_class p on p.oid = m
           left join headwater.wal_members w on w.member = m and w.root = is_in_step_with_wal.root
           left join headwater.captures c on c.member = m and c.root = is_in_step_with_wal.root
           where w.member is null or c.member is null
              or (p.relkind = 'r' and p.relreplident <> 'f')
              or headwater.is_reset_due(c, headwater.observe(m, is_in_step_with_wal.root)))
     and not exists (
           select from headwater.wal_members w
           where w.root = is_in_step_with_wal.root
             and w.member not in (select headwater.members_of(is_in_step_with_wal.root)))
     and exists (
           select from headwater.tables t
           join pg_class c on c.oid = t.relid join pg_namespace n on n.oid = c.relnamespace
           where t.relid = is_in_step_with_wal.root and t.schema_name = n.nspname and t.table_name = c.relname)
$$;

-- The same as headwater.sync_table for a table that is captured from the WAL. Where a relation of it is
-- unlogged now, it is captured by triggers from here on.
create function headwater.sync_with_wal(root oid) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  relation record;
  unlogged text;
  is_due boolean;
begin
  perform from headwater.captures c where c.member = sync_with_wal.root for update;
  if headwater.is_in_step_with_wal(root) then
    return false;
  end if;
  select string_agg(m::regclass::text, ', ') into unlogged
  from headwater.members_of(root) m join pg_class c on c.oid = m where c.relpersistence <> 'p';
  if unlogged is not null then
    perform headwater.enable_table(root, 'trigger');
    raise warning 'headwater: % is unlogged, so its changes are not in the WAL: % is captured by triggers now',
      unlogged, headwater.label(root)
      using hint = format('alter table %s set logged; then: headwater enable %s --capture wal',
                          unlogged, headwater.label(root));
    return true;
  end if;
  is_due := headwater.misses_changes(root);
  if is_due then
    -- A transaction that is writing now would be sent in part.
    execute format('lock table %s in share row exclusive mode', root::regclass);
  end if;
  for relation in
    select m.oid, w.member is null as is_new, c as known, headwater.observe(m.oid, sync_with_wal.root) as seen,
           p.relkind = 'r' and p.relreplident <> 'f' as is_partial
    from headwater.members_of(root) m (oid)
    join pg_class p on p.oid = m.oid
    left join headwater.wal_members w on w.member = m.oid
    left join headwater.captures c on c.member = m.oid
  loop
    if relation.is_new or relation.is_partial then
      execute format('lock table only %s in share row exclusive mode', relation.oid::regclass);
      is_due := is_due or relation.is_partial or pg_relation_size(relation.oid) > 0;
    else
      is_due := is_due or headwater.is_reset_due(relation.known, relation.seen);
    end if;
    perform headwater.add_wal_member(relation.oid, root);
  end loop;
  for relation in
    select w.member as oid from headwater.wal_members w
    where w.root = sync_with_wal.root and w.member not in (select headwater.members_of(sync_with_wal.root))
  loop
    perform headwater.remove_wal_member(relation.oid);
    is_due := true;
  end loop;
  update headwater.tables t
  set schema_name = n.nspname, table_name = c.relname
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
  where t.relid = sync_with_wal.root and c.oid = sync_with_wal.root
    and (t.schema_name, t.table_name) is distinct from (n.nspname::text, c.relname::text);
  if is_due then
    perform headwater.log_reset(root);
  end if;
  return true;
end $$;

alter function headwater.is_in_step(oid) rename to is_in_step_with_triggers;
alter function headwater.sync_table(oid) rename to sync_with_triggers;
alter function headwater.is_watched(oid) rename to is_watched_by_triggers;

-- Their parameters are named by the function in three bodies.
do $$
declare
  definition text;
begin
  for definition in
    select replace(replace(replace(pg_get_functiondef(p.oid),
      'is_in_step.root', 'is_in_step_with_triggers.root'),
      'sync_table.root', 'sync_with_triggers.root'),
      'headwater.is_in_step(', 'headwater.is_in_step_with_triggers(')
    from pg_proc p
    where p.oid in ('headwater.is_in_step_with_triggers(oid)'::regprocedure,
                    'headwater.sync_with_triggers(oid)'::regprocedure)
  loop
    execute definition;
  end loop;
end $$;

create function headwater.is_in_step(root oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select case when headwater.is_wal_captured(root)
    then headwater.is_in_step_with_wal(root) else headwater.is_in_step_with_triggers(root) end
$$;

create function headwater.sync_table(root oid) returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $$
  select case when headwater.is_wal_captured(root)
    then headwater.sync_with_wal(root) else headwater.sync_with_triggers(root) end
$$;

create function headwater.is_watched(root oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select case when headwater.is_wal_captured(root)
    then not headwater.misses_changes(root) else headwater.is_watched_by_triggers(root) end
$$;

-- Ends the capture of a table, whichever way it was captured.
create function headwater.remove_captures(table_oid oid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  perform headwater.remove_wal_member(w.member) from headwater.wal_members w where w.root = table_oid;
  perform headwater.remove_capture(c.member) from headwater.captures c where c.root = table_oid;
end $$;

-- Captures a table by triggers or from the WAL, or changes from one to the other. No writer is at work on
-- the table then, so the log has each change once: those from before by the one way, later ones by the
-- other. `slot` is one that headwater.make_wal_slot has returned; without it, one is made here, which stays
-- until maintenance drops it if this transaction is rolled back.
create function headwater.enable_table(root oid, capture text, slot text default null) returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  present text;
begin
  if capture is null or capture not in ('trigger', 'wal') then
    raise exception 'headwater: there is no capture %', coalesce(quote_literal(capture), 'null')
      using errcode = 'invalid_parameter_value', hint = 'It is ''trigger'' or ''wal''.';
  end if;
  if capture = 'wal' then
    perform headwater.check_wal(root);
    slot := coalesce(slot, headwater.make_wal_slot()); -- before anything is written
  end if;
  perform headwater.take_turn();
  if capture = 'wal' then
    perform headwater.make_wal_publication();
    perform headwater.use_wal_slot(slot);
    perform headwater.drop_wal_slot(slot); -- where another one is in use
  end if;
  present := (select t.capture from headwater.tables t where t.relid = root and t.enabled);
  if present is not distinct from capture then
    return headwater.enable_table(root);
  end if;
  execute format('lock table %s in share row exclusive mode', root::regclass);
  perform headwater.remove_captures(root);
  if capture = 'trigger' then
    update headwater.tables t set enabled = false, capture = 'trigger' where t.relid = root;
    return headwater.enable_table(root);
  end if;
  perform headwater.add_wal_member(m, root) from headwater.members_of(root) m;
  insert into headwater.tables (relid, schema_name, table_name, enabled, capture)
  select root, n.nspname, c.relname, true, 'wal'
  from pg_class c join pg_namespace n on n.oid = c.relnamespace
  where c.oid = root
  on conflict (relid) do update set enabled = true, capture = 'wal', changed_at = clock_timestamp();
  -- Readers do not know what happened while the table was not captured.
  perform headwater.log_reset(root);
  return headwater.label(root);
end $$;

create function headwater.enable_reactivity(name text, capture text, slot text default null) returns text
language sql volatile
as $$
  select headwater.enable_table(headwater.check_capturable(headwater.find_table(name), name), capture, slot)
$$;

create or replace function headwater.disable_table(root oid) returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  perform headwater.take_turn();
  if headwater.is_wal_captured(root) then
    execute format('lock table %s in share row exclusive mode', root::regclass);
  end if;
  perform headwater.remove_captures(root);
  update headwater.tables set enabled = false, capture = 'trigger', changed_at = clock_timestamp()
  where relid = root and enabled;
  if found then
    -- What readers know of it holds up to here.
    perform headwater.log_reset(root);
  end if;
  return headwater.label(root);
end $$;

-- Where a table is gone, what was remembered of it for the WAL goes with the rest.
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
  delete from headwater.wal_members w where w.member = relation;
end $$;

-- In a copied database the slot belongs to the original. Its tables are captured by triggers until they
-- are enabled again with the WAL.
alter function headwater.adopt() rename to adopt_by_triggers;

create function headwater.adopt() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  execute format('drop publication if exists %I', headwater.wal_publication());
  update headwater.installation set wal_slot = null;
  truncate headwater.wal_capture, headwater.wal_members;
  perform headwater.adopt_by_triggers();
end $$;

-- The table of a relation that was captured from the WAL when a change was made, also if it is not now.
create function headwater.wal_root(relation oid) returns oid
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  with recursive ancestors (oid, depth) as (
    select relation, 0
    union all
    select i.inhparent, a.depth + 1 from ancestors a join pg_inherits i on i.inhrelid = a.oid
  )
  select coalesce(
    (select w.root from headwater.wal_members w where w.member = relation),
    (select a.oid from ancestors a
     where exists (select from headwater.shapes s where s.relid = a.oid) order by a.depth desc limit 1))
$$;

-- What the runner must know of a relation that it meets in the WAL: its table, the table's shape and key,
-- and for each column how its value is written in an image. `stale` says that the columns are not those of
-- the change, `due` that the table must be read again, which is remembered as done. Null where nothing is
-- known of the table.
create function headwater.wal_relation(relation oid, columns jsonb) returns jsonb
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  table_oid oid := headwater.wal_root(relation);
  is_captured boolean;
  found jsonb;
  due boolean := false;
begin
  if table_oid is null or not exists (select from pg_class where oid = table_oid) then
    return (select jsonb_build_object('root', s.relid::bigint, 'shape', s.id, 'stale', true, 'label', s.table_name)
            from headwater.shapes s where s.relid in (relation, table_oid) order by s.since desc limit 1);
  end if;
  is_captured := headwater.is_wal_captured(table_oid);
  select coalesce(jsonb_agg(jsonb_build_array(a.attname, a.atttypid::bigint, a.atttypmod) order by a.attnum), '[]')
  into found
  from pg_attribute a
  where a.attrelid = relation and a.attnum > 0 and not a.attisdropped and a.attgenerated <> 'v';
  if found <> columns then
    return jsonb_build_object('root', table_oid::bigint, 'shape', headwater.register_shape(table_oid), 'stale', true,
                              'label', headwater.label(table_oid));
  end if;
  if is_captured and exists (select from headwater.captures c
             where c.root = table_oid and headwater.is_reset_due(c, headwater.observe(c.member, c.root))) then
    due := true;
    perform headwater.remember(headwater.observe(c.member, c.root))
    from headwater.captures c where c.root = table_oid;
  end if;
  return jsonb_build_object(
    'root', table_oid::bigint,
    'shape', headwater.register_shape(table_oid),
    'stale', headwater.describe(table_oid) -> 'key' = '[]',
    'due', due or is_captured and not exists (select from headwater.captures c where c.member = relation),
    'label', headwater.label(table_oid),
    'key', headwater.describe(table_oid) -> 'key',
    'members', (select jsonb_agg(m::bigint) from headwater.members_of(table_oid) m join pg_class c on c.oid = m
                where c.relkind = 'r'),
    'columns', (
      select jsonb_agg(jsonb_build_array(r.attname, w.kind, w.type_name) order by r.attnum)
      from pg_attribute r
      join pg_attribute a on a.attrelid = relation and a.attname = r.attname and not a.attisdropped
      cross join lateral headwater.wal_kind(a.atttypid) w
      where r.attrelid = table_oid and r.attnum > 0 and not r.attisdropped and r.attgenerated <> 'v'));
end $$;

-- How a value of a type is written in an image, as json functions of PostgreSQL do it. `server` is for
-- what only the server can write: arrays, composite types and types with a cast to json; `type` is its name.
-- A type of an owner whom we do not trust is written as text.
create function headwater.wal_kind(type oid, out kind text, out type_name text)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  with recursive base (oid, typtype, typbasetype, is_array) as (
    select t.oid, t.typtype, t.typbasetype, t.typsubscript = 'array_subscript_handler'::regproc
    from pg_type t where t.oid = type
    union all
    select t.oid, t.typtype, t.typbasetype, t.typsubscript = 'array_subscript_handler'::regproc
    from base b join pg_type t on t.oid = b.typbasetype where b.typtype = 'd'
  )
  select case
      when not headwater.trusts(type) then 'text'
      when b.oid = 'bool'::regtype then 'boolean'
      when b.oid in ('int2'::regtype, 'int4'::regtype, 'int8'::regtype) then 'integer'
      when b.oid in ('float4'::regtype, 'float8'::regtype, 'numeric'::regtype) then 'number'
      when b.oid = 'timestamp'::regtype then 'timestamp'
      when b.oid = 'timestamptz'::regtype then 'timestamptz'
      when b.oid in ('json'::regtype, 'jsonb'::regtype) then 'json'
      when b.is_array or b.typtype = 'c' or (b.oid >= 16384 and exists (
             select from pg_cast k
             where k.castsource = b.oid and k.casttarget = 'json'::regtype and k.castfunc <> 0)) then 'server'
      else 'text' end,
    format_type(b.oid, null)
  from base b where b.typtype <> 'd'
$$;

-- Says in the WAL who writes, where tables are captured from it. Every role may send such a message anyway.
create function headwater.say_actor(actor text) returns void
language sql security definer
set search_path = pg_catalog, pg_temp
as $$
  select pg_logical_emit_message(true, 'headwater.actor', actor)
  from headwater.installation where wal_slot is not null
$$;

-- The same for a writer that is not a mutation: select headwater.set_actor('ada', 'import', 'trace-1').
create function headwater.set_actor(user_id text, function_name text default null, trace_id text default null)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  perform set_config('headwater.user_id', coalesce(user_id, ''), true),
          set_config('headwater.function_name', coalesce(function_name, ''), true),
          set_config('headwater.trace_id', coalesce(trace_id, ''), true);
  perform headwater.say_actor(json_build_array(user_id, function_name, trace_id)::text);
end $$;

grant execute on function headwater.say_actor(text), headwater.set_actor(text, text, text) to public;

revoke all on function
  headwater.wal_publication(), headwater.is_wal_captured(oid), headwater.check_wal(oid), headwater.wal_preparation(oid),
  headwater.make_wal_slot(),
  headwater.make_wal_publication(),
  headwater.use_wal_slot(text), headwater.end_wal_capture(), headwater.drop_wal_slots(interval),
  headwater.drop_wal_slot(text), headwater.is_published(oid), headwater.misses_changes(oid), headwater.unpublish(oid),
  headwater.add_wal_member(oid, oid), headwater.remove_wal_member(oid), headwater.is_in_step_with_wal(oid),
  headwater.sync_with_wal(oid), headwater.is_in_step(oid), headwater.sync_table(oid), headwater.is_watched(oid),
  headwater.remove_captures(oid), headwater.enable_table(oid, text, text),
  headwater.enable_reactivity(text, text, text),
  headwater.adopt(), headwater.wal_relation(oid, jsonb), headwater.wal_kind(oid),
  headwater.wal_root(oid)
from public;
