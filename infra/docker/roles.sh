#!/usr/bin/env bash
# The roles of source and coordination, and Dagster's database; may be run again.
set -euo pipefail
given=(-v ON_ERROR_STOP=1 -v database=app -v "source_password=$SOURCE_PASSWORD"
  -v "replication_password=$REPLICATION_PASSWORD" -v "state_password=$STATE_PASSWORD"
  -v "catalog_password=$STATE_PASSWORD")
PGHOST=source psql "${given[@]}" -v tables=public.orders -f /roles.sql
PGHOST=state psql "${given[@]}" -f /roles.sql
PGHOST=state psql -v ON_ERROR_STOP=1 -v "password=$DAGSTER_PASSWORD" <<'SQL'
select 'create role dagster login' where not exists (select from pg_roles where rolname = 'dagster') \gexec
select format('alter role dagster password %L', :'password') \gexec
select 'create database dagster owner dagster'
 where not exists (select from pg_database where datname = 'dagster') \gexec
SQL
