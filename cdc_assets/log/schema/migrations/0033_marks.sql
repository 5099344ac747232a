-- A mark is an LSN of the source, and of each table's log the offset up to which it committed below that.
drop table if exists pending_markers;
drop table if exists marker_emissions;

create table marks (
    source text not null,
    name text not null,
    lsn pg_lsn not null,
    created_at timestamptz not null default clock_timestamp(),
    scheduled boolean not null default false,
    primary key (source, name)
);

-- pending: merges stop at the offset until the lake table has the tag. missed: reason says why it has none.
create table marked_tables (
    source text not null,
    name text not null,
    table_name text not null,
    epoch int not null,
    "offset" bigint not null,
    state text not null check (state in ('pending', 'tagged', 'missed')),
    snapshot_id bigint,
    reason text,
    primary key (source, name, table_name),
    foreign key (source, name) references marks (source, name) on delete cascade
);

create index marked_tables_pending on marked_tables (source, table_name, "offset") where state = 'pending';
