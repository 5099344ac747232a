-- A table's version (log/verified.py) before the first part of the last round was compared. It takes the
-- place of a time, which no change's transaction or clock is ordered with.
alter table verified_samples add column round_saw text, drop column round_began;
