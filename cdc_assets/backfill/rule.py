"""Which rows that were read are left to the stream: see the package."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc_assets.log.staged.texts import texts
from cdc_assets.postgres.key_lookup import Key


def changed_keys(events: pa.Table, key: Sequence[str]) -> frozenset[Key] | None:
    """The keys of changes of the log, as staged; the old one, too, of a key that changed.

    None: all, for one of them is a truncate. ``key``: the names of its columns at the source.
    """
    if "T" in events["_op"].unique().to_pylist():
        return None
    # Whoever changes a key has a delete of the old one in the log.
    named = texts(events["_data"], list(key))
    return frozenset(zip(*(column.to_pylist() for column in named.columns), strict=True))


def counts(keys: Sequence[Key], changed: Collection[Key] | None) -> npt.NDArray[np.bool_]:
    """Of rows with these keys, whether each is what the lake should have; None: all changed."""
    if changed is None:
        return np.zeros(len(keys), bool)
    return np.fromiter((key not in changed for key in keys), bool, len(keys))
