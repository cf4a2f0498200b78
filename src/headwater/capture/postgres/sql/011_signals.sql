-- Signals: what an application says of its topics, as rows of the log. So they come and go with their
-- transaction, in order, and whoever was away finds them again. See docs/howto/topics.md.

-- Always empty: it is the shape that signals have in the log.
create table headwater.signals (
  topic text primary key,
  ids text[] not null
);

revoke all on headwater.signals from public;

select headwater.register_shape('headwater.signals'::regclass);

-- Whether whoever calls may signal: one who may write to a captured table, or do anything here.
create function headwater.may_signal() returns boolean
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  -- Inside this function we are its owner; this is who called, whatever functions lie between.
  caller name := coalesce(nullif(current_setting('role'), 'none'), session_user);
begin
  return pg_has_role(caller, current_user, 'usage') or exists (
    select from headwater.tables t join pg_class c on c.oid = t.relid
    where t.enabled
      and (has_table_privilege(caller, t.relid, 'insert, update, delete')
           or has_any_column_privilege(caller, t.relid, 'insert, update')));
end $$;

-- Says that rows with these keys have news for whoever follows the topic; heard when, and only if,
-- the transaction commits. Keys of several columns are JSON arrays.
create function headwater.signal(topic text, ids text[] default '{}') returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  shape bigint;
begin
  if topic is null or length(topic) not between 1 and 200 then
    raise exception 'headwater: the name of a topic has 1 to 200 characters, not %',
      coalesce(length(topic)::text, 'null') using errcode = 'invalid_parameter_value';
  elsif topic ~ '[,\u0001-\u001f\u007f-\u009f\u2028\u2029]' then
    raise exception 'headwater: the name of a topic has neither commas nor control characters'
      using errcode = 'invalid_parameter_value';
  elsif cardinality(ids) > 10000 then
    raise exception 'headwater: a signal has at most 10000 ids, not %', cardinality(ids)
      using errcode = 'invalid_parameter_value', hint = 'Signal in parts.';
  elsif array_position(ids, null) is not null then
    raise exception 'headwater: an id of the signal is null'
      using errcode = 'invalid_parameter_value';
  elsif not headwater.may_signal() then
    raise exception 'headwater: role % may not signal',
      coalesce(nullif(current_setting('role'), 'none'), session_user)
      using errcode = 'insufficient_privilege',
            hint = 'Those may who may write to a captured table.';
  end if;
  select s.id into shape from headwater.shapes s where s.relid = 'headwater.signals'::regclass limit 1;
  if shape is null then
    shape := headwater.register_shape('headwater.signals'::regclass);
  end if;
  insert into headwater.log (op, shape, after, user_id, function_name, trace_id)
  values ('I', shape, json_build_object('topic', topic, 'ids', coalesce(ids, '{}')),
          current_setting('headwater.user_id', true),
          current_setting('headwater.function_name', true),
          current_setting('headwater.trace_id', true));
  if headwater.may_notify() then
    -- Heard by those alone who have somebody to tell.
    perform pg_notify('headwater:' || left(md5(topic), 16), 'v1:signal');
  end if;
end $$;

-- Writers of captured tables need no right in this schema; to signal, they must find the function. It
-- is all that everybody may use here, and a test says so.
revoke all on all functions in schema headwater from public;
grant execute on function headwater.signal(text, text[]) to public;
grant usage on schema headwater to public;
