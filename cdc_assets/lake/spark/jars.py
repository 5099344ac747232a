"""The jars that Spark is started with: which, and that they are the bytes that are listed here.

A jar runs as whoever runs Spark, so none is put onto a class path before its SHA-256 was compared.
They are kept in a folder of the user's own (``~/.cache/cdc_assets/jars``, or below
``spark.jars.ivy``), compared again at every start, and looked for there, then in what we, Ivy and
Maven have left, then in Maven repositories, those of ``spark.jars.repositories`` first. Where
``spark.jars.ivySettings`` is given, Ivy fetches them by it. Jars of others that ``spark.conf``
names are the user's: nobody knows what they should be.

``python -m cdc_assets.lake.spark.jars`` fetches them beforehand, and shows how far it is. None of
the three depends on another jar: what is listed is all that is resolved.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

from cdc_assets.errors import EnvironmentProblem, first_line
from cdc_assets.process.machine import java_command


@dataclass(frozen=True, slots=True)
class Jar:
    """One jar of a Maven repository; ``size_bytes`` for the progress, ``sha256`` to verify it."""

    group: str
    artifact: str
    version: str
    size_bytes: int
    sha256: str

    @property
    def coordinates(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"

    @property
    def name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"

    @property
    def path(self) -> str:
        """Where it is in a Maven repository."""
        return f"{self.group.replace('.', '/')}/{self.artifact}/{self.version}/{self.name}"


JARS = (
    Jar(
        *("org.apache.iceberg", "iceberg-spark-runtime-4.1_2.13", "1.12.0", 48_309_426),
        "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82",
    ),
    Jar(  # S3FileIO and the Glue catalog
        *("org.apache.iceberg", "iceberg-aws-bundle", "1.12.0", 69_034_612),
        "dd7e49ffa4ac9b215bed846581991259e3aec9bb2fa08d6cec029c46cd66d957",
    ),
    Jar(  # the driver of Iceberg's JDBC catalog
        *("org.postgresql", "postgresql", "42.7.11", 1_142_677),
        "1981b31d3993c58702783c1cddf10a34e48c1f413d70ff1cb6def0a143484647",
    ),
)
PACKAGES = tuple(jar.coordinates for jar in JARS)

Say = Callable[[str], None]
_ELSEWHERE = (
    "Set HOME, XDG_CACHE_HOME or spark.jars.ivy (in spark.conf) to a folder that this user may"
    " write to."
)
_STALL_SECONDS = 30.0
_SAY_SECONDS = 5.0
_PIECE_BYTES = 2**20


def cache_folder() -> Path:
    """The user's own folder of verified jars; ``$XDG_CACHE_HOME`` moves it.

    Raises EnvironmentProblem if the user has none.
    """
    home = _home()
    base = os.environ.get("XDG_CACHE_HOME") or (home / ".cache" if home else None)
    if base is None:
        raise EnvironmentProblem(
            "this user has no home folder, where Spark's jars would be kept.", _ELSEWHERE
        )
    return Path(base) / "cdc_assets" / "jars"


def _home() -> Path | None:
    """The home folder; None for a user unknown to the system, as in containers."""
    with suppress(RuntimeError):
        return Path.home()
    return None


@dataclass(frozen=True, slots=True)
class Provided:
    """The jars of a server, on its ``class_path`` or by Spark's ``settings``.

    Spark copies a jar of ``spark.jars`` to itself at every start. But the classes of those are
    hidden from the ones of the class path.
    """

    class_path: str
    settings: Mapping[str, str]


def provided(conf: Mapping[str, str], say: Say, folder: Path | None = None) -> Provided:
    """The server's jars: ours from ``folder``, verified, and the user's own as they are.

    Ours are on the class path where nobody names others, which ours may have to load.
    ``conf``: the user's settings. Its ``spark.jars.packages`` lists the packages, as ever; those
    that are in JARS aren't left to Ivy. Raises EnvironmentProblem.
    """
    named = conf.get("spark.jars.packages", ",".join(PACKAGES)).split(",")
    packages = [package.strip() for package in named if package.strip()]
    ours = [jar for jar in JARS if jar.coordinates in packages]
    theirs = [package for package in packages if package not in PACKAGES]
    own_jars = [jar for jar in conf.get("spark.jars", "").split(",") if jar]
    if theirs or own_jars:
        say(f"not verified, as spark.conf names them: {', '.join([*theirs, *own_jars])}")
    ivy = conf.get("spark.jars.ivy")
    folder = folder or (Path(ivy).absolute() / "cdc_assets" if ivy else cache_folder())
    verified = provide(folder, conf, say, ours)
    if theirs or own_jars or os.pathsep in str(folder):  # a class path can't name such a folder
        own_jars, verified = [*(path.as_uri() for path in verified), *own_jars], []
    settings = {"spark.jars": ",".join(own_jars), "spark.jars.packages": ",".join(theirs)}
    return Provided(os.pathsep.join(map(str, verified)), settings)


def provide(
    folder: Path, conf: Mapping[str, str], say: Say, jars: Sequence[Jar] = JARS
) -> list[Path]:
    """The verified jars in ``folder``, fetched if need be.

    A file with another SHA-256 is reported and thrown away. Raises EnvironmentProblem if one can't
    be had, or kept.
    """
    try:
        _make_private(folder)
        for jar in jars:
            place = folder / jar.name
            if place.exists():
                if _sha256(place) == jar.sha256:
                    continue
                say(f"{place} isn't {jar.coordinates} as it was published: thrown away")
                place.unlink(missing_ok=True)  # another process may be at it, too
            _fetch(jar, folder, conf, say)
    except OSError as error:
        raise EnvironmentProblem(
            f"Spark's jars can't be kept in {folder}: {error.strerror}.", _ELSEWHERE
        ) from error
    return [folder / jar.name for jar in jars]


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o022:
        raise EnvironmentProblem(
            f"others may write to {folder}, from where Spark would run their code.",
            f"chmod go-w {folder}, or another $XDG_CACHE_HOME that is this user's own.",
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(jar: Jar, folder: Path, conf: Mapping[str, str], say: Say) -> None:
    """Put a jar into ``folder`` from the first place that has it, verified, in one step."""
    failures = []
    for where, get in _places(jar, conf):
        say(f"fetching {jar.name} ({jar.size_bytes / 1e6:.0f} MB) from {where}")
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{jar.name}.")
        half = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as out:
                for piece in _told(get(), jar, where, say):
                    out.write(piece)
            if (found := _sha256(half)) == jar.sha256:
                half.replace(folder / jar.name)
                return
            failures.append(
                f"{where} has another file ({half.stat().st_size:,} bytes, SHA-256 {found}), which"
                " was thrown away"
            )
        except (OSError, HTTPException, ValueError) as error:
            failures.append(f"{where}: {first_line(error)}")
        finally:
            half.unlink(missing_ok=True)
        say(failures[-1])
    raise EnvironmentProblem(
        f"Spark's jar {jar.coordinates} ({jar.size_bytes:,} bytes, SHA-256 {jar.sha256}) can't be"
        f" had: {'; '.join(failures)}.",
        "Name a Maven repository that has it in spark.conf (spark.jars.repositories), or put it"
        f" there by hand: {folder / jar.name}.",
    )


def _told(pieces: Iterator[bytes], jar: Jar, where: str, say: Say) -> Iterator[bytes]:
    """Pass on the pieces, reporting progress now and then; more than the jar has is an error."""
    done, began = 0, time.monotonic()
    said = began
    for piece in pieces:
        done, now = done + len(piece), time.monotonic()
        if done > jar.size_bytes:
            raise ValueError(f"more than the {jar.size_bytes:,} bytes that {jar.name} has")
        if now - said >= _SAY_SECONDS or (done == jar.size_bytes and said > began):
            rate = done / (now - began)
            left = (jar.size_bytes - done) / rate
            say(
                f"{jar.name} from {where}: {done / 1e6:.0f} of {jar.size_bytes / 1e6:.0f} MB"
                f" ({100 * done // jar.size_bytes} %), {rate / 1e6:.1f} MB/s, {left:.0f} s left"
            )
            said = now
        yield piece


Places = Iterator[tuple[str, Callable[[], Iterator[bytes]]]]
"""The places where a jar may be: each one's name for messages, and its reader."""


