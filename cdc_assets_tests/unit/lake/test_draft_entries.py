"""A catalog of drafts that nothing can be written in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any
from unittest.mock import Mock

import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO
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
