-- Streaming views: what the pipeline keeps up to date, and how far each view is. The tables that hold
-- their groups and values lie in this schema, too, by number and generation; they are made and
-- replaced by the pipeline. A batch of changes and the note that it is in are one transaction.

create table headwater.views (
  name text primary key,
  number bigint not null generated always as identity unique,
  state text not null, -- new, live, or due: to be built anew
  relation oid,
  generation integer not null default 0,
  definition text,
  result text, -- columns and aggregates of the generation, as the pipeline reads them
  tables text, -- the tables as they were when it was built
  built text, -- the position at which it was built
  reached text, -- the offset up to which changes are in
  query_id text, -- the last batch that is in: of which stream, its number, where it ended
  batch bigint,
  batch_end text,
  error text,
  built_at timestamptz,
  changed_at timestamptz not null default clock_timestamp()
);

revoke all on headwater.views from public;
