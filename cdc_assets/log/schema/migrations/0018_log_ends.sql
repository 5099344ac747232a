-- What waits to be applied is asked every second, and the log keeps what was applied for a day.
create index log_index_ends on log_index (source, table_name, end_offset);
