-- paused_at: since when nothing is applied to the lake table; the source's own is in pipeline_meta.
alter table tables add column paused_at timestamptz;

-- What of a table's values its lake table can't hold: counted by column, of the copy of an epoch and
-- of its log below an offset.
create table unrepresentable (
    source text not null,
    table_name text not null,
    epoch int not null,
    "offset" bigint not null,
    lost json not null,
    primary key (source, table_name)
);

-- How a source was at some moments: what its health report draws. Bounded by who writes it.
create table health_samples (
    source text not null,
    taken_at timestamptz not null default clock_timestamp(),
    lag_seconds double precision,
    lag_bytes bigint,
    retained_bytes bigint,
    pending_rows bigint not null,
    rows_staged bigint not null,
    rows_applied bigint not null,
    primary key (source, taken_at)
);
