"""The definitions as Dagster sees them: keys, lineage, partitions, policies, and error texts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cdc_assets
from cdc_assets import defs as sources
from cdc_assets.components import PostgresSource
from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.dagster.build import build_defs
from cdc_assets.dagster.metadata import shown_address
from cdc_assets.dagster.names import TableAssets, all_tables, sensor_names
from cdc_assets.errors import ConfigurationError
from cdc_assets.log.staged.files import STAGED_SCHEMA
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.unit.test_house import DAGSTER, FLOOR

_ENGINE = FLOOR.keys() - DAGSTER


def _config(*tables: str, **more: object) -> SourceConfig:
    return parse_config(
        {
            "name": "src",
            "postgres": {"dsn": "postgresql://user:topsecret@nowhere/db"},
            "tables": [{"name": table} for table in tables],
            **more,
        },
        "test",
    )


def test_a_table_is_four_assets_with_lineage_from_source_to_lake_and_one_of_its_care() -> None:
    graph = build_defs(_config('public."Mixed Case.Table"')).resolve_asset_graph()
    lineage = {
        key.to_user_string(): sorted(p.to_user_string() for p in graph.get(key).parent_keys)
        for key in graph.get_all_asset_keys()
    }
    assert lineage == {
        "health/src": [],
        "postgres/src/public/Mixed_Case_Table": [],
        "snapshot/src/public/Mixed_Case_Table": ["postgres/src/public/Mixed_Case_Table"],
        "staged_log/src/public/Mixed_Case_Table": ["postgres/src/public/Mixed_Case_Table"],
        "src/Mixed_Case_Table": [
            "snapshot/src/public/Mixed_Case_Table",
            "staged_log/src/public/Mixed_Case_Table",
        ],
        "maintenance/src/public/Mixed_Case_Table": ["src/Mixed_Case_Table"],
        "marks/src": ["src/Mixed_Case_Table"],
    }


def test_the_number_of_operations_is_not_that_of_the_tables() -> None:
    """Else a run pays for each table's, and a run of many tables has a step for each."""
    job = build_defs(_config("public.a", "public.b")).get_repository_def().get_job("__ASSET_JOB")
    assert {node.name for node in job.nodes} == {
        *("copy__src", "materialize__src", "maintain__src", "health__src", "marks__src"),
        *("check__src", "ready__src", "sample__src"),
    }


def test_sources_and_tables_whose_names_end_alike_are_told_apart() -> None:
    """Jobs and operations share one name space, and Dagster joins the parts of keys."""
    names = "a__b.c", "a.b__c", "a_.b", "a._b"
    config = _config(*names)
    other = _config(*names, name="src_tables")
    defs = dg.Definitions.merge(build_defs(config), build_defs(other))
    defs.get_repository_def().get_all_jobs()
    shown = [names.snapshot.path[2:] for names in all_tables(config)]
    assert shown[1:4:2] == [["a", "b__c"], ["a", "_b"]]  # theirs, whatever comes
    assert len({"__".join(path) for path in shown}) == 4
    with pytest.raises(ConfigurationError, match=r"another lake\.namespace"):
        _config("public.src", lake={"namespace": "health"})


