-- The roles that cdc_assets works with, each with the least that it needs.
--
--   psql "$ADMIN_DSN" -v ON_ERROR_STOP=1 -v database=app \
--        -v tables='public.orders; sales.customers (id, name, since)' \
--        -v source_password="$A" -v replication_password="$B" \
--        -v state_password="$C" -v catalog_password="$D" -f roles.sql
--
-- Run it in the source database, as an owner of the tables who may create roles; name tables with
-- their schemas. It may be run again: after a new table or partition, to change a password. Four
-- roles, because each may be elsewhere:
--
--   cdc_source       reads the tables that are named, or the columns. postgres.dsn. It owns nothing,
--                    writes nothing, and can't replicate.
--   cdc_replication  makes the slot and streams it. postgres.replication_dsn. It reads no table; but
--                    who may replicate may decode every change of the database, so its password is
--                    for the flusher alone.
--   cdc_state        owns the coordination schema _pg2iceberg. state.postgres_url.
--   cdc_catalog      owns the SQL catalog's schema iceberg. lake.catalog.uri; a REST or Glue catalog
--                    needs no such role.
--
-- With state and catalog in another database, run the last two parts there (without tables).
-- A table of which only some columns are named is for columns.exclude: the others are neither
-- granted nor published. Adding a column later takes both, and a resync of that table. As long as
-- columns are listed, Postgres refuses to drop them (without cascade) or to alter their types.

\if :{?database}
\else
  \echo 'give -v database=…'
  \quit
\endif
\if :{?tables}
\else
  \set tables ''
\endif

-- Whoever may create in a schema of your search path could have planted a function for you to call.
set search_path = pg_catalog, pg_temp;

-- A role that is there keeps what it has. (One of an earlier version may replicate; once
-- postgres.replication_dsn is set: alter role cdc_source noreplication.)
select format('create role %I login', role)
  from unnest(array['cdc_source', 'cdc_replication', 'cdc_state', 'cdc_catalog']) as role
 where not exists (select from pg_catalog.pg_roles where rolname = role) \gexec
select format('alter role cdc_source password %L', :'source_password') \gexec
select format('alter role cdc_replication password %L', :'replication_password') \gexec
select format('alter role cdc_state password %L', :'state_password') \gexec
select format('alter role cdc_catalog password %L', :'catalog_password') \gexec

-- --- the source -----------------------------------------------------------------------------------

-- Streaming the slot. On RDS: grant rds_replication to cdc_replication; on Cloud SQL the line works
-- as it is for a superuser of the service.
alter role cdc_replication replication;
-- They name who holds up a copy: since when a transaction runs is shown to nobody else.
grant pg_read_all_stats to cdc_source, cdc_replication;
-- Their statements read what they read however long that takes, and are never in the way of others.
alter role cdc_source set statement_timeout = 0;
alter role cdc_source set idle_in_transaction_session_timeout = 0;
grant connect on database :"database" to cdc_source, cdc_replication;

-- Of each table its partitions, too: a copy reads them by their own names. A grant by columns has
-- those of Postgres by which pages and their age are told. Generated columns can be published since
-- Postgres 18, if they are stored.
create temp table wanted on commit preserve rows as
select root, part[2] as columns,
       (select jsonb_agg((parse_ident(trim(name)))[1])
          from regexp_split_to_table(part[2], ',') name) as named,
       (select string_agg(name, ',') from regexp_split_to_table(part[2], ',') name
         where not exists (
               select from pg_catalog.pg_attribute a
                where a.attrelid = root and a.attname = (parse_ident(trim(name)))[1]
                  and a.attgenerated <> all(case when current_setting('server_version_num')::int >= 180000
                                                 then '{"",s}' else '{""}' end::"char"[]))) as published,
       null::jsonb as sent
  from regexp_split_to_table(:'tables', ';') as entry,
       regexp_match(entry, '^([^(]+?)\s*(?:\((.*)\))?\s*$') as part,
       cast(trim(part[1]) as regclass) as root
 where entry ~ '\S';
update wanted set sent = (select jsonb_agg((parse_ident(trim(name)))[1])
                            from regexp_split_to_table(published, ',') name);
select format('grant usage on schema %I to cdc_source;', n.nspname)
       || format(case when w.columns is null then 'grant select on %1$s to cdc_source'
                      else 'revoke select on %1$s from cdc_source;'
                           'grant select (ctid, xmin, cmin, %2$s) on %1$s to cdc_source' end,
                 c.oid::regclass, w.columns)
  from wanted w
  cross join lateral (select w.root as oid union
                      select relid from pg_catalog.pg_partition_tree(w.root)) t
  join pg_catalog.pg_class c on c.oid = t.oid
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace \gexec

