-- Through which publication a table's changes come, and what of its columns doesn't.
alter table tables add inserts_only boolean not null default false;
alter table tables add left_out text[] not null default '{}';