def test_the_shipped_source_has_its_assets_sensors_and_checks() -> None:
    from cdc_assets.definitions import defs

    graph = defs.resolve_asset_graph()
    lake = {key.to_user_string() for key in graph.get_all_asset_keys() if key.path[0] == "shop"}
    assert {"shop/pgbench_accounts", "shop/orders", "shop/Mixed_Case_Table"} <= lake
    ours = {sensor.name for sensor in defs.sensors or ()}
    assert ours == {*sensor_names("shop"), "marts_shop"} - {"openlineage_shop"}  # if asked for
    assert ours == {
        "backfills_shop",
        "cdc_alerts_shop",
        "health_shop",
        "services_shop",
        "flusher_shop",
        "snapshot_shop",
        "materializer_shop",
        "checks_shop",
        "marts_shop",
    }
    for sensor in defs.sensors or ():
        assert isinstance(sensor, dg.SensorDefinition)
        assert sensor.default_status == dg.DefaultSensorStatus.RUNNING
    schedules = [s for s in defs.schedules or () if isinstance(s, dg.ScheduleDefinition)]
    assert [(schedule.name, schedule.cron_schedule) for schedule in schedules] == [
        ("maintenance_shop", "*/30 * * * *"),
        ("sample_shop", "7 * * * *"),
        ("marks_shop", "7 * * * *"),
    ]
    assert {s.default_status for s in schedules} == {dg.DefaultScheduleStatus.RUNNING}
    checked = {(c.asset_key.to_user_string(), c.name) for c in graph.asset_check_keys}
    assert {("shop/orders", "primary_key_unique"), ("shop/orders", "replication_lag")} <= checked
    assert ("postgres/shop/shop/orders", "ready") in checked
    assert ("shop/orders", "rows_match_source") in checked
    assert len(checked) == 5 * len(lake) + 1  # and one of mart/books


@pytest.mark.parametrize(
    ("folders", "told", "loaded"),
    [
        ("shop shop_mart __pycache__", None, "shop shop_mart"),
        ("shop shop_mart __pycache__ app", None, "app"),
        ("shop shop_mart app my-app", "1", "shop shop_mart app my-app"),
        ("shop shop_mart", "0", ""),
        ("app", "0", "app"),
        ("shop shop_mart app", "only", "shop shop_mart"),
    ],
)
def test_the_demo_is_loaded_while_there_is_no_other_source(
    folders: str, told: str | None, loaded: str
) -> None:
    assert sources.loaded(folders.split(), told) == set(loaded.split())


@pytest.mark.parametrize(
    ("every", "cron"),
    [
        ("20m", ["*/20 * * * *"]),
        ("1h", ["7 * * * *"]),
        ("6h", ["7 */6 * * *"]),
        ("1d", ["7 3 * * *"]),
        (None, []),
    ],
)
@pytest.mark.parametrize(
    ("section", "name"), [("maintenance", "maintenance"), ("verify", "sample")]
)
def test_schedules_come_as_often_as_configured(
    section: str, name: str, every: object, cron: list[str]
) -> None:
    defs = build_defs(_config("public.t", **{section: {"every": every}}))
    found = [
        s.cron_schedule
        for s in defs.schedules or ()
        if isinstance(s, dg.ScheduleDefinition) and s.name.startswith(name)
    ]
    assert found == cron


def test_partitions_kinds_policies_and_tables_names() -> None:
    config = parse_config(
        {
            "name": "src",
            "postgres": {"dsn": "postgresql://nowhere/db"},
            "tables": [{"name": "sales.orders", "freshness": {"warn": "60s", "fail": "300s"}}],
            "lake": {"namespace": "ns"},
        },
        "test",
    )
    graph = build_defs(config).resolve_asset_graph()
    snapshot = graph.get(dg.AssetKey(["snapshot", "src", "sales", "orders"]))
    assert isinstance(snapshot.partitions_def, dg.DynamicPartitionsDefinition)
    assert snapshot.partitions_def.name == "ctid/src.sales.orders"
    assert snapshot.backfill_policy == dg.BackfillPolicy.single_run()
    assert set(snapshot.kinds) == {"postgres", "spark", "iceberg"}
    lake = graph.get(dg.AssetKey(["ns", "orders"]))
    assert lake.partitions_def is None
    assert lake.metadata["dagster/table_name"] == "ns.orders"
    assert lake.metadata["dagster/uri"].endswith("/ns/orders")
    policy = lake.freshness_policy
    assert policy == dg.FreshnessPolicy.time_window(
        fail_window=config.tables[0].freshness.fail, warn_window=config.tables[0].freshness.warn
    )
    assert set(graph.get(dg.AssetKey(["postgres", "src", "sales", "orders"])).kinds) == {"postgres"}


