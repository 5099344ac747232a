-- passed_at: when maintenance first saw every consumer group's cursor past the entry. Its file is
-- removed a grace period later, together with the row; null again if a cursor was moved back.
alter table log_index add column passed_at timestamptz;
create index log_index_passed on log_index (source, table_name, passed_at)
    where passed_at is not null;
