-- The coordination schema. Every table carries the source's name, so that several sources can share
-- one coordination database. LSNs are pg_lsn: compared as numbers, printed as Postgres prints them.

create table pipeline_meta (
    source text not null,
    key text not null,
    value text not null,
    primary key (source, key)
);

-- One row a replicated table. state: waiting (needs a pin), copying (pinned, chunks outstanding),
-- streaming (copied; its log is applied), parked (can't go on; reason says why and what to do).
create table tables (
    source text not null,
    table_name text not null,
    oid oid not null,
    epoch int not null default 1,
    state text not null check (state in ('waiting', 'copying', 'streaming', 'parked')),
    key_columns text[] not null,
    columns jsonb not null,
    pin uuid,
    snapshot_lsn pg_lsn,
    complete_lsn pg_lsn,
    reason text,
    updated_at timestamptz not null default now(),
    primary key (source, table_name)
);

-- A consistent point and the exported snapshot that shows the source as of it. The snapshot lives
-- as long as one of its holders: sessions of the source, idle in a transaction that imported it.
create table pins (
    pin uuid primary key,
    source text not null,
    consistent_point pg_lsn not null,
    created_at timestamptz not null default now(),
    released_at timestamptz
);

create table pin_holders (
    pin uuid not null references pins on delete cascade,
    snapshot_name text not null,
    backend_pid int not null,
    since timestamptz not null default now(),
    primary key (pin, snapshot_name)
);

-- The frozen plan of a table's copy. A cache: which chunks landed is what the Iceberg table says.
create table snapshot_progress (
    source text not null,
    table_name text not null,
    epoch int not null,
    chunk text not null,
    first_block bigint not null,
    end_block bigint,
    state text not null default 'planned' check (state in ('planned', 'claimed', 'landed')),
    claimed_by text,
    heartbeat_at timestamptz,
    rows bigint,
    bytes bigint,
    seconds double precision,
    landed_at timestamptz,
    primary key (source, table_name, epoch, chunk)
);

-- next_offset: the offset that the next registered row of the table gets.
-- The log of a table is one sequence for ever: a new epoch of its copy doesn't break it.
create table log_seq (
    source text not null,
    table_name text not null,
    next_offset bigint not null,
    primary key (source, table_name)
);

-- A staged file holds the offsets [start_offset, end_offset) in commit order. flushable_lsn: where
-- the last transaction in it ended.
create table log_index (
    source text not null,
    table_name text not null,
    start_offset bigint not null,
    end_offset bigint not null,
    path text not null,
    row_count bigint not null,
    byte_size bigint not null,
    flushable_lsn pg_lsn not null,
    commit_time timestamptz not null,
    registered_at timestamptz not null default now(),
    primary key (source, table_name, start_offset),
    check (end_offset = start_offset + row_count)
);

create table flushed_lsn (
    source text primary key,
    lsn pg_lsn not null,
    commit_time timestamptz,
    updated_at timestamptz not null default now()
);

-- "offset": the first offset not yet applied. A cache of what the Iceberg table's summary says.
create table mat_cursor (
    consumer_group text not null,
    source text not null,
    table_name text not null,
    "offset" bigint not null,
    applied_lsn pg_lsn not null,
    commit_time timestamptz,
    updated_at timestamptz not null default now(),
    primary key (consumer_group, source, table_name)
);

create table consumer (
    consumer_group text not null,
    worker text not null,
    source text not null,
    table_name text not null,
    heartbeat_at timestamptz not null default now(),
    primary key (consumer_group, source, table_name)
);

create table query_watermarks (
    source text not null,
    table_name text not null,
    watermark text not null,
    updated_at timestamptz not null default now(),
    primary key (source, table_name)
);

create table pending_markers (
    marker uuid primary key,
    source text not null,
    lsn pg_lsn not null,
    created_at timestamptz not null default now()
);

create table marker_emissions (
    marker uuid not null,
    source text not null,
    table_name text not null,
    "offset" bigint not null,
    emitted_at timestamptz not null default now(),
    primary key (marker, table_name)
);