def test_every_asset_of_a_table_has_its_owners() -> None:
    config = parse_config(
        {
            "name": "src",
            "postgres": {"dsn": "postgresql://nowhere/db"},
            "owners": ["team:data", "me@example.com"],
            "tables": [{"name": "a"}, {"name": "b", "owners": ["team:other"]}],
        },
        "test",
    )
    graph = build_defs(config).resolve_asset_graph()
    owners = {key: list(graph.get(key).owners) for key in graph.get_all_asset_keys()}
    assert len(owners) == 12
    for key, found in owners.items():
        assert found == (
            ["team:other"] if key.path[-1] == "b" else ["team:data", "me@example.com"]
        ), key


def test_where_things_are_is_shown_without_secrets() -> None:
    config = _config("sales.orders", staging={"uri": "s3://bucket/staged"})
    graph = build_defs(config).resolve_asset_graph()
    source = graph.get(dg.AssetKey(["postgres", "src", "sales", "orders"])).metadata
    assert source["dagster/uri"] == "postgresql://nowhere:5432/db"
    assert source["dagster/table_name"] == "db.sales.orders", "not the name of another asset"
    staged = graph.get(dg.AssetKey(["staged_log", "src", "sales", "orders"])).metadata
    assert staged["dagster/uri"] == "s3://bucket/staged/src/sales.orders"
    columns = staged["dagster/column_schema"].columns
    assert [column.name for column in columns] == STAGED_SCHEMA.names
    for key in graph.get_all_asset_keys():
        assert "topsecret" not in repr(graph.get(key).metadata)


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://u:p@a,b:1/db?target_session_attrs=any", "postgresql://a:5432,b:1/db"),
        ("host=h user=u password=p dbname=d", "postgresql://h:5432/d"),
        ("host=a,b port=7 dbname=d", "postgresql://a:7,b:7/d"),
        ("no dsn at all", None),
        ("postgresql://u:to@p/sec@ret@h/d", None),
    ],
)
def test_an_address_is_hosts_ports_and_database(dsn: str, shown: str | None) -> None:
    assert shown_address(dsn) == shown


def test_an_asset_refers_to_the_line_of_its_table() -> None:
    from cdc_assets.definitions import defs

    graph = defs.resolve_asset_graph()
    for key, wanted in (
        (["shop", "orders"], "{name: shop.orders,"),
        (["postgres", "shop", "public", "pgbench_accounts"], "name: public.pgbench_accounts"),
        (["health", "shop"], "name: shop"),
    ):
        found = graph.get(dg.AssetKey(key)).metadata["dagster/code_references"]
        [reference] = found.code_references
        line = Path(reference.file_path).read_text().splitlines()[reference.line_number - 1]
        assert wanted in line


def test_tables_that_would_meet_in_one_key_are_kept_apart() -> None:
    config = _config('public."a b"', "public.a_b", 'public."a.b"')
    names = {str(n.table): n.lake.path[-1] for n in all_tables(config)}
    assert names["public.a_b"] == "a_b"
    assert len(set(names.values())) == 3
    build_defs(config).resolve_asset_graph()


