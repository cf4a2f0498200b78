-- What a part of the pipeline is busy with, where that takes long: reading tables, building a view.
-- It is done when task_done is task_total; the time left is an estimate.

alter table headwater.pipeline
  add column task text,
  add column task_done bigint,
  add column task_total bigint,
  add column task_seconds_left double precision;