-- A publication belongs to who owns its tables, so cdc_source can't make it, nor add to it.
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
-- None whose UPDATE and DELETE Postgres would then refuse: the changed rows of each heap have to be
-- identified by a key, of columns that are sent, or as a whole (REPLICA IDENTITY FULL).
select format('alter publication %I add table only %s%s', :'publication', w.root,
              case when current_setting('server_version_num')::int >= 150000
                   then ' (' || w.published || ')' end)
  from wanted w
 where not exists (select from pg_catalog.pg_publication_rel r
                     join pg_catalog.pg_publication p on p.oid = r.prpubid
                    where p.pubname = :'publication' and r.prrelid = w.root)
   and (w.columns is null or w.sent is not null)
   and not exists (
       select from pg_catalog.pg_class c
        where c.relkind = 'r'
          and c.oid in (select w.root union select relid from pg_catalog.pg_partition_tree(w.root))
          and not (c.relreplident = 'f' and w.columns is null)
          and not exists (
              select from pg_catalog.pg_index i
               where i.indrelid = c.oid and i.indisvalid and i.indimmediate
                 and case c.relreplident when 'd' then i.indisprimary
                                         when 'i' then i.indisreplident else false end
                 and (w.columns is null or not exists (
                     select from unnest(i.indkey::int2[]) k
                       join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum = k
                      where not w.sent ? a.attname::text)))) \gexec
select format('do $say$ begin raise warning %L; end $say$', w.root || ' isn''t published as it was'
              ' named here: cdc-assets check says what it needs, or alter the publication by hand')
  from wanted w
 where not exists (select from pg_catalog.pg_publication_tables t
                     join pg_catalog.pg_class c on c.relname = t.tablename
                     join pg_catalog.pg_namespace n on n.oid = c.relnamespace
                                                   and n.nspname = t.schemaname
                    where t.pubname = :'publication' and c.oid = w.root) \gexec
-- Before 15 Postgres has no column lists. What is published as a whole stays so: taken out and added
-- again it has a gap, and is copied anew.
select format('do $say$ begin raise warning %L; end $say$', w.root || ' is published with columns that'
              ' aren''t named here, which leave the server: '
              || case when current_setting('server_version_num')::int < 150000
                      then 'Postgres has column lists since version 15'
                      else format('alter publication %I drop table only %s; then run this again, and'
                                  ' cdc-assets resync %2$s', :'publication', w.root) end)
  from wanted w
  join pg_catalog.pg_class c on c.oid = w.root
  join pg_catalog.pg_namespace n on n.oid = c.relnamespace
  join pg_catalog.pg_publication_tables t
    on t.pubname = :'publication' and t.schemaname = n.nspname and t.tablename = c.relname
 where w.columns is not null
   and not coalesce(to_jsonb(t) -> 'attnames' <@ w.named, false) \gexec
drop table wanted;

-- Row-level security would hide rows from the copy but not from the stream; only needed where tables
-- have it:
--   alter role cdc_source bypassrls;

-- --- the coordination schema ------------------------------------------------------------------------

grant connect on database :"database" to cdc_state;
select 'create schema _pg2iceberg authorization cdc_state'
 where to_regnamespace('_pg2iceberg') is null \gexec

-- Somebody else's schema of that name would have his code run with the rights of our role.
do $$ begin
  if exists (select from pg_catalog.pg_namespace where nspname = '_pg2iceberg'
                and nspowner <> 'cdc_state'::pg_catalog.regrole) then
    raise exception 'the schema _pg2iceberg is not cdc_state''s: see whose it is; drop it if nothing is yours';
  end if;
end $$;

-- --- the SQL catalog ----------------------------------------------------------------------------------

grant connect on database :"database" to cdc_catalog;
select 'create schema iceberg authorization cdc_catalog'
 where to_regnamespace('iceberg') is null \gexec
do $$ begin
  if exists (select from pg_catalog.pg_namespace where nspname = 'iceberg'
                and nspowner <> 'cdc_catalog'::pg_catalog.regrole) then
    raise exception 'the schema iceberg is not cdc_catalog''s: see whose it is; drop it if nothing is yours';
  end if;
end $$;
-- Both catalogs, Spark's and pyiceberg's, make and find iceberg_tables there.
select format('alter role cdc_catalog in database %I set search_path = iceberg', :'database') \gexec
