-- text_numbers: the attribute numbers of key columns that had a value which their lake type can't hold;
-- from the next copy of the table on they are text in the lake.
alter table tables add column text_numbers int[] not null default '{}';
