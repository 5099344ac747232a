"""The command ``cdc-assets``, with all of its commands."""

from __future__ import annotations

from cdc_assets.cli import backfills, beginning, commands, looks, moments
from cdc_assets.cli.group import cli
from cdc_assets.cli.readers import groups
from cdc_assets.cli.state import moving

__all__ = [
    "backfills",
    "beginning",
    "cli",
    "commands",
    "groups",
    "looks",
    "main",
    "moments",
    "moving",
]


def main() -> None:
    """The entry point of ``cdc-assets``."""
    cli(prog_name="cdc-assets")
