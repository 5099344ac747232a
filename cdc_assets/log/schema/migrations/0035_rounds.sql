-- When the first part of the last round began to be compared: what changed since may be in none of it.
alter table verified_samples add column round_began timestamptz;
