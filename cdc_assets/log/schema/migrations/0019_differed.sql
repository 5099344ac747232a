-- When a comparison last found rows of a table that differ, and in which of its copies.
alter table verified_samples
    add column differed_at timestamptz,
    add column differed_epoch integer;
