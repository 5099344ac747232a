"""The decoder process's entry: quick to start, because a crash of it delays everything.

pyarrow imports pandas where it is installed, for conversions that are never made here; that is a
second of start-up and 60 MB. So this process has no pandas. Nothing else belongs here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _NoPandas(MetaPathFinder):
    """Answers the import of pandas as if it weren't installed."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None, /
    ) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("not wanted in the decoder process", name=fullname)


if __name__ == "__main__":
    sys.meta_path.insert(0, _NoPandas())
    from cdc_assets.flusher.decoder_process.loop import main

    main()
