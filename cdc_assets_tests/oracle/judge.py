"""Whether a lake table is what the source and its recorded history say, as typed multisets.

``mirror``: the source's rows. ``soft_delete``: the live rows are the source's, the marked ones are
those that were deleted since the copy, with their last values. ``append``: what the copy's snapshot
shows, then every change, transaction by transaction in the order of the WAL. Columns that DDL of
the plan touched are compared as the source has them now, and not in what is history by then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cdc_assets_tests.oracle.plan import Table
from cdc_assets_tests.oracle.record import Change, Image, Transaction, before
from cdc_assets_tests.oracle.values import in_lake, is_text, shown

_SHOWN = 6
Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is known of one table at the end; ``kinds`` are the source's columns with types."""

    number: int
    table: Table
    kinds: Mapping[str, str]
    source: Sequence[Image]
    history: Sequence[Transaction]
    snapshot_lsn: int
    lake: Sequence[Mapping[str, Any]]
    lake_columns: Sequence[str]

    @property
    def text_keys(self) -> frozenset[str]:
        """Columns of the key that the lake has as text, because some value doesn't fit its type."""
        native = [c for c in self.table.key if not is_text(self.kinds[c])]
        return frozenset(c for c in native if any(isinstance(row[c], str) for row in self.lake))


def judge(found: Evidence) -> list[str]:
    """What differs, in words; nothing if nothing does."""
    excluded = {_read(c) for c in found.table.settings.get("columns", {}).get("exclude", ())}
    if leaked := excluded & set(found.lake_columns):
        return [f"excluded columns: {leaked} are in the lake"]
    if missing := set(found.kinds) - excluded - set(found.lake_columns):
        return [f"columns: {missing} are missing in the lake"]
    if odd := [c for c in found.text_keys if not _ever_unfit(found, c)]:
        return [f"text keys: {odd} are text, and every value would fit"]
    return {"mirror": _mirror, "soft_delete": _soft_delete, "append": _append}[found.table.mode](
        found
    )


def _mirror(found: Evidence) -> list[str]:
    return _differ("rows", _sources(found), Counter(_lakes(found, found.lake)))


def _soft_delete(found: Evidence) -> list[str]:
    live = [row for row in found.lake if row["_deleted_at"] is None]
    marked = [row for row in found.lake if row["_deleted_at"] is not None]
    stable = _stable(found)
    expected = Counter(_row(found, image, stable) for image in _deleted(found).values())
    return [
        *_differ("live rows", _sources(found), Counter(_lakes(found, live))),
        *_differ("marked rows", expected, Counter(_lakes(found, marked, stable))),
    ]


def _deleted(found: Evidence) -> dict[tuple[str | None, ...], Image]:
    """The last values of keys that were deleted since the copy, and aren't there again."""
    live: dict[tuple[str | None, ...], Image] = {}
    gone: dict[tuple[str | None, ...], Image] = {}
    for tx in found.history:
        counts = tx.lsn >= found.snapshot_lsn
        for change in tx.changes:
            if change.table != found.number:
                continue
            if change.op == "T":
                gone |= live if counts else {}
                live = {}
            if change.old is not None:
                key = _key(found, change.old)
                live.pop(key, None)
                if counts and (change.new is None or _key(found, change.new) != key):
                    gone[key] = change.old
            if change.new is not None:
                key = _key(found, change.new)
                live[key] = change.new
                gone.pop(key, None)
    return gone


