-- How far the streams of the data pipeline are, as the pipeline itself writes it down every few
-- seconds. It may be enabled like any table, for live queries over it: the pipeline leaves changes of
-- tables in this schema out, or each of its reports would give it something new to report.

create table headwater.pipeline (
  name text primary key,
  state text not null,
  owner text not null,
  batch bigint,
  position text,
  changes bigint not null default 0,
  input_rate double precision not null default 0,
  processed_rate double precision not null default 0,
  behind_changes bigint,
  behind_seconds double precision,
  restarts integer not null default 0,
  error text,
  error_at timestamptz,
  updated_at timestamptz not null default clock_timestamp()
);

revoke all on headwater.pipeline from public;
