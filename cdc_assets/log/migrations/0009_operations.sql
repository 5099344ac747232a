-- paused_at: since when nothing is applied to the lake table; the source's own is in pipeline_meta.
alter table tables add column paused_at timestamptz;

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
