-- Where mirrored changes came from. A runner writes one row into headwater.source_transactions in each
-- transaction in which it applies changes of its source, so the origin of a row of the log is found by its
-- transaction id. Writers of other tables pay nothing for it.

-- The log as people read it, with the origin of mirrored changes.
create or replace view headwater.changes as
select
  l.seq,
  l.xid,
  l.at,
  s.schema_name,
  s.table_name,
  case l.op when 'I' then 'insert' when 'U' then 'update' when 'D' then 'delete'
            when 'T' then 'truncate' when 'R' then 'reset' end as op,
  case when l.op in ('I', 'U', 'D')
       then headwater.key_of(coalesce(l.after, l.before), s.key) end as key,
  l.before,
  l.after,
  case when l.op = 'U' then headwater.changed_columns(l.before, l.after) end as changed,
  nullif(l.user_id, '') as user_id,
  nullif(l.function_name, '') as function_name,
  nullif(l.trace_id, '') as trace_id,
  l.shape,
  o.source,
  o.position as source_position,
  o.committed_at as source_committed_at
from headwater.log l
cross join lateral (select * from headwater.shapes where id = l.shape limit 1) s
left join headwater.source_transactions o on o.xid = l.xid;

-- Roles that were given the log before these tables existed. Of the sources they only need to know their
-- names and kinds, of the mirrors which tables they are.
do $do$
declare
  reader text;
begin
  for reader in
    select case a.grantee when 0 then 'public' else a.grantee::regrole::text end
    from pg_class c, aclexplode(c.relacl) a
    where c.oid = 'headwater.log'::regclass and a.privilege_type = 'SELECT' and a.grantee <> c.relowner
  loop
    execute format('grant select on headwater.source_transactions to %s', reader);
    execute format('grant select (relid) on headwater.source_tables to %s', reader);
    execute format('grant select (name, kind) on headwater.sources to %s', reader);
  end loop;
end $do$;

-- Roles that enable tables look up here whether a table is captured from the WAL.
do $do$
declare
  capturer text;
begin
  for capturer in
    select case a.grantee when 0 then 'public' else a.grantee::regrole::text end
    from pg_class c, aclexplode(c.relacl) a
    where c.oid = 'headwater.log'::regclass and a.privilege_type = 'INSERT' and a.grantee <> c.relowner
  loop
    execute format('grant select, insert, update, delete on headwater.wal_members to %s', capturer);
  end loop;
end $do$;

-- URLs may have passwords: with row-level security and no policy, a `grant select on all tables` does not
-- open this table to readers of the log.
alter table headwater.source_definitions enable row level security;

-- Counts what capture from the WAL sends to the log. It shows that capture works while one large
-- transaction is appended, and that the log may have rows from the WAL, also after such capture has ended.
-- Every reader of the log reads it, so everybody may.
create sequence headwater.wal_batches;
grant select on sequence headwater.wal_batches to public;
