-- Whose turn it is to flush, and what the source looked like when a table was pinned.

-- The sessions of every flusher process, waiting or active, with its heartbeat. The lock decides who
-- is active; this says which sessions may be ended because their process wasn't heard of for long.
create table flusher_sessions (
    pid int not null,
    backend_start timestamptz not null,
    source text not null,
    holder uuid not null,
    process text not null,
    heartbeat_at timestamptz not null default clock_timestamp(),
    primary key (pid, backend_start)
);

-- How the publication had the table when it was pinned: the entry's oid, which another entry for the
-- same table doesn't have. Null: not known yet.
alter table tables add column published_as text;
