-- Backfills: tables that stream are read again, or a part of their rows. Requests, by whomever.
create table backfills (
    source text not null,
    backfill bigint generated always as identity,
    table_name text not null,
    predicate text,
    replaces boolean not null default false,
    requested_by text not null,
    requested_at timestamptz not null default clock_timestamp(),
    state text not null default 'requested'
        check (state in ('requested', 'running', 'paused', 'stopped', 'done', 'failed')),
    reason text,
    -- The table's copy that it began in, and the files that its chunks are of.
    epoch int,
    heaps text,
    begun_at timestamptz,
    ended_at timestamptz,
    rows_read bigint not null default 0,
    rows_applied bigint not null default 0,
    rows_superseded bigint not null default 0,
    rows_removed bigint not null default 0,
    primary key (source, backfill)
);

-- The pages of each part of the table from first_block to end_block; once it is applied, the horizon it was
-- read at, and an LSN above all that was seen of it.
create table backfill_chunks (
    source text not null,
    backfill bigint not null,
    number int not null,
    first_block bigint not null,
    end_block bigint,
    state text not null default 'planned' check (state in ('planned', 'applied')),
    horizon pg_lsn,
    read_lsn pg_lsn,
    rows bigint,
    seconds double precision,
    primary key (source, backfill, number),
    foreign key (source, backfill) references backfills on delete cascade
);

-- Requests as rows, which whoever may insert here writes: see docs/beginnings.md.
create table signals (
    source text not null,
    id text not null,
    kind text not null,
    data jsonb not null default '{}',
    requested_at timestamptz not null default clock_timestamp(),
    done_at timestamptz,
    outcome text,
    primary key (source, id)
);
