-- The database that the pages of a chunk are of, where that isn't the source's, nor a physical copy of it.
alter table snapshot_progress add column database text;
