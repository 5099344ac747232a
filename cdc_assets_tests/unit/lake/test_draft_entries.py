"""A catalog of drafts that nothing can be written in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any
from unittest.mock import Mock

import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.connect import SparkConnectGrpcException
from sqlalchemy.exc import ProgrammingError

from cdc_assets.lake.catalog.commits import Found
from cdc_assets.lake.drafts import tables


@pytest.mark.parametrize("kind", ["sql", "rest", "glue"])
def test_a_branch_does_where_the_lake_has_another_catalog(tmp_path: Path, kind: str) -> None:
    """As a role may be allowed to use the schema alone. Nothing is left of the draft."""
    catalog = Namespace(type=kind)
    lake: Any = Namespace(config=Namespace(lake=Namespace(catalog=catalog)))
    metadata: dict[str, Any] = {
        "location": tmp_path.as_uri(),
        "properties": {},
        "refs": {"main": {"snapshot-id": 1, "type": "branch"}},
        "snapshots": [{"snapshot-id": 1}],
        "last-updated-ms": 1,
    }
    (tmp_path / "metadata").mkdir()
    at = f"{tmp_path.as_uri()}/metadata/00001-x.metadata.json"
    found = Found(Mock(), PyArrowFileIO({}), at, metadata)
    refused = ProgrammingError("insert", None, Exception("permission denied"))
    drafts = Mock(add=Mock(side_effect=refused))
    loaded: Any = Namespace(metadata=Namespace(table_uuid="u"))
    if kind == "sql":
        with pytest.raises(ProgrammingError):
            tables._begun(lake, loaded, 1, drafts, found)
    else:
        assert tables._begun(lake, loaded, 1, drafts, found) is None
    [(_, _, first)] = [call.args for call in drafts.add.call_args_list]
    assert first.startswith(f"{tmp_path.as_uri()}/metadata/00002-")
    assert list((tmp_path / "metadata").iterdir()) == []


def test_a_draft_that_spark_cannot_open_is_a_branch_for_an_hour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Mock(monotonic=Mock(return_value=1_000.0))
    monkeypatch.setattr(tables, "time", clock)
    session: Any = Mock(table=Mock(side_effect=PySparkException("no route to host")))
    lake: Any = Mock(config=Namespace(lake=Namespace(catalog=Namespace(type="rest"))))
    draft: Any = Mock(table="t1", sql_name="cdc_drafts.t1.d")
    assert not tables._is_opened(session, lake, draft)
    assert tables._takes_branches("t1") and not tables._takes_branches("t2")
    clock.monotonic.return_value += 3_599.0
    assert tables._takes_branches("t1")
    clock.monotonic.return_value += 1.0
    assert tables._takes_branches("t1"), "the last one"
    assert not tables._takes_branches("t1")
    session.table.side_effect = None
    for _ in range(3):
        assert tables._is_opened(session, lake, draft)
    assert session.table.call_count == 2, "once failed, once opened"
    draft.give_up.assert_called_once_with()


def test_a_spark_server_that_is_away_says_nothing_of_drafts() -> None:
    status = Mock()
    status.configure_mock(name="UNAVAILABLE")
    away = SparkConnectGrpcException("gone", grpc_status_code=status)
    session: Any = Mock(table=Mock(side_effect=away))
    lake: Any = Mock(config=Namespace(lake=Namespace(catalog=Namespace(type="rest"))))
    draft: Any = Mock(table="t2", sql_name="cdc_drafts.t2.d")
    with pytest.raises(SparkConnectGrpcException):
        tables._is_opened(session, lake, draft)
    assert not tables._takes_branches("t2")
    draft.give_up.assert_called_once_with()
