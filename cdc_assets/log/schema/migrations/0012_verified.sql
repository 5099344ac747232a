-- When a part of a table was last compared, since when none could be, and when a round of parts had
-- compared all of it.
alter table verified_samples
    add column compared_at timestamptz,
    add column missed_since timestamptz,
    add column round_ended timestamptz;

-- Up to which data file a lake table's keys were looked at, in the order of (sequence number, path):
-- of the files that are new, and of the round that looks at all of them in turn. The round's is NULL
-- while none is under way.
create table checked_keys (
    source text not null,
    table_name text not null,
    lake_table uuid not null,
    snapshot_id bigint not null,
    behind integer not null,
    new_sequence bigint not null,
    new_path text not null,
    round_sequence bigint,
    round_path text,
    round_ended timestamptz,
    primary key (source, table_name)
);
