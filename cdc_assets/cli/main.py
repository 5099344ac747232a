"""The command ``cdc-assets``, with all of its commands."""

from __future__ import annotations

from cdc_assets.cli import backfills, beginning, commands, looks, moments
from cdc_assets.cli.group import cli

__all__ = ["backfills", "beginning", "cli", "commands", "looks", "main", "moments"]


def main() -> None:
    """The entry point of ``cdc-assets``."""
    cli(prog_name="cdc-assets")
