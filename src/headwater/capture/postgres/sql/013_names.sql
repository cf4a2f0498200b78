-- A table is found by its label, too: the name that status, change feeds and the console call it by
-- has no quotes ("sales.Order Lines"). What the name means in SQL comes first.

create or replace function headwater.find_table(name text) returns regclass
language sql stable
as $$
  select coalesce(
    case when name !~ '\s' or name ~ '"' then pg_catalog.to_regclass(name) end,
    pg_catalog.to_regclass(pg_catalog.quote_ident(name)),
    (select c.oid::pg_catalog.regclass
     from pg_catalog.pg_namespace n
     join pg_catalog.pg_class c on c.relnamespace = n.oid
       and c.relname = pg_catalog.substr(name, pg_catalog.length(n.nspname) + 2)::pg_catalog.name
     where pg_catalog.starts_with(name, n.nspname || '.')
     limit 1))
$$;
