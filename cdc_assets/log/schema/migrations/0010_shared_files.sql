-- A file may hold the rows of several entries, of small tables. first_row: the number of the entry's
-- first row in its file; null: the file is the entry's alone.
alter table log_index add column first_row bigint;
create index log_index_shared on log_index using hash (path) where first_row is not null;
