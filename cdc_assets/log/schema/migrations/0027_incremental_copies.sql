-- A pin whose tables are read in many short transactions: no session holds a snapshot for it.
alter table pins add column held boolean not null default true;

-- An LSN that what such a transaction saw had committed below: the log is applied as far, at least.
alter table snapshot_progress add column read_lsn pg_lsn;