def _append(found: Evidence) -> list[str]:
    stable = _stable(found)
    copied = [row for row in found.lake if row["_xid"] is None]
    shown_then: Counter[Row] = Counter()
    for change in before(list(found.history), found.snapshot_lsn):
        if change.table != found.number:
            continue
        if change.op == "T":
            shown_then.clear()
        if change.old is not None:
            shown_then[_row(found, change.old, stable)] -= 1
        if change.new is not None:
            shown_then[_row(found, change.new, stable)] += 1
    problems = _differ("copied rows", +shown_then, Counter(_lakes(found, copied, stable)))
    logged: dict[int, list[Row]] = {}
    for tx in found.history:
        rows = [
            row
            for change in tx.changes
            if tx.lsn >= found.snapshot_lsn and change.table == found.number
            for row in _changes(found, change, stable)
        ]
        if rows:
            logged[tx.xid] = rows
    seen = defaultdict[int, list[Row]](list)
    changes = [row for row in found.lake if row["_xid"] is not None]
    for row in sorted(changes, key=lambda row: (row["_lsn"], row["_op"])):
        seen[row["_xid"]].append((row["_op"], *_lake(found, row, stable)))
    expected = Counter((str(xid), *row) for xid, rows in logged.items() for row in rows)
    problems += _differ(
        "changes", expected, Counter((str(x), *r) for x, rs in seen.items() for r in rs)
    )
    if not problems:
        turned = [xid for xid in logged if logged[xid] != seen[xid]]
        problems += [f"order: transaction {xid} has its changes in another one" for xid in turned]
    return problems


def _changes(found: Evidence, change: Change, stable: Sequence[str]) -> Iterable[Row]:
    """The rows that mode append has of a change.

    A changed key is a D of the old one and a U; without a key a U is a D and an I. What Postgres
    can't identify is not there.
    """
    if found.table.inserts_only and change.op in "UD":
        return
    nothing = dict.fromkeys(found.kinds)
    if change.op == "T":
        yield ("T", *_row(found, nothing, stable))
    old, new, key = change.old, change.new, found.table.key
    if old is not None and (new is None or not key or _key(found, old) != _key(found, new)):
        yield ("D", *_row(found, {**nothing, **{c: old[c] for c in key or old}}, stable))
    if new is not None:
        yield (change.op if key else "I", *_row(found, new, stable))


# --- parts ---


def _read(text: str) -> str:
    return text.replace("$${", "${")


def _kind(found: Evidence, column: str) -> str:
    forced = set(found.table.settings.get("columns", {}).get("types", {}))
    return "text" if column in forced | found.text_keys else found.kinds[column]


def _ever_unfit(found: Evidence, column: str) -> bool:
    """Whether a row ever had a value of the column that the lake's type can't hold exactly."""
    texts = (
        change.new[column]
        for tx in found.history
        for change in tx.changes
        if change.table == found.number and change.new is not None
    )
    kind = found.kinds[column]
    return any(t and (in_lake(kind, t, "null") is None or t.startswith("[")) for t in texts)


def _compared(found: Evidence) -> list[str]:
    excluded = {_read(c) for c in found.table.settings.get("columns", {}).get("exclude", ())}
    return [c for c in found.kinds if c not in excluded]


def _stable(found: Evidence) -> list[str]:
    touched = set(found.table.touched)
    return [c for c in _compared(found) if c not in touched]


def _key(found: Evidence, image: Image) -> tuple[str | None, ...]:
    return tuple(image[c] for c in found.table.key)


def _row(found: Evidence, image: Image, names: Sequence[str]) -> Row:
    policy = found.table.policy
    return tuple(shown(in_lake(_kind(found, c), image.get(c), policy)) for c in names)


def _sources(found: Evidence) -> Counter[Row]:
    return Counter(_row(found, image, _compared(found)) for image in found.source)


def _lake(found: Evidence, row: Mapping[str, Any], names: Sequence[str]) -> Row:
    return tuple(shown(row[c]) for c in names)


def _lakes(
    found: Evidence, rows: Iterable[Mapping[str, Any]], names: Sequence[str] | None = None
) -> Iterable[Row]:
    listed = names if names is not None else _compared(found)
    return (_lake(found, row, listed) for row in rows)


def _differ(what: str, expected: Counter[Row], seen: Counter[Row]) -> list[str]:
    missing, extra = expected - seen, seen - expected
    if not missing and not extra:
        return []

    def some(rows: Counter[Row]) -> str:
        listed = sorted(rows.items())[:_SHOWN]
        return "; ".join(f"{n} × ({', '.join(v[:60] for v in row)})" for row, n in listed)

    parts = [f"{what}: {expected.total()} expected, {seen.total()} found"]
    if missing:
        parts.append(f"missing {missing.total()}: {some(missing)}")
    if extra:
        parts.append(f"too many {extra.total()}: {some(extra)}")
    return [". ".join(parts)]
