"""The page on the configuration is made from it, and says what each key is."""

from __future__ import annotations

import re
from pathlib import Path

import cdc_assets
from cdc_assets.config.reference import page

PAGE = Path(cdc_assets.__file__).parents[1] / "docs" / "reference" / "configuration.md"


def test_the_page_is_that_of_this_version() -> None:
    """``cdc-assets config reference`` makes it anew."""
    assert PAGE.read_text() == page()


def test_each_key_says_what_it_is() -> None:
    """But those that are a section of their own."""
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|(.*)\|$", page(), re.MULTILINE)
    assert len(rows) > 90
    unsaid = [key for key, takes, *_, said in rows if not said.strip() and takes != "a mapping"]
    assert unsaid == []


def test_no_section_is_left_out() -> None:
    sections = re.findall(r"^## `(.*)`$", page(), re.MULTILINE)
    assert {"tables[].freshness", "lake.catalog", "maintenance.keep_snapshots"} <= {*sections}
    assert "alerts.sinks[] (type: mail)" in sections
