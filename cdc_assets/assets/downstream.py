"""An earlier name of ``cdc_assets.dagster.downstream``, kept for one release."""

from cdc_assets.dagster.downstream import after_merges

__all__ = ["after_merges"]
