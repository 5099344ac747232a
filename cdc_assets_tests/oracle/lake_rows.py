"""The lake as any reader finds it: pyiceberg and the catalog's address, nothing of the product."""

from __future__ import annotations

from typing import Any

from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchTableError


def read(
    uri: str, warehouse: str, namespace: str, table: str
) -> tuple[list[dict[str, Any]], list[str]] | None:
    """Rows and columns of a lake table; None if there is no such table."""
    catalog = load_catalog("lake", type="sql", uri=uri, warehouse=warehouse)
    try:
        found = catalog.load_table((namespace, table))
    except NoSuchTableError:
        return None
    finally:
        catalog.close() if hasattr(catalog, "close") else None
    arrow = found.scan().to_arrow()
    return arrow.to_pylist(), arrow.column_names
