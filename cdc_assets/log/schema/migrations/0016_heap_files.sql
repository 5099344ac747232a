-- The heaps of each followed table and the file of each ({"oid": filenode}), as they were when that was
-- last known to be whole. horizon, lsn: every transaction below was over then; null: as of the source's
-- last look (pipeline_meta, heaps_seen). pending: the log has to reach it before a change is judged.
-- truncated: where the log last has a TRUNCATE of the table.
create table heap_files (
    source text not null,
    table_name text not null,
    epoch int not null,
    files json not null,
    horizon bigint,
    lsn pg_lsn,
    pending pg_lsn,
    truncated pg_lsn,
    primary key (source, table_name)
);