def _places(jar: Jar, conf: Mapping[str, str]) -> Places:
    for path in _left_by_others(jar, conf):
        if path.exists():
            yield str(path), partial(_pieces, path)
    if "spark.jars.ivySettings" in conf:
        yield conf["spark.jars.ivySettings"], partial(_by_ivy, jar, conf)
        return
    central = os.environ.get("DEFAULT_ARTIFACT_REPOSITORY", "https://repo1.maven.org/maven2/")
    for repository in [*conf.get("spark.jars.repositories", "").split(","), central]:
        if url := repository.strip():
            parts = urlsplit(url)
            user, _, host = parts.netloc.rpartition("@")
            address = f"{parts._replace(netloc=host).geturl().rstrip('/')}/{jar.path}"
            yield address, partial(_download, address, user)


def _left_by_others(jar: Jar, conf: Mapping[str, str]) -> Iterator[Path]:
    """The jar in our default folder if ``spark.jars.ivy`` is set, and in Ivy's and Maven's."""
    own, home = conf.get("spark.jars.ivy"), _home()
    if own:
        with suppress(EnvironmentProblem):
            yield cache_folder() / jar.name
    by_default = [home / ".ivy2.5.2", home / ".ivy2"] if home else []
    for folder in [Path(own)] if own else by_default:
        yield folder / "jars" / f"{jar.group}_{jar.name}"
    if home:
        yield home / ".m2" / "repository" / jar.path


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece


