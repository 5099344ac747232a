"""Table names as SQL spells them, parsed once and carried as values.

Configuration, ``--table`` and messages all use the SQL spelling: ``public.orders`` or
``public."My.Table"``. An unquoted part is folded to lower case, as Postgres folds it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from psycopg import sql

_PART = r'"(?:[^"]|"")+"|[A-Za-z_\u0080-\U0010ffff][\w$\u0080-\U0010ffff]*'
_NAME = re.compile(rf"\A(?:(?P<schema>{_PART})\.)?(?P<name>{_PART})\Z")
_PLAIN = re.compile(r"\A[a-z_][a-z0-9_$]*\Z")
# Names that are kept as they were read and spelt: each look at the log spells those of all tables.
_KEPT = 16_384
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
# Words that Postgres refuses as a bare table name; the list only decides when quotes are printed.
_RESERVED = frozenset(
    [
        *("all", "analyse", "analyze", "and", "any", "array", "as", "asc", "asymmetric", "both"),
        *("case", "cast", "check", "collate", "column", "constraint", "create", "current_date"),
        *("current_role", "current_time", "current_timestamp", "current_user", "default"),
        *("deferrable", "desc", "distinct", "do", "else", "end", "except", "false", "fetch", "for"),
        *("foreign", "from", "grant", "group", "having", "in", "initially", "intersect", "into"),
        *("lateral", "leading", "limit", "localtime", "localtimestamp", "not", "null", "offset"),
        *("on", "only", "or", "order", "placing", "primary", "references", "returning", "select"),
        *("session_user", "some", "symmetric", "table", "then", "to", "trailing", "true", "union"),
        *("unique", "user", "using", "variadic", "when", "where", "window", "with"),
    ]
)


def _folded(part: str) -> str:
    """A part of a name as the catalog has it: quoted ones stay, others become lower case."""
    return part[1:-1].replace('""', '"') if part.startswith('"') else part.lower()


@lru_cache(_KEPT)
def quoted(name: str) -> str:
    """One identifier as SQL spells it, with quotes only where they are needed."""
    if _PLAIN.match(name) and name not in _RESERVED:
        return name
    return '"' + name.replace('"', '""') + '"'


@lru_cache(_KEPT)
def _parsed(text: str) -> tuple[str, str]:
    match = _NAME.match(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a table name; write it as in SQL:"
            ' schema.table, with quotes where SQL needs them (public."My.Table")'
        )
    return _folded(match["schema"]) if match["schema"] else "public", _folded(match["name"])


@dataclass(frozen=True, slots=True, order=True)
class TableId:
    """A table of the source: its schema and its name, exactly as the catalog has them."""

    schema: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the SQL spelling; a name without a schema is in ``public``; else ValueError."""
        return cls(*_parsed(text))

    def __str__(self) -> str:
        return f"{quoted(self.schema)}.{quoted(self.name)}"

    @property
    def identifier(self) -> sql.Identifier:
        """For composing statements with :mod:`psycopg.sql`."""
        from psycopg import sql  # the decoder process composes none: 20 MB

        return sql.Identifier(self.schema, self.name)


# Iceberg's metadata columns: a reader finds these under their names in each table, or in a view of
# its changes. https://iceberg.apache.org/spec/#reserved-field-ids
_METADATA_COLUMNS = (
    *("_file", "_pos", "_deleted", "_spec_id", "_partition"),
    *("_row_id", "_last_updated_sequence_number"),
    *("_change_type", "_change_ordinal", "_commit_snapshot_id"),
)
_OF_THE_SOURCE = "__source"


def lake_column(name: str, renamed: Mapping[str, str] = MappingProxyType({})) -> str:
    """A column's name in the lake: the source's, unless it is taken.

    Taken are the names of metadata columns, and those that columns are ``renamed`` to. No two
    columns get one name, and a column's name doesn't depend on which others the table has.
    """
    if name in renamed:
        return renamed[name]
    plain = name
    while plain.endswith(_OF_THE_SOURCE):
        plain = plain.removesuffix(_OF_THE_SOURCE)
    taken = plain in _METADATA_COLUMNS or plain in renamed.values()
    return name + _OF_THE_SOURCE if taken else name


def is_free_in_lake(name: str) -> bool:
    """Whether a column of the lake may be given that name."""
    return name not in _METADATA_COLUMNS and not name.endswith(_OF_THE_SOURCE)


def safe_folder(plain: str, identity: str | None = None) -> str:
    """``plain`` with only letters, digits, ``_ . -``, which are safe in paths and URIs.

    A name that had to be changed gets a hash of itself, so that no two share a folder. If
    ``identity`` is given, its hash is added in any case.
    """
    safe = _UNSAFE.sub("_", plain)
    if safe == plain and identity is None and len(plain) < 128:
        return safe
    digest = hashlib.sha256((identity or plain).encode()).hexdigest()[:12]
    return f"{safe[:100]}-{digest}"
