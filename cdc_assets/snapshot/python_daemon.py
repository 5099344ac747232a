"""The process that the Python workers of our Spark server are forked from.

A worker that imports pyarrow, psycopg and the copy by itself takes most of a second of CPU for it,
and each session (every Dagster run has one) gets workers of its own. Workers forked from a process
that has imported them already start at once. Spark starts this as
``python -m cdc_assets.snapshot.python_daemon pyspark.worker`` (``spark.python.daemon.module``) and
reads a port from its standard output, so nothing here may print.

Nothing here may start a thread or open a connection, either: neither survives a fork.
"""

from __future__ import annotations

import gc
import sys

# Spark puts archives first on the path, among them a copy of the installed PySpark, and makes
# Python read all their directories anew for each task: 0.15 s of CPU.
_ARCHIVES = (".zip", ".jar")
sys.path[:] = [entry for entry in sys.path if not entry.endswith(_ARCHIVES)]
for _entry in [entry for entry in sys.path_importer_cache if entry.endswith(_ARCHIVES)]:
    del sys.path_importer_cache[_entry]

if __name__ == "__main__":
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401
    from pyspark import daemon

    import cdc_assets.postgres.copy_out.session
    import cdc_assets.snapshot.worker  # noqa: F401

    # A worker collects garbage after each task: skipping what was imported saves another 0.15 s.
    gc.freeze()
    daemon.manager()  # type: ignore[no-untyped-call]
