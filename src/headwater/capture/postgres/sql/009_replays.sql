-- How far replays have come that write to a table of this database. A row is written in the same
-- transaction as what it tells of, so that one that was interrupted goes on where it was. The table is
-- known by its oid: another one under its name is not ours.

create table headwater.replays (
  relation oid primary key,
  name text not null,
  run jsonb not null,
  updated_at timestamptz not null default clock_timestamp()
);

revoke all on headwater.replays from public;
