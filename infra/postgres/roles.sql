-- The roles that cdc_assets works with, each with the least that it needs.
--
--   psql "$ADMIN_DSN" -v ON_ERROR_STOP=1 -v database=app -v schemas=public,sales \
--        -v source_password="$A" -v state_password="$B" -v catalog_password="$C" -f roles.sql
--
-- Run it in the source database, as an owner of the tables who may create roles. It may be run
-- again: after a new schema, to change a password. Three roles, because each may be elsewhere:
--
--   cdc_source   reads tables and the slot. postgres.dsn. It owns nothing and writes no table.
--   cdc_state    owns the coordination schema _pg2iceberg. state.postgres_url.
--   cdc_catalog  owns the SQL catalog's schema iceberg. lake.catalog.uri; a REST or Glue catalog
--                needs no such role.
--
-- With state and catalog in another database, run the last two parts there.

\if :{?database}
\else
  \echo 'give -v database=…'
  \quit
\endif
\if :{?schemas}
\else
  \set schemas public
\endif

-- A role that is there keeps what it has.
select format('create role %I login', role)
  from unnest(array['cdc_source', 'cdc_state', 'cdc_catalog']) as role
 where not exists (select from pg_catalog.pg_roles where rolname = role) \gexec
select format('alter role cdc_source password %L', :'source_password') \gexec
select format('alter role cdc_state password %L', :'state_password') \gexec
select format('alter role cdc_catalog password %L', :'catalog_password') \gexec

-- --- the source -----------------------------------------------------------------------------------

-- Streaming the slot. On RDS: grant rds_replication to cdc_source; on Cloud SQL the line works as
-- it is for a superuser of the service.
alter role cdc_source replication;
-- It names who holds up a copy: since when a transaction runs is shown to nobody else.
grant pg_read_all_stats to cdc_source;
-- Its statements read what they read however long that takes, and are never in the way of others.
alter role cdc_source set statement_timeout = 0;
alter role cdc_source set idle_in_transaction_session_timeout = 0;
grant connect on database :"database" to cdc_source;
select format('grant usage on schema %1$I to cdc_source;'
              'grant select on all tables in schema %1$I to cdc_source;'
              'alter default privileges in schema %1$I grant select on tables to cdc_source', name)
  from unnest(string_to_array(:'schemas', ',')) as name \gexec

-- A publication belongs to who owns its tables, so cdc_source can't make it. One that is empty at
-- first; add each table that is to be replicated:
--   alter publication cdc_app add table only public.orders;
-- Tables that Postgres can't identify changed rows of go into another, which cdc-assets check names.
\if :{?publication}
\else
  \set publication cdc_ :database
\endif
select format('create publication %I with (publish = ''insert, update, delete, truncate'','
              ' publish_via_partition_root = true%s)', :'publication',
              case when current_setting('server_version_num')::int >= 180000
                   then ', publish_generated_columns = stored' else '' end)
 where not exists (select from pg_catalog.pg_publication where pubname = :'publication') \gexec

-- Row-level security would hide rows from the copy but not from the stream; only needed where tables
-- have it:
--   alter role cdc_source bypassrls;

-- --- the coordination schema ------------------------------------------------------------------------

grant connect on database :"database" to cdc_state;
select 'create schema _pg2iceberg authorization cdc_state'
 where to_regnamespace('_pg2iceberg') is null \gexec

-- --- the SQL catalog ----------------------------------------------------------------------------------

grant connect on database :"database" to cdc_catalog;
select 'create schema iceberg authorization cdc_catalog'
 where to_regnamespace('iceberg') is null \gexec
-- Both catalogs, Spark's and pyiceberg's, make and find iceberg_tables there.
select format('alter role cdc_catalog in database %I set search_path = iceberg', :'database') \gexec
