-- From which commits on the log of a table that waits for its copy has all of its changes, if that is known:
-- what the copy is read from elsewhere may then be of any later moment. It is unknown again once followed is false.
alter table tables add column log_from pg_lsn;

-- When the server that has a pin's snapshot was started, which names no other one; and an LSN that whatever the
-- snapshot shows had committed below, where it may show more than what committed below the consistent point.
alter table pins add column server_started timestamptz, add column read_lsn pg_lsn;

-- What a table was like at an LSN that a person's dump was taken at (cdc-assets pin --hold), in that epoch of it.
create table held_tables (
    source text not null,
    lsn pg_lsn not null,
    table_name text not null,
    epoch int not null,
    facts jsonb not null,
    held_at timestamptz not null default now(),
    primary key (source, lsn, table_name)
);
