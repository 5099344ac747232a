-- Where a consumer group other than the lake's is in a table's log. copy: which copy of the table its offset
-- and its data belong to (epoch and snapshot LSN); null: it begins anew, from the lake table once that holds the
-- log up to "offset". snapshot_id: the snapshot of the lake table that it begins with and hasn't read to its end;
-- 0: it begins without one, and hasn't committed that.
alter table mat_cursor
    add column copy text,
    add column snapshot_id bigint;
