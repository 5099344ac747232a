"""The configuration: defaults, and errors that name the key and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.connect.client import DefaultChannelBuilder

from cdc_assets.config.source import config_from_parent, load_config, parse_config
from cdc_assets.errors import ConfigurationError
from cdc_assets.process.home import home


def minimal(**changes: Any) -> dict[str, Any]:
    base = {
        "name": "shop",
        "postgres": {"dsn": "postgresql://u:secret@h/db"},
        "tables": [{"name": "public.orders"}],
    }
    return {**base, **changes}


def test_everything_has_a_default_but_the_tables() -> None:
    config = parse_config(minimal(), "f")
    assert (config.slot, config.publication, config.namespace) == ("cdc_shop", "cdc_shop", "shop")
    assert config.staging_uri == (home() / "shop" / "staging").as_uri()
    assert config.staging.flush_interval_seconds == 1.0
    assert config.lake.format_version == 3
    assert config.tables[0].chunk_pages == 2048


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"surprise": 1}, ["surprise", "unknown key"]),
        ({"tables": []}, ["tables"]),
        ({"tables": [{"name": "a b"}]}, ["tables[a b].name", "'a b' is not a table name"]),
        ({"tables": [{"name": "a"}, {"name": "public.a"}]}, ["public.a stands twice"]),
        ({"markers": {"table": "orders"}, "tables": ["orders"]}, ["markers.table", "too"]),
        (
            {"markers": {"table": "m"}, "snapshot": {"mode": "snapshot_only"}},
            ["markers.table", "nothing is streamed"],
        ),
        ({"tables": [{"name": '"A"'}, {"name": "a"}]}, ["would both become", "with as:"]),
        ({"postgres": {}}, ["postgres", "dsn", "embedded"]),
        ({"postgres": {"dsn": "${CDC_NOT_SET}"}}, ["CDC_NOT_SET", "not set"]),
        ({"postgres": {"dsn": "postgresql://u:p@ss@h/db"}}, ["postgres.dsn", "%40"]),
        ({"postgres": {"dsn": "postgresql://u:p@ss/w@h/db"}}, ["postgres.dsn", "%40"]),
        ({"staging": {"flush_interval": "1 parsec"}}, ["staging.flush_interval", "500ms"]),
        ({"staging": {"uri": "ftp://x"}}, ["staging.uri", "s3://bucket/prefix"]),
        ({"staging": {"uri": "s3://b//p"}}, ["staging.uri", "empty names"]),
        ({"staging": {"uri": "file:////p"}}, ["staging.uri", "empty names"]),
        ({"staging": {"uri": "s3://b/a?b"}}, ["staging.uri", "#, ?"]),
        ({"staging": {"former_uris": ["file:///a/../b"]}}, ["staging.former_uris", ".."]),
        ({"lake": {"catalog": {"warehouse": "file:///a#b"}}}, ["lake.catalog.warehouse", "#, ?"]),
        (
            {
                "staging": {"uri": "s3://b/lake"},
                "lake": {"catalog": {"warehouse": "s3://b/lake/"}},
            },
            ["staging.uri", "s3://b/lake/shop/", "staging.former_uris"],
        ),
        (
            {"staging": {"uri": "s3://b"}, "lake": {"catalog": {"warehouse": "s3://b/shop/wh"}}},
            ["staging.uri", "s3://b/shop/wh/shop/"],
        ),
        (
            {
                "staging": {"uri": "file:///l%20ake/shop/orders"},
                "lake": {"catalog": {"warehouse": "file:///l ake"}},
            },
            ["staging.uri", "/l ake/shop/orders/shop/"],
        ),
        ({"spark": {"remote": "http://x"}}, ["spark.remote", "sc://"]),
        *(
            ({"spark": {"remote": f"sc://h:1/;token={token};use_ssl=true"}}, ["remote", "hex 32"])
            for token in ("a/b", "a=", "a;b", "a?b", "a#b", "a%b", "a b")
        ),
        ({"lake": {"format_version": 1}}, ["lake.format_version"]),
        ({"tables": [{"name": "a", "mode": "upsert"}]}, ["tables[a].mode", "append", "mirror"]),
        (
            {"tables": [{"name": "a", "freshness": {"warn": "5s", "fail": "1h"}}]},
            ["tables[a].freshness", "at least 1m"],
        ),
        ({"owners": ["me"]}, ["owners[entry 1]", "team:name"]),
        (
            {"tables": [{"name": "a", "owners": ["team:"]}]},
            ["tables[a].owners[entry 1]", "team:name"],
        ),
        ({"maintenance": {"every": "7m"}}, ["maintenance.every", "divides an hour or a day"]),
        ({"maintenance": {"every": "10s"}}, ["maintenance.every", "divides an hour or a day"]),
        ({"maintenance": {"orphan_grace": "1h"}}, ["maintenance.orphan_grace", "at least 1d"]),
        ({"maintenance": {"target_file_size": "1kB"}}, ["maintenance.target_file_size", "1MB"]),
        ({"maintenance": {"deleted_rows": 1}}, ["maintenance.deleted_rows"]),
        ({"maintenance": {"keep_snapshots": {"count": 0}}}, ["keep_snapshots.count"]),
        ({"name": "Shop!"}, ["name", "lower-case"]),
        ({"slot": "No-Dashes"}, ["slot"]),
        ({"snapshot": {"max_parallel_chunks": 0}}, ["snapshot.max_parallel_chunks"]),
    ],
)
def test_an_error_names_the_key_and_the_remedy(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_config(minimal(**changes), "shop.yaml")
    for word in ["shop.yaml", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("staging", "warehouse"),
    [
        ("s3://b/staging", "s3://b/warehouse"),
        ("s3://b/staging", "s3://b"),
        ("s3://b", "s3://b/warehouse"),
        ("s3://b/lake-staged", "s3://b/lake"),
        ("file:///s", "production"),
    ],
)
def test_staging_and_warehouse_may_be_beside_each_other(staging: str, warehouse: str) -> None:
    catalog = {"type": "rest", "uri": "https://c.example.com", "warehouse": warehouse}
    config = parse_config(minimal(staging={"uri": staging}, lake={"catalog": catalog}), "f")
    assert (config.staging_uri, config.warehouse) == (staging, warehouse)


def test_a_home_that_no_lake_table_can_be_in_is_refused_for_these_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("CDC_ASSETS_HOME", str(tmp_path / "a#b"))
        with pytest.raises(ConfigurationError, match="CDC_ASSETS_HOME"):
            _ = parse_config(minimal(), "f").warehouse
        assert parse_config(minimal(), "f").staging_uri.endswith("/a%23b/shop/staging")
        elsewhere = minimal(lake={"catalog": {"warehouse": "s3://b/wh"}})
        assert parse_config(elsewhere, "f").warehouse == "s3://b/wh"


def test_an_address_of_spark_connect_may_have_all_that_pyspark_reads() -> None:
    token = "Az09._~-+%2F%3d"
    for url in ("sc://h", "sc://h:1/", f"sc://h:1/;authorization=Bearer%20{token};use_ssl=true"):
        remote = parse_config(minimal(spark={"remote": url}), "f").spark.remote
        assert remote == url
        DefaultChannelBuilder(url)
    with pytest.raises(ConfigurationError) as error:
        parse_config(minimal(spark={"remote": "sc://h:1/;token=sec/ret"}), "f")
    assert "sec/ret" not in str(error.value)


def test_no_error_shows_the_password() -> None:
    with pytest.raises(ConfigurationError) as error:
        parse_config(minimal(postgres={"dsn": "postgresql://u:secret@h", "x": 1}), "f")
    assert "secret" not in str(error.value)
    assert "secret" not in repr(parse_config(minimal(), "f"))


def test_variables_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDC_TEST_DSN", "postgresql://elsewhere/db")
    config = parse_config(minimal(postgres={"dsn": "${CDC_TEST_DSN}"}), "f")
    assert config.postgres.dsn is not None
    assert config.postgres.dsn.get_secret_value() == "postgresql://elsewhere/db"


def test_a_file_for_dagster_is_read_alike_by_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CDC_TEST_DSN", "postgresql://u:a${b@elsewhere/db")
    written = minimal(postgres={"dsn": "{{ env.CDC_TEST_DSN }}"}, tables=['public."{{ env.T }}"'])
    file = tmp_path / "defs.yaml"
    file.write_text(json.dumps({"type": "x.Y", "attributes": written}))
    config = load_config(file)
    assert config.postgres.dsn is not None
    assert config.postgres.dsn.get_secret_value() == "postgresql://u:a${b@elsewhere/db"
    assert [table.id.name for table in config.tables] == ["{{ env.T }}"]
    monkeypatch.delenv("CDC_TEST_DSN")
    with pytest.raises(ConfigurationError, match="variable CDC_TEST_DSN is not set"):
        load_config(file)


def test_json_is_yaml_and_a_component_file_is_a_plain_file(tmp_path: Path) -> None:
    plain, component = tmp_path / "a.json", tmp_path / "b.yaml"
    plain.write_text(json.dumps(minimal()))
    component.write_text(json.dumps({"type": "x.Y", "attributes": minimal()}))
    assert load_config(plain) == load_config(component)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(ConfigurationError, match=r"broken\.yaml is not YAML"):
        load_config(broken)
    broken.write_text("name: 2024-13-45")
    with pytest.raises(ConfigurationError, match=r"broken\.yaml is not YAML: month"):
        load_config(broken)
    broken.write_text('postgres: {dsn: "postgresql://u:sec"ret@h/db"}')
    with pytest.raises(ConfigurationError, match="line 1, column") as error:
        load_config(broken)
    assert "ret@" not in str(error.value)


def test_a_child_gets_the_same_configuration() -> None:
    config = parse_config(minimal(staging={"flush_interval": "250ms"}), "f")
    assert config_from_parent(config.dump()) == config
    with pytest.raises(ConfigurationError, match="--config FILE is missing"):
        config_from_parent("")


@pytest.mark.parametrize(
    ("snapshot", "words"),
    [
        ({"from": {"kind": "clone"}}, "give dsn"),
        ({"from": {"kind": "replica", "dsn": "postgresql://h/d", "lsn": "0/1"}}, "no lsn"),
        ({"from": {"kind": "dump", "dsn": "postgresql://h/d"}}, "give dsn and lsn"),
        ({"from": {"kind": "dump", "dsn": "postgresql://h/d", "lsn": "later"}}, "lsn"),
        ({"mode": "snapshot_only", "from": {"kind": "dump"}}, "mode: initial"),
    ],
)
def test_a_copy_from_elsewhere_is_described_whole(snapshot: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        parse_config(minimal(snapshot=snapshot), "f")


def test_a_child_copies_from_the_same_place() -> None:
    origin = {"kind": "dump", "dsn": "postgresql://u:secret@h/d", "lsn": "0/12AB"}
    config = parse_config(minimal(snapshot={"from": origin}), "f")
    assert config_from_parent(config.dump()) == config
    assert "secret" not in repr(config)


def test_two_tables_of_one_name_get_their_schema_as_a_prefix() -> None:
    config = parse_config(minimal(tables=[{"name": "a.t"}, {"name": "b.t"}, {"name": "b.u"}]), "f")
    assert [config.lake_name(t.id) for t in config.tables] == ["a_t", "b_t", "u"]


def test_glue_has_names_in_lower_case_and_of_plain_letters() -> None:
    glue = {"type": "glue", "warehouse": "s3://bucket/warehouse"}
    tables = ["Sales.Orders", "Archive.Orders", "Users"]
    config = parse_config(minimal(tables=tables, lake={"catalog": glue, "prefix": "eu_"}), "f")
    named = [config.lake_name(table.id) for table in config.tables]
    assert named == ["eu_sales_orders", "eu_archive_orders", "eu_users"]
    others = ["größe", '"order-items"', {"name": "users", "as": "Users"}]
    for other in others:
        with pytest.raises(ConfigurationError, match="Glue takes lower-case letters"):
            parse_config(minimal(tables=[other], lake={"catalog": glue}), "f")
    more = {**glue, "properties": {"glue.skip-name-validation": "true"}}
    parse_config(minimal(tables=others[1:2], lake={"catalog": more}), "f")
    more["properties"] = {"glue.skip-name-validation": "false"}
    with pytest.raises(ConfigurationError, match="Glue takes lower-case letters"):
        parse_config(minimal(tables=others[1:2], lake={"catalog": more}), "f")


def test_an_unknown_table_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"public\.nope is not in the configuration"):
        parse_config(minimal(), "f").table("nope")


def test_a_table_whose_name_is_misspelt_is_pointed_out() -> None:
    names = ["public.customers", 'public."Order Lines"', *(f"public.t{n}" for n in range(50))]
    config = parse_config(minimal(tables=names), "f")
    for wrong, meant in (
        ("public.custmers", "public.customers"),
        ("customers2", "public.customers"),
        ('"order lines"', 'public."Order Lines"'),
        ("sales.customers", "public.customers"),
    ):
        with pytest.raises(ConfigurationError) as error:
            config.table(wrong)
        assert error.value.remedy.startswith(f"Did you mean {meant}? Else add it under tables:")
    with pytest.raises(ConfigurationError) as error:
        config.table("nothing_alike")
    assert error.value.remedy.startswith('It has: public."Order Lines", public.customers, ')
    assert len(error.value.remedy) < 300 and "and 42 more" in error.value.remedy


def test_a_changed_copy_of_a_configuration_finds_its_own_tables() -> None:
    config = parse_config(minimal(tables=[{"name": "a.t"}, {"name": "b.u"}]), "f")
    one, other = config.tables
    assert [config.lake_name(t.id) for t in config.tables] == ["t", "u"]
    assert config.table("a.t") is one
    changed = config.model_copy(
        update={"tables": (other.model_copy(update={"name": "b.t", "mode": "append"}), one)}
    )
    assert [changed.lake_name(t.id) for t in changed.tables] == ["b_t", "a_t"]
    assert changed.table("b.t").mode == "append"
    with pytest.raises(ConfigurationError, match=r"b\.u is not in the configuration"):
        changed.table("b.u")
    assert config.table("b.u") is other
