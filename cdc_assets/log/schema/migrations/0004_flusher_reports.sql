-- What the flusher that has the turn, or had it last, said of itself, and when by this server's clock.
create table flusher_reports (
    source text primary key,
    report json not null,
    reported_at timestamptz not null default clock_timestamp()
);
