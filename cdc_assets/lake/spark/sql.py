"""Identifiers, strings and properties as Spark SQL writes them."""

from __future__ import annotations

from collections.abc import Mapping


def ticked(name: str) -> str:
    """An identifier as Spark SQL spells it."""
    return "`" + name.replace("`", "``") + "`"


def listed(properties: Mapping[str, str]) -> str:
    """Table properties as Spark SQL writes them."""
    return ", ".join(f"{quoted(k)}={quoted(v)}" for k, v in properties.items())


def quoted(text: str) -> str:
    """A string as Spark SQL writes it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def ours(name: str) -> str:
    """A name that no column of a source's table has: it is longer than Postgres allows."""
    return name + "_" * 64
