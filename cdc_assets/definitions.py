"""The code location: every folder below ``defs/`` with a ``defs.yaml`` is one source."""

import os
import warnings
from pathlib import Path

import dagster as dg

import cdc_assets.defs
from cdc_assets.dagster.part import serves_sources_alone

# Who looks something up in ``defs`` below, or adds to it, takes this out: the processes of runs
# have a part of it.
serves_sources_alone()
_tree = dg.ComponentTree.from_module(
    defs_module=cdc_assets.defs, project_root=Path(__file__).parents[1]
)
_folders = {
    path.name: path
    for path in _tree.defs_module_path.iterdir()
    if path.is_dir() and any(file.suffix in (".yaml", ".py") for file in path.rglob("*"))
}
_loaded = cdc_assets.defs.loaded(_folders, os.environ.get("CDC_ASSETS_DEMO"))
with warnings.catch_warnings():
    # Of Dagster's own loader, which calls functions that Dagster calls beta or a preview.
    warnings.simplefilter("ignore", dg.PreviewWarning)
    warnings.simplefilter("ignore", dg.BetaWarning)
    # The folders only: loading "everything" also imports whatever installed package offers
    # components, which costs each run 2 s of CPU.
    defs = dg.Definitions.merge(
        *(_tree.build_defs(path) for name, path in sorted(_folders.items()) if name in _loaded),
        # What a person materializes, too, costs one process and not two.
        dg.Definitions(executor=dg.in_process_executor),
    )
