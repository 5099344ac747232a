-- Where the next sampled comparison of a table begins, as a share of the whole: one after the other
-- they go round all of it.
create table verified_samples (
    source text not null,
    table_name text not null,
    next_share double precision not null,
    primary key (source, table_name)
);
