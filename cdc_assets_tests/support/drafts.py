"""What may come between a draft's last write and its publication (``lake.drafts.tables``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cdc_assets.lake.drafts.tables import TableDraft


@contextmanager
def before_publishing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> Iterator[None]:
    """Do something when a draft is about to be published; one is."""
    publish, acted = TableDraft.publish, list[object]()

    def late(draft: TableDraft) -> None:
        acted.append(act())
        publish(draft)

    with monkeypatch.context() as patched:
        patched.setattr(TableDraft, "publish", late)
        yield
    assert len(acted) == 1
