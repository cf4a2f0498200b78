-- MariaDB: mariadb < shop.sql. The binary log must be on, with binlog_format = ROW,
-- binlog_row_image = FULL and binlog_row_metadata = FULL.
create database shop character set utf8mb4;
create table shop.orders (
  id int auto_increment primary key,
  customer_id int not null,
  sku varchar(20) not null,
  quantity int not null,
  amount decimal(12,2) not null,
  status varchar(20) not null default 'open'
);
insert into shop.orders (customer_id, sku, quantity, amount) values (1, 'tea', 2, 8.40), (2, 'cup', 1, 9.00);
create user mirror identified by 'only for the example';
grant select on shop.* to mirror;
grant replication slave, binlog monitor on *.* to mirror;
