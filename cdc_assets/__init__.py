"""Postgres tables as live Iceberg tables, observed and operated as Dagster assets."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdc_assets.components import PostgresSource

__all__ = ["PostgresSource", "__version__"]

try:
    __version__ = version("cdc-assets")
except PackageNotFoundError:  # a source tree that isn't installed
    __version__ = "0.0.0+uninstalled"


def __getattr__(name: str) -> Any:
    """``PostgresSource``, for who asks: the flusher and Spark's workers need no Dagster."""
    if name == "PostgresSource":
        from cdc_assets.components import PostgresSource

        return PostgresSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
