"""What Spark's Python workers are forked from, in the server that is ours.

A worker that imports pyarrow, ADBC and the copy by itself needs most of a second of CPU for it, and
each session, of whom every Dagster run has one, gets workers of its own. Forked from a process that
has imported them already, they start at once. Spark starts this as
``python -m cdc_assets.snapshot.python_daemon pyspark.worker`` (``spark.python.daemon.module``) and
reads a port from its standard output, so nothing here may print.

What does not belong: anything that starts a thread or opens a connection; neither survives a fork.
"""

from __future__ import annotations

import gc
import sys

# Spark puts archives first on the path, among them a copy of the PySpark that is installed, and has
# Python read the directories of them all anew for each task: 0.15 s of CPU.
_ARCHIVES = (".zip", ".jar")
sys.path[:] = [entry for entry in sys.path if not entry.endswith(_ARCHIVES)]
for _entry in [entry for entry in sys.path_importer_cache if entry.endswith(_ARCHIVES)]:
    del sys.path_importer_cache[_entry]

if __name__ == "__main__":
    import adbc_driver_postgresql.dbapi  # noqa: F401
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401
    from pyspark import daemon

    import cdc_assets.snapshot.worker  # noqa: F401

    # A worker collects its garbage after each task: not among what was imported, another 0.15 s.
    gc.freeze()
    daemon.manager()  # type: ignore[no-untyped-call]
