"""The code location of the containers: every ``sources/*.yaml`` beside this file is a source."""

from pathlib import Path

import dagster as dg

from cdc_assets.config.source import load_config
from cdc_assets.dagster.build import build_defs, loaded

SOURCES = sorted((Path(__file__).parent / "sources").glob("*.yaml"))

defs = dg.Definitions.merge(
    *(build_defs(loaded(load_config(path))) for path in SOURCES),
    dg.Definitions(executor=dg.in_process_executor),  # a run costs one process
)
