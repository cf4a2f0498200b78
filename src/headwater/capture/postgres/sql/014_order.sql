-- The order of changes inside one statement. Triggers, volatile functions, foreign keys and the other
-- parts of the statement itself write to the same table while it is at work, and each is logged when
-- its own trigger runs, which says little about when it happened. So the order is taken from the
-- images: each change's `before` is its key's previous `after`. See docs/design/003-capture-function.md.

drop function headwater.mark() cascade;
drop function headwater.numbered(text, text, text[], text);

-- Called by functions that were made before this version and are not ours to make again. Their marks
-- are gone, so the order is not known.
create or replace function headwater.settle(root oid, operation text, depth integer, before_own bigint) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$ select headwater.log_reset(root) $$;

-- Statements at work on a captured table stand in a setting of the transaction that is named after the
-- table, headwater.open_<oid>. Each adds an entry when it begins and removes it when its rows are logged:
--
--   <operation>:<relation>[@<depth>.<transaction>][:<since>[!]]
--
-- What others log meanwhile gives the entry a `since`: the number that the log stood at before. An entry
-- without it was alone. `!` says that the changes since could not be ordered yet: some that happened are
-- not logged. The entry of a partition or partitioned table says more, for headwater.capture_row.

-- This transaction, in entries.
create function headwater.transaction_mark() returns text
language sql stable
return (pg_catalog.date_part('epoch', pg_catalog.now())
  operator(pg_catalog.*) 1e6::pg_catalog.float8)::pg_catalog.int8::pg_catalog.text;

