"""``python -m cdc_assets.lake.spark.record``: make the archive of the classes that Spark loads.

A Spark of its own runs what copies, merges and maintenance consist of, on a small table in a
temporary folder, and writes the archive as it ends: a minute, once for a Java and its jars.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pyspark.sql import SparkSession

from cdc_assets.errors import EnvironmentProblem, first_line
from cdc_assets.lake.spark.class_archive import archive_path
from cdc_assets.lake.spark.jars import provided
from cdc_assets.lake.spark.jvm import mend
from cdc_assets.lake.spark.properties import SparkServerSettings, spark_properties
from cdc_assets.lake.spark.server import connect_port, start_spark
from cdc_assets.lake.spark.session import connected
from cdc_assets.process.home import private_folder
from cdc_assets.process.machine import check_java

_log = logging.getLogger(__name__)

_TABLE = "recorded.ns.t"
_SETUP = (
    "create namespace if not exists recorded.ns",
    f"""create table {_TABLE} (id bigint, v string, at timestamp) using iceberg tblproperties (
        'format-version' = '3', 'write.delete.mode' = 'merge-on-read',
        'write.merge.mode' = 'merge-on-read', 'write.update.mode' = 'merge-on-read')""",
)
_MERGE = (
    f"alter table {_TABLE} create or replace branch work",
    f"delete from {_TABLE}.branch_work t where exists (select 1 from batch b where b.id = t.id)",
    f"insert into {_TABLE}.branch_work select id, v, current_timestamp() from batch",
    "call recorded.system.fast_forward('ns.t', 'main', 'work')",
    f"alter table {_TABLE} drop branch work",
)
_CARE = (
    f"""merge into {_TABLE} t using batch b on t.id = b.id when matched then update set v = b.v
        when not matched then insert (id, v, at) values (b.id, b.v, null)""",
    """call recorded.system.rewrite_data_files(
        table => 'ns.t', options => map('rewrite-all', 'true'))""",
    "call recorded.system.expire_snapshots(table => 'ns.t', retain_last => 1)",
)
_READ = (
    f"select count(*), max(at), max(xxhash64(id, v)) from {_TABLE}",
    f"select v, count(*) n from {_TABLE} group by v order by n desc, v limit 3",
    f"select count(*) from {_TABLE}.files",
)
_CLIENT = "--client"
# Archives of other installations that are kept, the newest ones.
_OTHERS = 2
# What takes longer isn't worth waiting for.
_USE_SECONDS, _END_SECONDS = 300.0, 180.0
_STALE_SECONDS = 3_600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Make it unless it is there; 0, or 1 after one sentence on stderr."""
    given = sys.argv[1:] if arguments is None else arguments
    if list(given[:1]) == [_CLIENT] and len(given) == 2:  # of the Spark that is recorded
        _use(sys.stdin.readline().strip(), Path(given[1]))
        return 0
    if given:
        sys.stderr.write(f"{(__doc__ or '').strip()}\n")
        return 2
    # What Spark says goes to a file, not to who waits.
    person = os.fdopen(os.dup(sys.stderr.fileno()), "w")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=person)
    logging.getLogger("py4j").setLevel(logging.WARNING)
    try:
        record()
    except Exception as problem:  # noqa: BLE001 - Spark starts all the same, only later
        _log.error("Spark starts without an archive of its classes: %s", first_line(problem))
        return 1
    return 0


def record() -> None:
    """Make the archive; does nothing if it is there."""
    check_java()
    settings = SparkServerSettings(memory="1g")
    jars = provided({}, _log.info)
    archive = archive_path(jars.class_path)
    if archive.exists():
        _sweep(archive)
        return
    began = time.monotonic()
    _log.info(
        "recording the classes that Spark loads, once: it starts sooner then (about a minute)"
    )
    private_folder(archive.parent)
    if any(character.isspace() for character in str(archive)):
        raise EnvironmentProblem(f"Java takes no option with a space in it: {archive}.")
    _sweep(archive)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        half = Path(folder) / archive.name
        own = os.environ.get("SPARK_SUBMIT_OPTS", "")
        os.environ["SPARK_SUBMIT_OPTS"] = f"-XX:ArchiveClassesAtExit={half} -Xlog:cds=off {own}"
        with (Path(folder) / "spark.log").open("wb") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        token = secrets.token_urlsafe(32)
        scratch = Path(folder) / "scratch"
        spark = start_spark(
            spark_properties(settings, scratch, token, jars.settings), scratch, jars.class_path
        )
        mend(spark)
        jvm = spark.sparkContext._gateway.proc
        url = f"sc://localhost:{connect_port(spark)}/;token={token}"
        try:
            # The address is a secret: whoever has it runs code as this user.
            used = subprocess.run(
                [sys.executable, "-m", __spec__.name, _CLIENT, str(Path(folder) / "lake")],
                input=f"{url}\n",
                check=False,
                capture_output=True,
                text=True,
                timeout=_USE_SECONDS,
            )
            jvm.stdin.close()
            jvm.wait(_END_SECONDS)
        finally:
            if jvm.poll() is None:
                jvm.kill()
        if used.returncode:
            raise RuntimeError((used.stderr.strip().splitlines() or ["its client failed"])[-1])
        if jvm.returncode or not half.exists():
            said = (Path(folder) / "spark.log").read_text(errors="replace").strip().splitlines()
            raise RuntimeError(f"this Java writes none. {said[-1] if said else ''}".strip())
        half.chmod(0o600)
        with half.open("rb") as file:  # Java doesn't look whether all of it got to the disk
            os.fsync(file.fileno())
        half.replace(archive)
    size, seconds = archive.stat().st_size / 1e6, time.monotonic() - began
    _log.info("%.0f MB of classes are recorded, %.0f s", size, seconds)


def _sweep(archive: Path) -> None:
    """Remove what recorders that were killed left, and the oldest archives beside this one."""
    folder = archive.parent
    with suppress(FileNotFoundError):  # another recorder sweeps, too
        for left in folder.glob("tmp*"):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        others = {path for path in folder.glob("*.jsa") if path != archive}
        for old in sorted(others, key=lambda path: path.stat().st_mtime)[:-_OTHERS]:
            old.unlink(missing_ok=True)


def _use(url: str, lake: Path) -> None:
    session = connected(url)
    catalog = "spark.sql.catalog.recorded"
    session.conf.set(catalog, "org.apache.iceberg.spark.SparkCatalog")
    session.conf.set(f"{catalog}.type", "hadoop")
    session.conf.set(f"{catalog}.warehouse", lake.as_uri())
    for statement in _statements(session):
        session.sql(statement).collect()
    session.range(10).mapInArrow(lambda batches: batches, "id bigint").collect()
    session.stop()


def _statements(session: SparkSession) -> Iterator[str]:
    yield from _SETUP
    for number in range(3):
        rows = [(number * 50 + n, f"value {n}") for n in range(100)]
        session.createDataFrame(rows, "id bigint, v string").createOrReplaceTempView("batch")
        yield from _MERGE
    yield from _CARE
    yield from _READ


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # py4j's threads and exit hooks would talk to a JVM that is gone
