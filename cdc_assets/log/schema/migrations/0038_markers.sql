-- What became of the rows of the source's table markers.table; of one that is refused no mark was made.
create table markers (
    source text not null,
    lsn pg_lsn not null,
    number int not null,
    marker text not null,
    name text not null,
    received_at timestamptz not null default clock_timestamp(),
    refused text,
    primary key (source, lsn, number)
);
