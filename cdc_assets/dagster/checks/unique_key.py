"""Is every key in the lake table once? Merges must keep it so; this reads the table itself."""

from __future__ import annotations

import dagster as dg

from cdc_assets.dagster.metadata import without_zeros
from cdc_assets.dagster.names import TableAssets
from cdc_assets.errors import CdcError
from cdc_assets.lake.spark.sql import ticked
from cdc_assets.lake.tables import LakeTable
from cdc_assets.log.store import LogStore
from cdc_assets.log.verified import keys_seen, remember_keys
from cdc_assets.messages.texts import described
from cdc_assets.verify.keys import KeysLooked, look

NAME = "primary_key_unique"


def check_unique_key(store: LogStore, lake: LakeTable, names: TableAssets) -> dg.AssetCheckResult:
    """Look at the keys that are new, and at others in turn; see :mod:`cdc_assets.verify.keys`."""
    if lake.row.mode == "append":
        return _nothing(names, f"{names.table} is in mode append: a key has a row for each change.")
    if not lake.key:
        said = f"{names.table} has no key: duplicates are legal, nothing is checked."
        return _nothing(names, said)
    loaded = lake.load()
    key = [column.name for column in lake.key]
    seen = keys_seen(store, names.table)
    try:
        found = look(loaded, key, seen, store.server_now()) if loaded is not None else None
    except CdcError as problem:
        return dg.AssetCheckResult(
            asset_key=names.lake,
            check_name=NAME,
            passed=False,
            severity=dg.AssetCheckSeverity.WARN,
            description=described(
                f"The keys of {names.lake_table_name} weren't looked at: {problem}"
            ),
        )
    if found is None:
        return _nothing(names, f"{names.lake_table_name} is empty.")
    remember_keys(store, names.table, found.seen)
    said = "No key stands twice."
    if found.duplicated:
        listed = ", ".join(ticked(name) for name in key)
        said = f"{found.duplicated:,} keys ({listed}) stand more than once, in {found.rows:,} rows."
    return dg.AssetCheckResult(
        asset_key=names.lake,
        check_name=NAME,
        passed=not found.duplicated,
        severity=dg.AssetCheckSeverity.ERROR,
        description=described(f"{said} {_covered(found)}"),
        metadata=without_zeros(
            {
                "duplicated keys": found.duplicated,
                "files with the same keys": found.meant,
                "of them read": found.met,
                "share of the round left": round(1 - found.share, 6),
                **(
                    {"last full round": dg.MetadataValue.timestamp(found.seen.round_ended)}
                    if found.seen.round_ended is not None
                    else {}
                ),
            }
        ),
    )


def _covered(found: KeysLooked) -> str:
    if not found.looked and not found.turned:
        return "Nothing is new since the last look."
    part = f"Looked at {found.looked:,} of {found.changed:,} new files"
    part += f" and at {found.turned:,} others in turn" if found.turned else ""
    if found.met < found.meant:
        part += f", against {found.met:,} of {found.meant:,} files that may have the same keys"
    return f"{part}; {found.read_rows:,} keys were read."


def _nothing(names: TableAssets, said: str) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(
        asset_key=names.lake, check_name=NAME, passed=True, description=described(said)
    )
