"""What Spark, Hadoop and Iceberg would rather not do in the JVM of our server.

Each mend reaches for what is private to them, so it may fail in another version: it is said in the
server's log, and everything works without, as it did. The classes in Java are compiled there,
by the compiler that Spark has for its own code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import resources
from typing import Any

from cdc_assets.errors import first_line

_log = logging.getLogger(__name__)

# Pools of Spark SQL whose threads keep the session that they were made under, until they have idled
# for a minute: while statements keep coming, for good.
_POOLS = (
    "adaptive.AdaptiveSparkPlanExec",
    "adaptive.ResultQueryStageExec",
    "exchange.BroadcastExchangeExec",
    "exchange.ShuffleExchangeExec",
    "SubqueryBroadcastExec",
    "SubqueryExec",
)
_IDLE_THREAD_SECONDS = 2


def mend(spark: Any) -> None:
    """Apply all of it to the JVM of the classic session ``spark``, which has run nothing yet."""
    for otherwise, mended in _MENDS.items():
        _tried(otherwise, mended, spark)
    for name in _POOLS:
        _tried(f"threads of Spark's {name} keep sessions", _end_idle, spark, name)


def _tried(otherwise: str, mended: Callable[..., None], *arguments: Any) -> None:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    try:
        mended(*arguments)
    except (Py4JError, TypeError) as error:  # TypeError: there is no such class
        _log.warning("%s: %s", otherwise, first_line(error))


def _write_plain_files(spark: Any) -> None:
    """Write no checksum beside each local file, as on an object store: twice as many files."""
    files = _local_files(spark)
    files.setWriteChecksum(False)
    files.setVerifyChecksum(False)


def _set_modes_without_processes(spark: Any) -> None:
    """Set the mode of a local file by a system call: a fork costs 5 ms, and a merge has a dozen."""
    jvm, context = spark.sparkContext._jvm, spark.sparkContext._jsc
    raw = _constructor(spark, "SystemCalls").newInstance(_array(spark, jvm.java.lang.Object))
    raw.initialize(jvm.java.net.URI("file:///"), context.hadoopConfiguration())
    within = jvm.java.lang.Class.forName("org.apache.hadoop.fs.FilterFileSystem")
    _set(within.getDeclaredField("fs"), _local_files(spark), raw)


def _see_results_at_once(spark: Any) -> None:
    """Have Iceberg's tasks awaited, not asked each 10 ms: half of a small merge was such sleep."""
    jvm, iceberg = spark.sparkContext._jvm, spark.sparkContext._jvm.org.apache.iceberg
    shared = iceberg.util.ThreadPools.getWorkerPool()
    inner = shared.getClass().getDeclaredField("e")
    inner.setAccessible(True)
    given = _array(spark, jvm.java.lang.Object, inner.get(shared))
    executor = jvm.java.lang.Class.forName("java.util.concurrent.ThreadPoolExecutor")
    prompt = _constructor(spark, "PromptPool", executor)
    inner.set(shared, prompt.newInstance(given))
    # Another one: tasks of the first may wait for tasks of this.
    deletes = _loader(spark).loadClass("org.apache.iceberg.hadoop.HadoopFileIO")
    _set(deletes.getDeclaredField("executorService"), None, prompt.newInstance(given))


def _forget_closed_readers(spark: Any) -> None:
    """Let the JVM collect the Arrow allocators of files that were read.

    Iceberg makes one for each file and never closes it (apache/iceberg#13937), and the root of all
    allocators keeps its children: some 500 bytes for each read of a file, until the heap is full.
    So the root is given a map that keeps none which nobody else has.
    """
    iceberg = spark.sparkContext._jvm.org.apache.iceberg
    root = iceberg.arrow.ArrowAllocation.rootAllocator()
    children = root.getClass().getSuperclass().getDeclaredField("childAllocators")
    makes = iceberg.relocated.com.google.common.collect.MapMaker()
    _set(children, root, makes.weakKeys().weakValues().makeMap())


def _forget_ended_pools(spark: Any) -> None:
    """Let the JVM collect the pool of each compaction, and the session that it was made under."""
    nothing = _array(spark, spark.sparkContext._jvm.java.lang.Object)
    _constructor(spark, "EndedPools").newInstance(nothing).start()


def _end_idle(spark: Any, name: str) -> None:
    """Have idle threads of one of Spark's pools end soon, and with them what they keep."""
    java = spark.sparkContext._jvm.java
    found = java.lang.Class.forName(f"org.apache.spark.sql.execution.{name}$")
    pool = found.getField("MODULE$").get(None).executionContext().executor()
    pool.setKeepAliveTime(_IDLE_THREAD_SECONDS, java.util.concurrent.TimeUnit.SECONDS)


# What is said of a mend that failed.
_MENDS: dict[str, Callable[[Any], None]] = {
    "local files have checksums beside them": _write_plain_files,
    "each local file takes a process": _set_modes_without_processes,
    "each commit of Iceberg's sleeps": _see_results_at_once,
    "each read of a file takes some of Spark's heap": _forget_closed_readers,
    "each compaction takes some of Spark's heap": _forget_ended_pools,
}


def _local_files(spark: Any) -> Any:
    """Hadoop's local file system: the one that everybody in this JVM gets."""
    jvm, context = spark.sparkContext._jvm, spark.sparkContext._jsc
    place = jvm.java.net.URI("file:///")
    return jvm.org.apache.hadoop.fs.FileSystem.get(place, context.hadoopConfiguration())


def _constructor(spark: Any, name: str, *types: Any) -> Any:
    """That of the class ``name``, of this folder's source, which takes such arguments."""
    jvm = spark.sparkContext._jvm
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(_loader(spark))
    compiler.cook((resources.files(__package__) / f"{name}.java").read_text())
    made = compiler.getClassLoader().loadClass(name)
    return made.getConstructor(_array(spark, jvm.java.lang.Class, *types))


def _loader(spark: Any) -> Any:
    """The loader of the class path and of ``spark.jars``."""
    return spark.sparkContext._jvm.java.lang.Thread.currentThread().getContextClassLoader()


def _set(field: Any, of: Any, value: Any) -> None:
    field.setAccessible(True)
    field.set(of, value)


def _array(spark: Any, kind: Any, *values: Any) -> Any:
    array = spark.sparkContext._gateway.new_array(kind, len(values))
    for place, value in enumerate(values):
        array[place] = value
    return array
