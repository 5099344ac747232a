"""The YAML face of a source, for Dagster's component system."""

from cdc_assets.components.postgres_source import PostgresSource

__all__ = ["PostgresSource"]
