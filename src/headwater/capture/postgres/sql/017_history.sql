-- What the log remembers of the rows that were trimmed: the newest of them, by transaction, number
-- and time. Positions are recognised by their newest rows (docs/explanation/positions.md), and in a
-- quiet database these may be older than the retention. Rows of another installation are not of
-- this log: a copied database begins without them.

create table headwater.trimmed (
  installation text not null,
  xid xid8 not null,
  seq bigint not null,
  at timestamptz not null,
  primary key (installation, xid, seq)
);

-- Readers of the log that were granted its tables before this one was there; it says nothing.
grant select on headwater.trimmed to public;

-- Before a slot is emptied. As many rows as limits.MARK_ROWS.
create function headwater.remember_trimmed(slot integer) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  here text := (select id from headwater.installation);
begin
  execute format(
    'insert into headwater.trimmed (installation, xid, seq, at)
     select %L, xid, seq, at from headwater.log_%s order by xid desc, seq desc limit 1000',
    here, slot);
  delete from headwater.trimmed t
  where t.installation <> here
     or (t.xid, t.seq) < (
       select n.xid, n.seq from headwater.trimmed n where n.installation = here
       order by n.xid desc, n.seq desc offset 999 limit 1);
end $$;

create or replace function headwater.trim_log() returns integer
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  keep_from timestamptz := clock_timestamp() - (select retention from headwater.installation);
  emptied integer := 0;
begin
  for slot in 0 .. 31 loop
    if headwater.is_over(slot, keep_from) then
      begin
        execute format('lock table headwater.log_%s in access exclusive mode nowait', slot);
      exception when lock_not_available then
        continue;
      end;
      -- Looked at again, now that nobody can write to it.
      if headwater.is_over(slot, keep_from) then
        execute format(
          'select setval(''headwater.log_floor'',
             greatest(max(xid::text::bigint) + 1, (select last_value from headwater.log_floor)))
           from (select xid from headwater.log_%s order by xid desc limit 1) newest', slot);
        perform headwater.remember_trimmed(slot);
        execute format('truncate headwater.log_%s', slot);
        emptied := emptied + 1;
      end if;
    end if;
  end loop;
  return emptied;
end $$;

-- Where the database's files were replaced by an earlier copy and somebody keeps changes of the
-- history that is gone: from here on the log goes by another name, and its transaction ids are
-- distinct from those of before. Every position that was given out before is of another log then.
create function headwater.rename_log() returns text
language sql
set search_path = pg_catalog, pg_temp
as $$
  update headwater.installation set id = default;
  update headwater.trimmed set installation = (select id from headwater.installation);
  select headwater.log_id();
$$;
