-- rows_differed: of the rows applied, those that the lake had otherwise, or not at all. searched_from: where in
-- the log the changes begin that may have left out values of rows which are still to be read by key.
alter table backfills add rows_differed bigint not null default 0, add searched_from bigint;
