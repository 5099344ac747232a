"""Keys of S3 that a profile's file has, and that somebody writes anew while a process runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cdc_assets.config.source import SourceConfig, parse_config
from cdc_assets.lake.catalog.catalog import pyiceberg_properties
from cdc_assets.lake.catalog.files import PlacedFileIO
from cdc_assets.log.staged.storage import Storage
from cdc_assets_tests.conftest import NewDatabase
from cdc_assets_tests.support.s3 import KEYS, ObjectStore

FILE = "s3://bucket/warehouse/t/metadata/1"


def _of_the_lake(config: SourceConfig) -> None:
    PlacedFileIO(pyiceberg_properties(config)).new_input(FILE).exists()


def _staged(config: SourceConfig) -> None:
    filesystem, path = Storage.of(config.s3).locate(FILE)
    filesystem.get_file_info(path)


@pytest.mark.parametrize("look", [_of_the_lake, _staged])
def test_a_profile_s_new_key_is_used_at_once(
    look: Callable[[SourceConfig], None],
    postgres_dsn: NewDatabase,
    s3: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in KEYS:
        monkeypatch.delenv(variable)
    profile = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    config = parse_config(
        {
            "name": "src",
            "postgres": {"dsn": postgres_dsn()},
            "tables": [{"name": "t"}],
            "s3": s3.settings,
            "lake": {"catalog": {"warehouse": "s3://bucket/warehouse"}},
        },
        "test",
    )
    used = set[str]()

    def watch(request: Any) -> None:
        used.add(request.headers["Authorization"].partition("Credential=")[2].partition("/")[0])

    s3.watch = watch
    for key in ("FORMER", "NEW"):
        profile.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key=secret\n")
        used.clear()
        with suppress(OSError):  # what the server says of such a key is no matter
            look(config)
        assert used == {key}
