"""Promise 5: where sessions of the log and the catalog find names."""

from __future__ import annotations

from pathlib import Path

from cdc_assets.lake.catalog import place as catalog_place
from cdc_assets.lake.catalog.catalog import open_catalog, spark_settings
from cdc_assets.lake.catalog.place import catalog_schema
from cdc_assets.log.sessions.connection import connect_log
from cdc_assets_tests.security.coordination import SCHEMA, Session, config_of, opened


def test_a_session_of_the_log_finds_names_in_postgres_first_then_in_our_schema_and_nowhere_else(
    ours: str, admin: Session
) -> None:
    admin.execute(
        "grant create on schema public to cdc_state;"
        " alter role cdc_state set search_path = public, pg_catalog"
    )
    opened(ours).close()
    for schema in ("public", SCHEMA):
        admin.execute(
            f"create function {schema}.now() returns timestamptz language sql"
            " as 'select null::timestamptz'"
        )
    admin.execute("create table public.elsewhere (id int)")
    store = opened(ours)
    for session in (store.connection, connect_log(config_of(ours), "report")):
        row = session.execute(
            "select current_schemas(true)::text[], now() is null, to_regclass('elsewhere')"
        ).fetchone()
        assert row == (["pg_catalog", SCHEMA], False, None)
        # Not even a temporary table of its own comes first.
        session.execute("create temporary table pins (id int); create temporary table pg_class ()")
        row = session.execute(
            "select 'pins'::regclass::text, 'pg_class'::regclass::text"
        ).fetchone()
        assert row == ("pins", "pg_class")
        found = session.execute("select count(*) > 0 from pg_class").fetchone()
        assert found == (True,)
        session.execute("select consistent_point from pins")
        session.close()


def test_the_catalog_is_looked_for_in_our_schema_alone(
    ours: str, admin: Session, maker: Session, tmp_home: Path
) -> None:
    admin.execute("grant create on schema public to maker")
    maker.execute(
        "create table public.iceberg_tables (catalog_name text, table_namespace text,"
        " table_name text, metadata_location text);"
        " insert into public.iceberg_tables values ('lake', 'src', 't', 'file:///etc');"
        " grant all on public.iceberg_tables to public"
    )
    config = config_of(ours)
    catalog_place._found.cache_clear()
    assert catalog_schema(config) == SCHEMA
    catalog = open_catalog(config)
    assert catalog.list_namespaces() == []
    with catalog.engine.connect() as connection:  # type: ignore[attr-defined]
        path = connection.exec_driver_sql("show search_path").scalar()
    assert path == f'"{SCHEMA}",pg_temp'
    options = '-c search_path="_pg2iceberg",pg_temp'
    assert options in spark_settings(config)["spark.sql.catalog.lake.jdbc.options"]