-- The entry of a statement without `since`, as an expression.
create function headwater.own_entry(member oid, operation text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select format(
    case when relkind = 'p' or relispartition
      then '(%L operator(pg_catalog.||) pg_catalog.pg_trigger_depth()::pg_catalog.text operator(pg_catalog.||) ''.'''
           ' operator(pg_catalog.||) (pg_catalog.date_part(''epoch'', pg_catalog.now()) operator(pg_catalog.*)'
           ' 1e6::pg_catalog.float8)::pg_catalog.int8::pg_catalog.text)'
      else '%L' end,
    format(' %s:%s%s', upper(left(operation, 1)), member,
           case when relkind = 'p' or relispartition then '@' else '' end))
  from pg_class where oid = member
$$;

-- An order of the edges in which each begins where the one before it ended, as an array of their
-- numbers; null where there is none, or where it may begin anywhere and `start` does not say where.
-- Edges are sorted by the node they begin at, which is named after its first edge; 0 is a node where
-- none begins. (Hierholzer's way to an Eulerian path: every edge is walked twice.)
create function headwater.chain(nodes integer[], targets integer[], start integer) returns integer[]
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
  size constant integer := cardinality(nodes);
  surplus integer[] := array_fill(0, array[size]);
  next_edge integer[] := nodes; -- of a node: the edge to walk next
  stack integer[] := array_fill(0, array[size]);
  depth integer := 0;
  path integer[] := array_fill(0, array[size]);
  place integer := size;
  node integer;
  edge integer;
  is_open boolean := false;
begin
  for i in 1 .. size loop
    surplus[nodes[i]] := surplus[nodes[i]] + 1;
    if targets[i] > 0 then
      surplus[targets[i]] := surplus[targets[i]] - 1;
    else
      is_open := true;
    end if;
  end loop;
  for i in 1 .. size loop
    if surplus[i] <> 0 then
      is_open := true;
      if surplus[i] > 0 then
        node := i;
      end if;
    end if;
  end loop;
  node := case when is_open then node else start end;
  if node is null then
    return null;
  end if;
  loop
    edge := case when node > 0 then next_edge[node] end;
    if edge <= size and nodes[edge] = node then
      next_edge[node] := edge + 1;
      depth := depth + 1;
      stack[depth] := edge;
      node := targets[edge];
    elsif depth = 0 then
      exit;
    else
      edge := stack[depth];
      depth := depth - 1;
      path[place] := edge;
      place := place - 1;
      node := nodes[edge];
    end if;
  end loop;
  if place > 0 then
    return null;
  end if;
  for i in 2 .. size loop
    if targets[path[i - 1]] <> nodes[path[i]] then
      return null;
    end if;
  end loop;
  return path;
end $$;

-- How a row `r` of the table is found by the key in the image `i.image`; null where a type of the key
-- is not one of these, whose operators and input are PostgreSQL's own and whose values JSON holds as
-- they are typed.
create function headwater.key_condition(root oid) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select case when bool_and(t.typnamespace = 'pg_catalog'::regnamespace and t.typname in (
      'int2', 'int4', 'int8', 'numeric', 'float4', 'float8', 'bool', 'text', 'varchar', 'bpchar', 'name',
      'uuid', 'date', 'time', 'timestamp', 'timestamptz', 'interval', 'bytea'))
    then string_agg(
      format('r.%1$I operator(pg_catalog.=) (i.image operator(pg_catalog.->>) %1$L)::pg_catalog.%2$I',
             a.attname, case t.typname when 'varchar' then 'text' else t.typname end), ' and ')
  end
  from pg_index i
  cross join unnest(i.indkey::int2[]) with ordinality k (attnum, ordinality)
  join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
  join pg_type t on t.oid = a.atttypid
  where i.indrelid = root and i.indisprimary and k.ordinality <= i.indnkeyatts
$$;

-- The query for what the row of `i.image` looks like now, hashed; 0 where there is none. Null where the
-- rows are not ours to read, or not all of them; or where the table is another's, whose functions the
-- planner could call (in extended statistics, in constraints).
create function headwater.present_image(root oid, seed bigint) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select format(
    'coalesce((select pg_catalog.hashtextextended(%s::pg_catalog.text, %s) from %s r where %s limit 1), 0)',
    headwater.image('r', root, root), seed, root::regclass, condition)
  from headwater.key_condition(root) condition
  where condition is not null and has_table_privilege(root, 'SELECT') and not row_security_active(root)
    and not exists (
      select from headwater.members_of(root) member join pg_class c on c.oid = member
      join pg_roles o on o.oid = c.relowner
      where o.rolname <> current_user and not o.rolsuper)
$$;

-- The condition that finds what the present statement logs: it lies in one slot, unless the statement takes
-- long or the slot ends meanwhile. To plan for all slots costs more than all the rest.
create function headwater.slot_condition() returns text
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
  select case
    when clock_timestamp() - statement_timestamp() < interval '1 second'
         and headwater.slot_at(statement_timestamp()) = headwater.slot_at(clock_timestamp())
      then ' and l.slot = ' || headwater.slot_at(clock_timestamp())
    else '' end
$$;

-- The queries over what this transaction has logged of a table since a change: `mine` has a row for
-- each change with its key and images, hashed, `chained` the same with its neighbours, `groups` a row
-- for each key whose changes are not known to be in order:
--   turned: the last of them goes first;
--   closed: they are in order, but end where they begin, and might as well begin elsewhere;
--   broken: otherwise.
create function headwater.logged_since(root oid, since bigint, seed bigint, slot text) returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  key_columns jsonb := headwater.describe(root) -> 'key';
begin
  return format(
    $query$with mine as materialized (
      select l.slot, l.seq,
             jsonb_hash_extended(jsonb_build_array(%1$s), %2$s) as k,
             coalesce(hashtextextended(l.before::text, %2$s), 0) as b,
             coalesce(hashtextextended(l.after::text, %2$s), 0) as a
      from headwater.log l
      where l.xid = pg_current_xact_id() and l.seq > %3$s and l.op in ('I', 'U', 'D')
        and l.shape = any(array(select id from headwater.shapes where relid = %4$s)) %5$s
    ), chained as materialized (
      select m.*, lag(a) over w as p, lead(seq) over w as next_seq, first_value(seq) over w as first_seq,
             first_value(b) over w as first_b
      from mine m
      window w as (partition by k order by seq)
    ), groups as (
      select k, case
        when count(*) filter (where b <> p) = 1
             and bool_or(next_seq is null and b <> p and a = first_b) then 'turned'
        when bool_or(b <> p) then 'broken'
        else 'closed' end as kind
      from chained
      group by k
      having bool_or(b <> p) or (bool_or(next_seq is null and a = first_b) and min(b) <> max(b))
    )$query$,
    (select string_agg(
       format('(coalesce(l.after, l.before) -> %L)::jsonb', name), ', ')
     from jsonb_array_elements_text(key_columns) name),
    seed, since, root, slot);
end $$;

-- Gives the changes of a table that this transaction has logged since a number the order in which they
-- chain. They exchange their numbers; those of a key that are in order stay as they are. Returns
-- whether every key is in order now.
create function headwater.put_in_order(root oid, since bigint) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  -- Another one each time, so that rows cannot be made to look alike.
  seed constant bigint := (random() * 4e18)::bigint;
  slot constant text := headwater.slot_condition();
  source constant text := headwater.logged_since(root, since, seed, slot);
  turned bigint;
  doubtful bigint;
begin
  if current_setting('transaction_isolation') = 'serializable' then
    return false; -- to read the log would make it and its neighbours fail
  end if;
  execute source || ' select count(*) filter (where kind = ''turned''),
                            count(*) filter (where kind <> ''turned'') from groups'
  into turned, doubtful;
  if turned > 0 then
    execute source || $update$
      update headwater.log l
      set seq = coalesce(c.next_seq, c.first_seq)
      from chained c
      where c.k in (select k from groups where kind = 'turned')
        and l.slot = c.slot and l.xid = pg_current_xact_id() and l.seq = c.seq$update$ || slot;
  end if;
  return doubtful = 0 or headwater.chain_keys(root, seed, source, slot);
exception when data_exception then
  return false; -- an image has JSON that can be stored and not be read, with half of a surrogate pair
end $$;

-- The same for the keys whose changes a look at the table or a search puts in order.
create function headwater.chain_keys(root oid, seed bigint, source text, slot text) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  found record;
  group_key bigint;
  nodes integer[] := '{}';
  targets integer[] := '{}';
  slots smallint[] := '{}';
  numbers bigint[] := '{}';
  start integer;
  moved_slots smallint[] := '{}';
  moved_from bigint[] := '{}';
  moved_to bigint[] := '{}';
  path integer[];
  sorted bigint[];
  complete boolean := true;
begin
  for found in execute source || format(
    $query$, edges as (
      select c.k, c.slot, c.seq, c.b, c.a, c.first_seq,
             row_number() over (partition by c.k order by c.b, c.seq) as i,
             rank() over (partition by c.k order by c.b) as node
      from chained c where c.k in (select k from groups where kind <> 'turned')
    ), sources as (select distinct k, b, node from edges),
    states as (
      select e.k, %s as b
      from edges e
      join lateral (
        select coalesce(l.after, l.before) as image from headwater.log l
        where l.slot = e.slot and l.xid = pg_current_xact_id() and l.seq = e.seq %s
      ) i on true
      where e.seq = e.first_seq
    )
    select e.k, e.slot, e.seq, e.node, coalesce(t.node, 0) as target, s.node as start
    from edges e
    left join sources t on t.k = e.k and t.b = e.a
    left join states on states.k = e.k
    left join sources s on s.k = e.k and s.b = states.b
    union all
    select null, null, null, null, null, null
    order by 1 nulls last, 4, 3$query$,
    coalesce(headwater.present_image(root, seed), 'null::bigint'), slot)
  loop
    if found.k is distinct from group_key and group_key is not null then
      path := headwater.chain(nodes, targets, start);
      complete := complete and path is not null;
      if path is not null then
        sorted := array(select unnest(numbers) order by 1);
        for i in 1 .. cardinality(path) loop
          if numbers[path[i]] <> sorted[i] then
            moved_slots := moved_slots || slots[path[i]];
            moved_from := moved_from || numbers[path[i]];
            moved_to := moved_to || sorted[i];
          end if;
        end loop;
      end if;
      nodes := '{}'; targets := '{}'; slots := '{}'; numbers := '{}';
    end if;
    group_key := found.k;
    start := found.start;
    nodes := nodes || found.node::integer;
    targets := targets || found.target::integer;
    slots := slots || found.slot;
    numbers := numbers || found.seq;
  end loop;
  if cardinality(moved_from) > 0 then
    execute 'update headwater.log l
             set seq = m.new_seq
             from unnest($1, $2, $3) m (slot, old_seq, new_seq)
             where l.slot = m.slot and l.xid = pg_current_xact_id() and l.seq = m.old_seq' || slot
    using moved_slots, moved_from, moved_to;
  end if;
  return complete;
end $$;

-- Removes the entry of a statement whose rows are logged behind the number `first`, and orders what was
-- logged since it began, if it was not alone. What cannot be ordered is left to the statements that are
-- still at work on the table; where there are none, the table must be read again, and the log says so.
create function headwater.settle(root oid, member oid, operation text, first bigint, logged bigint)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  entries text[] := headwater.open_entries(root);
  own integer := (
    select max(place) from unnest(entries) with ordinality e (entry, place)
    where entry ~ format('^%s:%s(@|:|$)', left(operation, 1), member));
  since bigint := case when own is null then 0 else headwater.since_of(entries[own]) end;
  complete boolean := true;
begin
  if logged > 0 then
    entries := headwater.add_since(entries, first);
  end if;
  if since is null and logged > 1 and operation = 'UPDATE' and headwater.may_repeat_rows(member)
     and exists (select from pg_inherits where inhparent = member) then
    since := first; -- its rows may not be paired, or take each other's keys
  end if;
  if since is not null and (logged > 0 or entries[own] like '%!') then
    complete := headwater.put_in_order(root, since);
  end if;
  if current_setting('headwater.noted_' || root, true) <> '' then
    complete := false;
    since := coalesce(since, first);
  end if;
  if not complete then
    entries := headwater.add_doubt(entries, since, own);
    if cardinality(entries) = (own is not null)::integer then
      insert into headwater.log (op, shape) values ('R', headwater.register_shape(root));
      perform set_config('headwater.noted_' || root, '', true);
    end if;
  end if;
  if own is not null then
    entries := entries[:own - 1] || entries[own + 1:];
  end if;
  perform headwater.set_entries(root, entries);
end $$;

-- The entries of statements at work on a table. What is not an entry was set by somebody else.
create function headwater.open_entries(root oid) returns text[]
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select array(
    select part
    from string_to_array(current_setting('headwater.open_' || root, true), ' ') parts,
         unnest(parts) with ordinality p (part, place)
    where part ~ format('^[IUD]:\d{1,10}(@\d{1,5}\.%s)?(:\d{1,18}!?)?$', headwater.transaction_mark())
    order by place)
$$;

create function headwater.set_entries(root oid, entries text[]) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
  select set_config('headwater.open_' || root,
    (select coalesce(string_agg(' ' || entry, '' order by place), '')
     from unnest(entries) with ordinality e (entry, place)), true)
$$;

-- The number behind which others logged while the statement was at work; null if it was alone.
create function headwater.since_of(entry text) returns bigint
language sql immutable
set search_path = pg_catalog, pg_temp
as $$ select nullif(rtrim(split_part(entry, ':', 3), '!'), '')::bigint $$;

-- The entries after changes behind a number were logged: none is alone any more.
create function headwater.add_since(entries text[], since bigint) returns text[]
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select array(
    select entry || case when split_part(entry, ':', 3) = '' then ':' || since else '' end
    from unnest(entries) with ordinality e (entry, place)
    order by place)
$$;

-- The entries after changes since a number could not be ordered: every statement tries again, and those
-- that began after the one that tried begin with its changes.
create function headwater.add_doubt(entries text[], since bigint, own integer) returns text[]
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select array(
    select format('%s:%s:%s!', split_part(entry, ':', 1), split_part(entry, ':', 2),
                  case when place > own or headwater.since_of(entry) is null then since
                       else headwater.since_of(entry) end)
    from unnest(entries) with ordinality e (entry, place)
    order by place)
$$;

-- The INSERT into the log for one statement on `member`.
create or replace function headwater.capture_statement(member oid, root oid, operation text, shape bigint)
returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  before_image text := headwater.image('o', root, root);
  after_image text := headwater.image('n', root, root);
  old_rows constant text := headwater.as_root('old_rows', member, root);
  new_rows constant text := headwater.as_root('new_rows', member, root);
  actor constant text := headwater.actor();
  first_key text;
  same_key text;
  keys text[];
begin
  if operation = 'INSERT' then
    return format(
      'insert into headwater.log (op, shape, after, user_id, function_name, trace_id)
       select ''I'', %s, %s, %s from %s n', shape, after_image, actor, new_rows);
  elsif operation = 'DELETE' then
    return format(
      'insert into headwater.log (op, shape, before, user_id, function_name, trace_id)
       select ''D'', %s, %s, %s from %s o', shape, before_image, actor, old_rows);
  end if;
  -- Built-in types are compared by the operator of the key's index, text by its bytes, so that a key
  -- that changed only for the eye ('a' to 'A' under a case-blind collation) is a delete and an insert
  -- too. Of other types only the text is compared: an operator could be its owner's code.
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
  if headwater.may_repeat_rows(member) then
    return headwater.capture_versions(shape, keys, same_key, before_image, after_image, old_rows, new_rows);
  end if;
  -- A full join, because a changed key leaves both of its sides alone, and because it is never
  -- planned as a nested loop: the plan is made for one row and must do for a million.
  return format(
    'insert into headwater.log (op, shape, before, after, user_id, function_name, trace_id)
     select case when o.%1$s is null then ''I'' when n.%1$s is null then ''D'' else ''U'' end::pg_catalog."char",
            %2$s,
            case when o.%1$s is not null then %3$s end,
            case when n.%1$s is not null then %4$s end,
            %5$s
     from %7$s o full join %8$s n on %6$s
     where (o.* operator(pg_catalog.*=) n.*) is not true',
    first_key, shape, before_image, after_image, actor, same_key, old_rows, new_rows);
end $$;

-- Rows of a member as rows of the table: its columns may stand in another order, and the same row
-- must have the same image, whichever relation a statement names.
create function headwater.as_root(source text, member oid, root oid) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select case when member = root then source
         else format('(select %s from %s)', string_agg(quote_ident(attname), ', ' order by attnum), source) end
  from pg_attribute where attrelid = root and attnum > 0 and not attisdropped
$$;

-- The same for an update that may touch a row twice: the rows are paired by their number. PostgreSQL
-- writes both lists in turn, except for a row that a trigger kept from moving to another partition:
-- then the lists differ in length, and each old row is a delete and each new row an insert.
create function headwater.capture_versions(
  shape bigint, keys text[], same_key text, before_image text, after_image text, old_rows text, new_rows text
) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select format(
    'insert into headwater.log (op, shape, before, after, user_id, function_name, trace_id)
     select e.op::pg_catalog."char", %1$s, e.before, e.after, %2$s
     from (select %3$s, row(o.*) as hw_row, %4$s as hw_image, pg_catalog.row_number() over () as hw_number
           from %8$s o) o
     full join (
       select %5$s, row(n.*) as hw_row, %6$s as hw_image,
              pg_catalog.row_number() over () operator(pg_catalog.+) (
                select case when old operator(pg_catalog.=) new then 0 else old end
                from (select (select pg_catalog.count(*) from old_rows) as old,
                             (select pg_catalog.count(*) from new_rows) as new) sizes) as hw_number
       from %9$s n) n on o.hw_number operator(pg_catalog.=) n.hw_number
     cross join lateral (
       select ''U'', o.hw_image, n.hw_image where %7$s
       union all
       select ''D'', o.hw_image, null where o.hw_number is not null and (%7$s) is not true
       union all
       select ''I'', null, n.hw_image where n.hw_number is not null and (%7$s) is not true
     ) e (op, before, after)
     where (o.hw_row operator(pg_catalog.*=) n.hw_row) is not true
     order by coalesce(o.hw_number, n.hw_number), e.op',
    shape, headwater.actor(),
    (select string_agg('o.' || key, ', ') from unnest(keys) key), before_image,
    (select string_agg('n.' || key, ', ') from unnest(keys) key), after_image,
    same_key, old_rows, new_rows)
$$;

-- A row written to a partition that was attached after the table was enabled and has no function of
-- its own yet. Cloned onto it by PostgreSQL. While a statement on a parent is at work, the row is only
-- noted: that statement sees it too, unless another part of it names the partition.
create or replace function headwater.capture_row() returns trigger
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
  before_key text;
  after_key text;
  shape bigint;
  first bigint;
begin
  if not exists (select from headwater.tables where relid = root and enabled)
     or exists (select from headwater.captures c where c.member = tg_relid and c.root = capture_row.root)
     or (tg_op = 'UPDATE' and old operator(pg_catalog.*=) new) then
    return null;
  end if;
  -- For the statements of a cascading foreign key, BEFORE triggers run one level deeper than AFTER.
  if current_setting('headwater.open_' || root, true) ~ format(
       ' [IUD]:\d+@(%s|%s)\.%s(:| |$)', pg_trigger_depth(), pg_trigger_depth() + 1, headwater.transaction_mark()) then
    if headwater.may_note(root, true) then
      take := headwater.note_version(tg_relid, root);
      if tg_op <> 'INSERT' then
        execute take using 'B', old;
      end if;
      if tg_op <> 'DELETE' then
        execute take using 'A', new;
      end if;
    end if;
    return null;
  end if;
  shape := headwater.register_shape(root);
  take := format('select %s, json_build_array(%s)::text from %s r', headwater.image('r', root, root),
                 (select string_agg(format('r.%I', name), ', ')
                  from jsonb_array_elements_text(headwater.describe(root) -> 'key') name),
                 headwater.as_root('(select ($1).*) row', tg_relid, root));
  if tg_op <> 'INSERT' then
    execute take into before_image, before_key using old;
  end if;
  if tg_op <> 'DELETE' then
    execute take into after_image, after_key using new;
  end if;
  first := headwater.begin_row(root);
  insert into headwater.log (op, shape, before, after, user_id, function_name, trace_id)
  select i.op::"char", shape, i.before, i.after,
         current_setting('headwater.user_id', true),
         current_setting('headwater.function_name', true),
         current_setting('headwater.trace_id', true)
  from (
    select 'U' as op, before_image as before, after_image as after
    where before_key = after_key
    union all
    select 'D', before_image, null
    where before_key is not null and before_key is distinct from after_key
    union all
    select 'I', null, after_image
    where after_key is not null and before_key is distinct from after_key
  ) i;
  perform headwater.settle_row(root, first);
  if headwater.may_notify() then
    perform headwater.notify(shape, tg_op, 1, before_image, after_image);
  end if;
  return null;
end $$;

-- The number that the log stands at before a row alone is logged. Its statement left no entry. So it is
-- 0, and the row is ordered among all that the transaction logged of the table, if anything but such
-- rows was logged since the last of them.
create function headwater.begin_row(root oid) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  last_row text := current_setting('headwater.row_' || root, true);
begin
  return case when last_row <> '' and last_row = currval('headwater.log_seq')::text
         then nextval('headwater.log_seq') else 0 end;
end $$;

-- The same as headwater.settle for a row alone.
create function headwater.settle_row(root oid, first bigint) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  entries text[] := headwater.open_entries(root);
begin
  if first = 0 and not headwater.put_in_order(root, 0) and cardinality(entries) = 0 then
    insert into headwater.log (op, shape) values ('R', headwater.register_shape(root));
  end if;
  perform set_config('headwater.row_' || root, currval('headwater.log_seq')::text, true);
  perform headwater.set_entries(root, headwater.add_since(entries, first));
end $$;

-- A row that an update moves to another partition is deleted there and inserted here. MERGE hands it to
-- neither the old nor the new rows of its update, and to the triggers of its deletes and inserts only
-- if it has such parts; otherwise no statement trigger sees it (PostgreSQL 15 to 18). So it is noted.
create function headwater.note_move() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC' set datestyle = 'ISO' set intervalstyle = 'iso_8601'
set bytea_output = 'hex' set extra_float_digits = 1 set lc_monetary = 'C'
as $$
declare
  root oid := pg_partition_root(tg_relid);
begin
  if exists (select from headwater.tables where relid = root and enabled) and headwater.may_note(root, false) then
    execute headwater.note_version(tg_relid, root)
    using case when tg_op = 'DELETE' then 'B' else 'A' end, case when tg_op = 'DELETE' then old else new end;
  end if;
  return null;
end $$;

-- Rows that a statement at work is expected to see are noted in a setting that is named
-- headwater.noted_<oid>, until it has seen them. Where there are too many to note: `alone` says that
-- others may fare otherwise, and then one is noted that is never seen.
create function headwater.may_note(root oid, alone boolean) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  noted constant text := current_setting('headwater.noted_' || root, true);
begin
  if coalesce(length(noted), 0) < 20000 then
    return true;
  end if;
  if alone and noted not like '%!' then
    perform set_config('headwater.noted_' || root, noted || ' !', true);
  end if;
  return false;
end $$;

-- The statement that notes the row $2, as one that is before ($1 is 'B') or after ('A') a change. It
-- is not noted twice in a row: headwater.note_move and headwater.capture_row see the same.
create function headwater.note_version(member oid, root oid) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select format(
    'select set_config(%1$L, noted || case when right(noted, length(note)) = note then '''' else note end, true)
     from (select coalesce(current_setting(%1$L, true), '''') as noted,
                  concat('' '', $1, hashtextextended(r::text, 0)) as note from %2$s r) n',
    'headwater.noted_' || root, headwater.as_root('(select ($2).*) row', member, root))
$$;

-- Whether a row is deleted or inserted by an update alone, as the condition of a trigger: no statement
-- that deletes or inserts has an entry at this depth.
create function headwater.moves(root oid, operation text) returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select format(
    'pg_catalog.strpos(pg_catalog.current_setting(%1$L, true), '' U:'') operator(pg_catalog.>) 0
     and (pg_catalog.current_setting(%1$L, true) operator(pg_catalog.~) pg_catalog.format(
       '' %2$s:[0-9]+@%%s\.'', pg_catalog.pg_trigger_depth() operator(pg_catalog.+) 1)) is not true',
    'headwater.open_' || root, upper(left(operation, 1)))
$$;

-- Strikes rows that a statement has seen off the list.
create function headwater.strike_noted(root oid, seen text[]) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
  select set_config(name, array_to_string(array(
    select unnest(string_to_array(ltrim(current_setting(name, true)), ' ')) except all select unnest(seen)), ' '), true)
  from concat('headwater.noted_', root) name
$$;

-- What a statement on a partitioned table does about noted rows, for its function.
create function headwater.strike_source(member oid, root oid, operation text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $body$
  select format(
    $source$if current_setting('headwater.noted_%1$s', true) <> '' then
      perform headwater.strike_noted('%1$s'::oid, array(%2$s));
    end if;$source$,
    root,
    (select string_agg(
       format('select %L || hashtextextended(r::text, 0) from %s r',
              side, headwater.as_root(source, member, root)), ' union all ')
     from (values ('B', 'old_rows', 'insert'), ('A', 'new_rows', 'delete')) v (side, source, without)
     where operation <> without))
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
  foreach operation in array array['insert', 'update', 'delete'] loop
    execute format(
      'create or replace function headwater.mark_%s_%s() returns trigger language plpgsql as %L',
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

-- Is never called. Where a partition has a trigger before a row is inserted, PostgreSQL hands the row as
-- it was stored to the statement's triggers. Without one it hands over the row as it was routed: before
-- its generated columns were computed, if the partition's columns stand in another order; and for an
-- update of MERGE the row that the same statement inserted last.
create function headwater.pass_row() returns trigger
language plpgsql
as $$ begin return new; end $$;

-- The function that adds a statement's entry when it begins. It runs with the writer's rights and search
-- path, because to change either costs more than all it does: every name has its schema.
create function headwater.mark_source(member oid, root oid, operation text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $body$
  select format(
    $function$
declare
  state pg_catalog.text;
begin
  state := pg_catalog.set_config('headwater.open_%1$s',
    coalesce(pg_catalog.current_setting('headwater.open_%1$s', true), '') operator(pg_catalog.||) %2$s, true);
  return null;
end $function$,
    root, headwater.own_entry(member, operation))
$body$;

-- The function that logs a statement's rows when it ends.
create function headwater.capture_source(member oid, root oid, operation text, fingerprint bigint) returns text
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
  state text;
begin
  if current_setting('headwater.open_%2$s', true) is distinct from %7$s%8$s then
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
    perform headwater.settle('%2$s'::oid, tg_relid, tg_op, first, logged);
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
    case when is_partitioned then headwater.strike_source(member, root, operation) end);
end $body$;

-- INSERT ... ON CONFLICT DO UPDATE leaves two entries, and mostly one of them logs nothing: what
-- headwater.settle would do for them, without calling it.
create function headwater.upsert_source(member oid, root oid, operation text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $body$
  select format(case operation
    when 'update' then $branch$
  elsif current_setting('headwater.open_%2$s', true) = ' I:%1$s U:%1$s' then
    state := set_config('headwater.open_%2$s',
      case when logged > 0 then ' I:%1$s:' || first else ' I:%1$s' end, true);$branch$
    when 'insert' then $branch$
  elsif logged = 0 and current_setting('headwater.open_%2$s', true) ~ '^ I:%1$s:[0-9]+$' then
    state := set_config('headwater.open_%2$s', '', true);$branch$
    end, member, root)
$body$;
