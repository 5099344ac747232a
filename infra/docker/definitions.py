"""The code location of the containers: every ``*.yaml`` below ``/opt/dagster/sources`` is a source."""

from pathlib import Path

import dagster as dg

from cdc_assets.build import build_defs
from cdc_assets.config import load_config

SOURCES = Path(__file__).parent / "sources"

defs = dg.Definitions.merge(*(build_defs(load_config(path)) for path in sorted(SOURCES.glob("*.yaml"))))
