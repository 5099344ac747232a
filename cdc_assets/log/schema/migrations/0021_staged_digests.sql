-- sha256: of the staged file's bytes; null for what an earlier version registered.
alter table log_index add column sha256 bytea;
