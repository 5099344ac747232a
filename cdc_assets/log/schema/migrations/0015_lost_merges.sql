-- Merges during which the Spark server was lost: how often for the batch that begins at an offset of a
-- table's log. A batch that is merged, or whose table is set aside, has no row here.
create table lost_merges (
    source text not null,
    table_name text not null,
    epoch int not null,
    "offset" bigint not null,
    times int not null,
    primary key (source, table_name)
);
