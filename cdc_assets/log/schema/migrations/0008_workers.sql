-- Several workers share the tables of a lake: who they are, and which tables each looks after.

-- Heartbeats of every process that holds locks, no longer only of flushers.
alter table flusher_sessions rename to sessions;

-- A worker is one process of a consumer group, and alive while one of its sessions is (sessions.holder
-- is its id) and was heard of. tables: those it would look after.
drop table consumer;
create table consumer (
    worker uuid primary key,
    consumer_group text not null,
    source text not null,
    process text not null,
    tables text[] not null,
    started_at timestamptz not null default clock_timestamp()
);

-- Which worker looks after a table; null: nobody. epoch: the fence, higher with every other worker.
create table claims (
    consumer_group text not null,
    source text not null,
    table_name text not null,
    worker uuid references consumer on delete set null,
    epoch bigint not null default 1,
    claimed_at timestamptz not null default clock_timestamp(),
    primary key (consumer_group, source, table_name)
);
create index claims_worker on claims (worker);
