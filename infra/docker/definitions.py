"""The code location of the containers: every ``sources/*.yaml`` beside this file is a source."""

from pathlib import Path

import dagster as dg

from cdc_assets.build import build_defs
from cdc_assets.config import load_config

SOURCES = sorted((Path(__file__).parent / "sources").glob("*.yaml"))

defs = dg.Definitions.merge(*(build_defs(load_config(path)) for path in SOURCES))
