"""The staged file: its schema, and where it is kept.

Every staged file of every table has this one schema, for ever (design: the staged file). A row says
what happened to one row of the source; the values are Postgres's text forms.

``_commit_lsn`` is the LSN of the transaction's commit record. A transaction is visible in a
snapshot pinned at c exactly if its commit record begins below c, so a row is in the snapshot iff
``_commit_lsn < c``: the cut between copy and log is exact per row, wherever a file begins or ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlparse

import pyarrow as pa
from pyarrow import fs

from cdc_assets.config import S3Config

STAGED_SCHEMA = pa.schema(
    [
        pa.field("_op", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field("_lsn", pa.int64(), nullable=False),
        pa.field("_commit_lsn", pa.int64(), nullable=False),
        pa.field("_ts", pa.timestamp("us", "UTC"), nullable=False),
        pa.field("_xid", pa.int64(), nullable=False),
        pa.field("_unchanged_cols", pa.string()),
        pa.field("_data", pa.large_string(), nullable=False),
    ]
)

# The key of a staged file's metadata that says which columns its rows have, with their types.
RELATION_METADATA = b"cdc_assets.relation"

# The member of `_data` that carries the old key of a key change: no Postgres identifier is empty.
OLD_KEY = ""


@dataclass(frozen=True, slots=True)
class Storage:
    """How to reach the staging place from any process; keys come from the environment."""

    endpoint: str | None = None
    region: str | None = None
    path_style: bool = False

    @classmethod
    def of(cls, s3: S3Config) -> Storage:
        return cls(s3.endpoint, s3.region, s3.path_style)

    def locate(self, uri: str) -> tuple[fs.FileSystem, str]:
        """The pyarrow filesystem of a ``file://`` or ``s3://`` URI, and the path in it."""
        parsed = urlparse(uri)
        if parsed.scheme == "s3":
            options: dict[str, object] = {"force_virtual_addressing": False}
            if self.endpoint:
                options["endpoint_override"] = self.endpoint
                options["force_virtual_addressing"] = not self.path_style
            if self.region:
                options["region"] = self.region
            return fs.S3FileSystem(**options), unquote(parsed.netloc + parsed.path)
        return fs.LocalFileSystem(), unquote(parsed.path)
