"""The REST catalog server that Iceberg tests its own clients with: none of ours, in Java.

Its routes are in the jar of iceberg-core's tests, the newest that is published; Jetty and what else
it needs come with Spark. It lets anybody in who is on this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from cdc_assets.lake.spark.jars import JARS, Jar, cache_folder, provide
from cdc_assets.postgres.session.jdbc import jdbc
from cdc_assets.postgres.session.parameters import resolved


class _TestsJar(Jar):
    """The jar of an artifact's tests."""

    @property
    def name(self) -> str:
        return f"{self.artifact}-{self.version}-tests.jar"


_ICEBERG = "org.apache.iceberg"
_JARS = (
    _TestsJar(
        *(_ICEBERG, "iceberg-core", "1.11.0", 1_804_337),
        "4284719a5f0eb7db01e9f784a0ed4ca8bacf7d6f9951924143afc083428d8be3",
    ),
    Jar(
        *(_ICEBERG, "iceberg-core", "1.11.0", 2_575_099),
        "53b9eb7a8c34fb9958ea7d9a4d19ba5bc96f592d0f05e8625b0778c70b1f0090",
    ),
    Jar(
        *(_ICEBERG, "iceberg-api", "1.11.0", 705_698),
        "f00675a12ceb6d833bb9c22024823a3e7afdedf7abcefe34719f45b0d211995a",
    ),
    Jar(
        *(_ICEBERG, "iceberg-common", "1.11.0", 31_895),
        "b2835d00db7c92bdfa728123ad7cdcb488e2f2805c1c51fb9ae94e8bd203bd7d",
    ),
    Jar(
        *(_ICEBERG, "iceberg-bundled-guava", "1.11.0", 1_785_615),
        "396d48d93ef5735f2ddef0cf9b3d6968ebd67b64b5cfe753d41c429d3f46a2a1",
    ),
    Jar(
        *("org.apache.httpcomponents.core5", "httpcore5", "5.4", 952_936),
        "cec2981fa7f520efb63f0787c24f10af2679e31f9f75c448c4dde40a3ae8100d",
    ),
    Jar(
        *("com.github.ben-manes.caffeine", "caffeine", "2.9.3", 912_143),
        "1e0a7bbef1dd791653143f3f05d0e489934bf5481e58a87c9e619cd46b68729b",
    ),
)


@contextmanager
def rest_reference(dsn: str, warehouse: str) -> Iterator[str]:
    """The running server's address; it keeps its entries in a database, files in the warehouse."""
    address, access = jdbc(resolved(dsn))
    settings = {
        "catalog-impl": f"{_ICEBERG}.jdbc.JdbcCatalog",
        "uri": address,
        **{f"jdbc.{name}": value for name, value in access.items()},
        "jdbc.schema-version": "V1",
        "warehouse": warehouse,
        "unique-table-location": "true",
    }
    jars = provide(cache_folder(), {}, print, [*_JARS, JARS[2]])
    path = os.pathsep.join(map(str, [*jars, Path(pyspark.__file__).parent / "jars/*"]))
    command = ["java", "-cp", path, str(Path(__file__).with_name("RestServer.java"))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        try:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(f"{json.dumps(settings)}\n")
            server.stdin.flush()
            uri = server.stdout.readline().strip()
            assert uri, "the server began to serve"
            yield uri
        finally:
            server.kill()
