-- PostgreSQL: psql "$HEADWATER_URL" -f customers.sql
create table customers (id int primary key, name text not null, region text not null);
insert into customers values (1, 'Ann', 'west'), (2, 'Bob', 'east');
