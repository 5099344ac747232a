-- Of the rows applied, those that the lake had otherwise, or not at all.
alter table backfills add rows_differed bigint not null default 0;
