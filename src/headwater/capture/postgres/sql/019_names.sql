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

-- Who holds Headwater's advisory locks, which every role can take. Writers share the first: that is how
-- they learn whether a reader polls. `is_ours` says whether the role may do what the lock is for.
create function headwater.lock_holders() returns table (number integer, pid integer, role name, is_ours boolean)
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
  select l.objid::integer, l.pid, a.usename,
         a.usesysid is not null and case
           when l.objid in (1, 4, 5) then has_table_privilege(a.usesysid, 'headwater.log', 'select')
           else pg_has_role(a.usesysid, n.nspowner, 'member') end
  from pg_locks l
  join pg_namespace n on n.nspname = 'headwater'
  left join pg_stat_activity a on a.pid = l.pid
  where l.locktype = 'advisory' and l.classid = headwater.lock_class()::oid and l.objsubid = 2 and l.granted
    and l.database = (select oid from pg_database where datname = current_database())
    and (l.objid <> 1 or l.mode = 'ExclusiveLock')
$$;

-- Tables are enabled, disabled and looked after one at a time. Waits for its turn; where a role that may do
-- none of this has taken the lock, says so instead.
create function headwater.take_turn() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  stranger record;
begin
  if pg_try_advisory_xact_lock(headwater.lock_class(), 4) then
    return;
  end if;
  select * into stranger from headwater.lock_holders() h where h.number = 4 and not h.is_ours limit 1;
  if found then
    raise exception 'headwater: process % of role % holds the lock under which tables are enabled',
      stranger.pid, stranger.role
      using errcode = 'object_in_use', hint = format('End it: select pg_terminate_backend(%s)', stranger.pid);
  end if;
  perform pg_advisory_xact_lock(headwater.lock_class(), 4);
end $$;

do $$
declare
  definition text;
begin
  for definition in
    select replace(pg_get_functiondef(p.oid), 'pg_advisory_xact_lock(headwater.lock_class(), 4)',
                   'headwater.take_turn()')
    from pg_proc p
    where p.oid in ('headwater.enable_table(oid)'::regprocedure, 'headwater.disable_table(oid)'::regprocedure,
                    'headwater.sync_tables()'::regprocedure)
  loop
    execute definition;
  end loop;
end $$;

-- What only Headwater's role can read: gateways sign with it what they send to each other by NOTIFY, which
-- every role can send. With row-level security and no policy, a `grant select on all tables` does not
-- open it.
create table headwater.secret (key bytea not null);
alter table headwater.secret enable row level security;
revoke all on headwater.secret from public;

-- Two random UUIDs: 244 bits that cannot be guessed.
create function headwater.new_secret() returns bytea
language sql volatile
set search_path = pg_catalog, pg_temp
as $$ select sha256(convert_to(concat(gen_random_uuid(), gen_random_uuid()), 'UTF8')) $$;

insert into headwater.secret values (headwater.new_secret());

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
  update headwater.secret set key = headwater.new_secret();
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

-- For a write after DDL: logs the reset that is due, once a transaction. It is remembered for the writes
-- that follow. While another transaction is about to do so, and in one with a snapshot of its own, which
-- must not fail for it, the next transaction logs another one. What the writer's session says of it is not
-- asked: every writer can set that.
create or replace function headwater.log_reset_due(root oid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if not exists (
       select from headwater.captures c
       where c.root = log_reset_due.root and headwater.is_reset_due(c, headwater.observe(c.member, c.root)))
     or headwater.has_logged_reset(root) then
    return;
  end if;
  if current_setting('transaction_isolation') = 'read committed' then
    perform from headwater.captures c where c.member = log_reset_due.root for update skip locked;
    if found then
      perform headwater.remember(headwater.observe(c.member, c.root))
      from headwater.captures c where c.root = log_reset_due.root;
    end if;
  end if;
  perform headwater.log_reset(root);
end $$;

-- Whether this transaction has said already that the table must be read again. In a serializable one the
-- log is not read: its locks would make writers of other tables fail.
create function headwater.has_logged_reset(root oid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select current_setting('transaction_isolation') <> 'serializable' and exists (
    select from headwater.log l
    where l.xid = pg_current_xact_id() and l.op = 'R'
      and l.shape = any(array(select id from headwater.shapes where relid = root)))
$$;
