-- Totals of what any process did for a source: they only rise. ended_at: when the last of it ended. Rows of hot
-- updates: half of each page is left for their next versions.
create table work_done (
    source text not null,
    kind text not null,
    outcome text not null check (outcome in ('done', 'failed')),
    count bigint not null default 0,
    rows bigint not null default 0,
    bytes bigint not null default 0,
    seconds double precision not null default 0,
    ended_at timestamptz not null default clock_timestamp(),
    primary key (source, kind, outcome)
) with (fillfactor = 50);
