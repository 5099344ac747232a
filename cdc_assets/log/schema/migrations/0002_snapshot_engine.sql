-- Copies by many workers: chunks are claimed and written one by one, files land in the lake in
-- commits of their own.

-- copied: the copy is complete and nothing is streamed (snapshot.mode: snapshot_only).
alter table tables drop constraint tables_state_check;
alter table tables add constraint tables_state_check
    check (state in ('waiting', 'copying', 'streaming', 'copied', 'parked'));

-- excluded: columns that never leave the source. followed: a flusher that streams now stages this
-- table with this oid, key and exclusion; a pin is only taken then, so that no change is missed.
alter table tables add column excluded text[] not null default '{}';
alter table tables add column followed boolean not null default false;

-- relation, filenode: the heap a chunk is a range of, and the file it had when it was planned.
-- claim: the fence, new with each claim. claim_pid: the claimer's session in this database.
-- file: what was written and awaits its commit; null for a chunk without rows.
alter table snapshot_progress drop constraint snapshot_progress_state_check;
alter table snapshot_progress add constraint snapshot_progress_state_check
    check (state in ('planned', 'claimed', 'written', 'landed'));
alter table snapshot_progress add column relation text not null default '';
alter table snapshot_progress add column relation_oid oid not null default 0;
alter table snapshot_progress add column filenode oid not null default 0;
alter table snapshot_progress add column claim uuid;
alter table snapshot_progress add column claim_pid int;
alter table snapshot_progress add column file text;