@given(
    st.sets(
        st.tuples(
            st.sampled_from(["public", "p q", "p_q"]),
            st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=6),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_keys_are_unique_and_legal_for_any_names(tables: set[tuple[str, str]]) -> None:
    ids = [TableId(schema, name) for schema, name in tables]
    lowered = [t.name.lower() for t in ids]
    if len(set(lowered)) != len(lowered):
        return  # the configuration refuses or renames those; see its tests
    config = _config(*(str(t) for t in ids))
    keys = [
        key
        for t in ids
        for n in [TableAssets(config, t)]
        for key in (n.source, n.snapshot, n.staged_log, n.lake, n.maintenance)
    ]
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert all(part.isascii() and part.replace("_", "a").isalnum() for part in key.path)


def test_no_secret_is_in_what_the_ui_shows_of_resources() -> None:
    defs = build_defs(_config("public.t", spark={"remote": "sc://host:15002/;token=topsecret"}))
    for resource in (defs.resources or {}).values():
        assert "topsecret" not in repr(resource)
        assert "topsecret" not in str(resource.model_dump())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tabels": []}, r"tabels: unknown key; remove it or correct its spelling"),
        ({"tables": None}, r"tables"),
        ({"postgres": {"dsn": "${CDC_NO_SUCH}"}}, r"CDC_NO_SUCH is not set; export it"),
        ({"name": "Not A Word"}, r"name: write up to 40 lower-case letters"),
        ({"staging": {"flush_interval": "soon"}}, r"staging.flush_interval: 'soon' has no known"),
    ],
)
def test_a_components_error_names_file_key_and_remedy(change: dict[str, object], said: str) -> None:
    attributes = {
        "name": "src",
        "postgres": {"dsn": "postgresql://nowhere/db"},
        "tables": [{"name": "public.t"}],
        **change,
    }
    with pytest.raises(ConfigurationError, match=said) as caught:
        PostgresSource.from_attributes_dict(attributes=attributes)
    assert "defs.yaml" in str(caught.value)


def test_a_component_takes_what_the_plain_file_takes() -> None:
    component = PostgresSource.from_attributes_dict(
        attributes={
            "name": "src",
            "postgres": {"dsn": "postgresql://nowhere/db"},
            "tables": [{"name": "public.t", "chunk_pages": 7}],
            "staging": {"flush_interval": "500ms", "flush_bytes": "1MB"},
        }
    )
    assert component.config.staging.flush_interval_seconds == 0.5
    assert component.config.tables[0].chunk_pages == 7


def test_templates_stand_for_values_and_no_name_of_a_table_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever makes a table at the source chooses its name, and init writes it into the YAML."""
    harm = f"{{{{ cycler.__init__.__globals__.os.popen('touch {tmp_path}/harm') }}}}"
    asked = {"name": "public.x", "owners": ["team:{{ env.TEAM }}"]}
    hostile = f'public."{harm}"'
    attributes = {
        "name": "a",
        "postgres": {"dsn": "{{ env.A_DSN }}"},
        "tables": [hostile, asked, 'public."{{ env.A_DSN }}"'],
        "owners": ["team:{{ env.TEAM }}"],
        "lake": {"catalog": {"warehouse": harm}},
    }
    monkeypatch.setenv("A_DSN", "postgresql://a:b${K@h/db")
    with pytest.raises(ConfigurationError, match="variable TEAM is not set"):
        PostgresSource.from_attributes_dict(attributes=attributes)
    monkeypatch.setenv("TEAM", "data")
    asked["name"] = 'public."{{ env.A_DSN }}"'
    attributes["tables"] = [hostile, asked]
    component = PostgresSource.from_attributes_dict(attributes=attributes)
    assert isinstance(component, PostgresSource)
    config = component.config
    assert config.postgres.dsn is not None
    assert config.postgres.dsn.get_secret_value() == "postgresql://a:b${K@h/db"
    assert [table.id.name for table in config.tables] == [harm, "{{ env.A_DSN }}"]
    assert config.tables[1].owners == ("team:data",)
    assert (config.owners, config.lake.catalog.warehouse) == (("team:data",), harm)
    assert not (tmp_path / "harm").exists()


def test_engine_modules_do_not_import_dagster() -> None:
    root = Path(cdc_assets.__file__).parent
    modules = sorted(
        ".".join(path.relative_to(root.parent).with_suffix("").parts)
        for path in root.rglob("*.py")
        if path.relative_to(root).with_suffix("").parts[0] in _ENGINE
    )
    assert len(modules) > 30
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0].startswith('dagster'))[:5])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
