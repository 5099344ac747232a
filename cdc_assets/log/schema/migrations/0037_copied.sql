-- Of a complete copy: its chunks and rows, and when the last one was written. Whoever looks at all tables
-- reads no chunk of theirs any more.
alter table tables add column copied_chunks int, add column copied_rows bigint,
    add column copied_at timestamptz;
update tables t set copied_chunks = p.chunks, copied_rows = p.rows, copied_at = p.written_at
  from (select source, table_name, epoch, count(*) as chunks, coalesce(sum(rows), 0) as rows,
               max(heartbeat_at) as written_at
          from snapshot_progress group by source, table_name, epoch) p
 where p.source = t.source and p.table_name = t.table_name and p.epoch = t.epoch
   and t.state in ('streaming', 'copied');