def _download(address: str, user: str) -> Iterator[bytes]:
    request = Request(address, headers={"User-Agent": "cdc-assets"})  # noqa: S310 -- the user's
    if user:
        basic = base64.b64encode(unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {basic}")
    with urlopen(request, timeout=_STALL_SECONDS) as answer:  # noqa: S310
        while piece := answer.read(_PIECE_BYTES):
            yield piece


def _by_ivy(jar: Jar, conf: Mapping[str, str]) -> Iterator[bytes]:
    """Fetch by Spark's own Ivy and the user's settings of it, in a JVM that runs nothing else."""
    spark = find_spec("pyspark")
    assert spark is not None
    assert spark.origin is not None
    [ivy] = (Path(spark.origin).parent / "jars").glob("ivy-*.jar")
    with tempfile.TemporaryDirectory(prefix="cdc_assets-ivy-") as folder:
        own = conf.get("spark.jars.ivy", folder)
        done = subprocess.run(
            [
                java_command(os.environ) or "java",
                *shlex.split(conf.get("spark.driver.extraJavaOptions", "")),  # proxies, above all
                f"-Divy.default.ivy.user.dir={own}",
                *("-cp", str(ivy), "org.apache.ivy.Main", "-warn"),
                *("-settings", conf["spark.jars.ivySettings"], "-cache", f"{own}/cache"),
                *("-dependency", jar.group, jar.artifact, jar.version, "-notransitive"),
                *("-confs", "default", "-types", "jar", "bundle"),
                *("-retrieve", f"{folder}/[artifact]-[revision].[ext]"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        found = Path(folder) / jar.name
        if not found.exists():
            said = (done.stderr + done.stdout).strip() or f"Ivy ended with {done.returncode}"
            raise OSError("; ".join(line.strip() for line in said.splitlines()[-3:]))
        yield from _pieces(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch and verify the jars; 0, or 1 after one sentence on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m cdc_assets.lake.spark.jars", description=__doc__
    )
    parser.add_argument("--to", type=Path, help="another folder: of an image, or to be uploaded")
    options = parser.parse_args(arguments)
    try:
        provide((options.to or cache_folder()).absolute(), {}, _print)
    except EnvironmentProblem as problem:
        _print(str(problem))
        return 1
    return 0


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
