"""Postgres tables as live Iceberg tables, observed and operated as Dagster assets."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("cdc-assets")
except PackageNotFoundError:  # a source tree that isn't installed
    __version__ = "0.0.0+uninstalled"
