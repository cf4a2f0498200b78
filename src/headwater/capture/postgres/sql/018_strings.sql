-- Strings: a writer may have set standard_conforming_strings = off. The body of a function is read with
-- the writer's setting, and a backslash in a literal would then be an escape: '\u0000' made every write
-- fail. Functions without a backslash need no setting, which costs a little at every call.
do $$
declare
  function regprocedure;
begin
  for function in
    select p.oid::regprocedure from pg_catalog.pg_proc p
    where p.pronamespace = 'headwater'::regnamespace and strpos(p.prosrc, chr(92)) > 0
      and p.proname !~ '^capture_[0-9]'
  loop
    execute format('alter function %s set standard_conforming_strings = on', function);
  end loop;
end $$;
