-- Care of a table during which the Spark server was lost (its compaction, a sample of it): how often within a
-- day, and when last. What is done without has no row here.
create table lost_care (
    source text not null,
    table_name text not null,
    what text not null,
    times int not null,
    ended_at timestamptz not null,
    primary key (source, table_name, what)
);
