-- Query mode: up to where the log has a table, while flushed_lsn stays behind for another that can't be read.
alter table query_watermarks add column level pg_lsn, add column level_at timestamptz;
