-- The nearest LSN that somebody waits for: an idle flusher, which moves "lsn" now and then, looks for it.
alter table flushed_lsn add column awaited pg_lsn;
