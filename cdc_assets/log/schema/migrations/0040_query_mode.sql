-- Query mode (docs/operate/query-mode.md). Each copy of a table has the bound that its next query begins at, in
-- microseconds since 1970 or in numbers of a sequence, of the watermark that "rule" names.
alter table query_watermarks drop column watermark, add column epoch int not null default 0,
    add column rule text not null default '', add column bound bigint not null default (-9223372036854775808);
