-- SQLite: sqlite3 warehouse.db < warehouse.sql
create table stock (sku text primary key, item text not null, quantity integer not null);
insert into stock values ('tea', 'Tea', 5), ('cup', 'Cup', 0);
