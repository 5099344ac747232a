"""A Glue catalog is opened by Spark and pyiceberg alike; moto speaks Glue and S3 here.

moto takes an update of any version of a table. Glue takes none but of the current one, and neither
does what stands before moto here.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import boto3
import pytest

from cdc_assets.lake.spark.session import open_session
from cdc_assets.maintenance.run import maintain
from cdc_assets.materializer.drain import drain
from cdc_assets.operations.copying import mark_for_copy
from cdc_assets.operations.drop_table import drop_table
from cdc_assets.pipeline import Pipeline
from cdc_assets.postgres.names import TableId
from cdc_assets.readiness.surroundings import review
from cdc_assets_tests.support.lake import NewLake
from cdc_assets_tests.support.s3 import REGION, ObjectStore

pytestmark = [pytest.mark.spark, pytest.mark.aws]

T = TableId("public", "T")
SETUP = (
    """create table "T" (id int primary key, v text); insert into "T" select i, 'x' from"""
    " generate_series(1, 99) i"
)


class _Versions:
    """Counts requests, and refuses updates of versions that aren't current."""

    def __init__(self, glue: Any) -> None:
        self.glue = glue
        self.beaten = set[str]()
        """The clients before whose next update somebody else comes."""
        self.refused: list[str] = []
        self.asked = Counter[str]()

    def __call__(self, handler: Any) -> bool:
        asked = handler.headers.get("X-Amz-Target", "").removeprefix("AWSGlue.")
        self.asked[asked] += 1
        if asked != "UpdateTable":
            return False
        update = json.loads(handler.body)
        table = {"DatabaseName": update["DatabaseName"], "Name": update["TableInput"]["Name"]}
        found = self.glue.get_table(**table)["Table"]
        agent = handler.headers["User-Agent"].split("/")[0].lower()
        current = int(found["VersionId"]) + (agent in self.beaten)
        self.beaten.discard(agent)
        if update["VersionId"] == str(current):
            return False
        self.refused.append(agent)
        said = json.dumps({"__type": "ConcurrentModificationException", "Message": "too late"})
        handler.send_response(400)
        handler.send_header("Content-Type", "application/x-amz-json-1.1")
        handler.send_header("Content-Length", str(len(said)))
        handler.end_headers()
        handler.wfile.write(said.encode())
        return True


@pytest.mark.parametrize("version", [2, 3])
def test_a_glue_catalog_from_copy_to_purge(
    new_lake: NewLake,
    tmp_home: Path,
    s3: ObjectStore,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
) -> None:
    endpoint = str(s3.settings["endpoint"])
    catalog: dict[str, Any] = {
        "type": "glue",
        "warehouse": "s3://bucket/warehouse",
        "properties": {"glue.endpoint": endpoint},
    }
    settings = {
        "s3": s3.settings,
        "staging": {"uri": "s3://bucket/staging"},
        "lake": {"catalog": catalog, "format_version": version},
    }
    glue = boto3.client("glue", endpoint_url=endpoint, region_name=REGION)
    s3.fault = versions = _Versions(glue)
    with new_lake(SETUP, '"T"', **settings) as source:
        source.pin()
        versions.beaten = {"boto3"}
        source.copy()
        source.execute("""update "T" set v = 'y' where id > 50; delete from "T" where id < 10""")
        source.execute("""alter table "T" add w int default 7; insert into "T" values (100, 'z')""")
        versions.beaten = {"boto3", "aws-sdk-java"}
        source.catch_up()
        assert sorted(versions.refused) == ["aws-sdk-java", "boto3", "boto3"]
        mark_for_copy(source.pipeline, [T])
        source.pin()
        source.copy()
        versions.asked.clear()
        source.execute("""update "T" set v = 'later' where id = 60""")
        source.catch_up()
        # A merge takes rows out, and puts rows in: both are published at once.
        assert versions.asked["UpdateTable"] == 1, versions.asked
        versions.asked.clear()
        source.execute("""update "T" set v = 'later still' where id = 60""")
        source.flush()
        with monkeypatch.context() as patched:
            patched.setattr("cdc_assets.lake.spark.session.draft_settings", lambda _: {})
            without_drafts = open_session(source.config)
        drain(source.pipeline, without_drafts, T)
        without_drafts.stop()
        # It makes a branch, takes rows out, puts rows in, moves main, and drops the branch.
        assert versions.asked["UpdateTable"] == 5, versions.asked
        done = list(maintain(source.pipeline, lambda: source.session, [T]))
        assert [one.problem for one in done] == [None]
        assert [one.equal for one in source.verify()] == [True]
        [table] = glue.get_tables(DatabaseName="src")["TableList"]
        loaded = source.lake_table(T).load()
        assert loaded is not None
        assert loaded.format_version == version
        assert table["Parameters"]["metadata_location"] == loaded.metadata_location
        codes = {finding.code for finding in review(source.config)}
        assert {"catalog_unwritable", "catalog_unreachable"}.isdisjoint(codes)
        left = source.config.model_copy(update={"tables": ()})
        with Pipeline.open(left) as pipeline:
            assert drop_table(pipeline, T, purge=True).purged == ("lake.`src`.`t`",)
    assert glue.get_tables(DatabaseName="src")["TableList"] == []
    assert not list(tmp_home.rglob("*.parquet"))
