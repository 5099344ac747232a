"""Postgres tables as live Iceberg tables, observed and operated as Dagster assets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdc_assets.components import PostgresSource

    __version__: str

__all__ = ["PostgresSource", "__version__"]


def __getattr__(name: str) -> Any:
    """What is made for who asks: the flusher and Spark's workers need no Dagster, and no version.

    Each process of ours would take 50 ms of CPU to look for the latter.
    """
    if name == "PostgresSource":
        from cdc_assets.components import PostgresSource

        return PostgresSource
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("cdc-assets")
        except PackageNotFoundError:  # a source tree that isn't installed
            return "0.0.0+uninstalled"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
