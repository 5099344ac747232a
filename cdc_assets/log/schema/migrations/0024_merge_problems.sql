-- Why a table's log couldn't be applied when it was last tried, and since when; null: it could.
alter table claims add column problem text, add column problem_since timestamptz;
