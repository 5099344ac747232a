"""The steps of ``state migrate`` at which its process may be killed (``faults.killed_at``)."""

from __future__ import annotations

from cdc_assets.log.moving import frozen, rows
from cdc_assets.operations.state import migrate
from cdc_assets_tests.faults.killed_at import Wrap, after, before

# Until the old rows are gone, a move can be undone.
UNDONE: dict[str, Wrap] = {
    "the target is looked at": before(migrate, "_refuse_known"),
    "nothing is done": before(migrate, "_freeze"),
    "the old schema is marked": after(migrate, "set_mark"),
    "a constraint is added": after(frozen, "_alter"),
    "all are added": after(migrate, "freeze"),
    "sessions are ended": after(migrate, "end_sessions"),
    "the new schema is about to be marked": before(migrate, "_receive"),
    "the new schema is marked": after(migrate, "_receive"),
    "rows are copied": before(rows.Digest, "__add__"),
    "all are copied, not committed": after(migrate, "copy_rows"),
    "all are copied": after(migrate, "_copy"),
    "the old rows are about to go": before(migrate, "_leave"),
}
DONE: dict[str, Wrap] = {
    "the old rows are gone": after(migrate, "_leave"),
    "the new schema is about to live": before(migrate, "_arrive"),
    "it lives": after(migrate, "_arrive"),
}
