"""The code location: every folder below ``defs/`` with a ``defs.yaml`` is one source."""

import warnings
from pathlib import Path

import dagster as dg

import cdc_assets.defs

with warnings.catch_warnings():
    # Dagster's own loader calls functions that Dagster calls a preview.
    warnings.simplefilter("ignore", dg.PreviewWarning)
    defs = dg.ComponentTree.from_module(
        defs_module=cdc_assets.defs, project_root=Path(__file__).parents[1]
    ).build_defs()
