"""Promise 11: nothing runs that isn't what is listed: packages and jars are verified before.

Containers and images: ``test_promise_11_containers``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from cdc_assets.errors import EnvironmentProblem, SparkProblem
from cdc_assets.lake.spark import jars
from cdc_assets.lake.spark.jars import (
    JARS,
    PACKAGES,
    Jar,
    Provided,
    cache_folder,
    provide,
    provided,
)
from cdc_assets.lake.spark.properties import SparkServerSettings
from cdc_assets.lake.spark.server import SparkServer
from cdc_assets_tests.security.web import Answer, web

ROOT = Path(__file__).parents[2]
LOCKS = ("requirements.lock", "requirements-build.lock", "requirements-dev.lock")


def pins(lock: str) -> dict[tuple[str, str], set[str]]:
    """The hashes of each (name, version) of a lock file."""
    found: dict[tuple[str, str], set[str]] = {}
    pin = ("", "")
    for line in (ROOT / lock).read_text().splitlines():
        if name := re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", line):
            pin = (name[1], name[2])
            found[pin] = set()
        elif hashed := re.match(r"\s+--hash=sha256:([0-9a-f]{64})", line):
            found[pin].add(hashed[1])
        else:
            assert re.match(r"\s*#|$", line), line
    return found


# -- Python packages


def test_every_locked_package_has_hashes() -> None:
    for lock in LOCKS:
        assert len(pins(lock)) > 5, lock
        assert [pin for pin, hashes in pins(lock).items() if not hashes] == [], lock


def test_production_has_nothing_of_development() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    names = [
        re.split(r"[\[<>=~]", entry)[0]
        for group in groups.values()
        for entry in group
        if isinstance(entry, str)
    ]
    shared = {"websockets", "setuptools"}  # Dagster has them, too
    production = {name for name, _ in pins("requirements.lock")}
    assert production & (set(names) - shared) == set()
    assert "dagster-postgres" in production
    everything = pins("requirements-dev.lock")
    for lock in LOCKS[:2]:
        for pin, hashes in pins(lock).items():
            assert everything[pin] == hashes, pin


def test_whatever_installs_packages_verifies_them() -> None:
    makefile = (ROOT / "Makefile").read_text()
    variables = dict(re.findall(r"^(\w+) := (.*)$", makefile, re.MULTILINE))
    text = makefile + (ROOT / "infra" / "docker" / "Dockerfile").read_text()
    lines = re.sub(r"\s*\\\n\s*", " ", text).replace("&&", "\n")
    commands = re.findall(r"pip (?:install|sync) .*", lines)
    assert len(commands) == 7
    for command in commands:
        ran = command.replace("$(VERIFIED)", variables["VERIFIED"])
        if ".lock" in ran:
            assert "--require-hashes" in ran, ran
            assert "--only-binary :all:" in ran, ran
        else:  # what was built here
            assert "--no-deps" in ran, ran


def test_a_package_that_is_not_what_was_locked_is_not_installed(tmp_path: Path) -> None:
    wheel = tmp_path / "wheels" / "editables-0.6-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as out:
        out.writestr("editables.py", "planted = True")
        info = "editables-0.6.dist-info"
        out.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: editables\nVersion: 0.6\n")
        out.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        out.writestr(f"{info}/RECORD", "")
    block = re.search(
        r"^editables==(?:.*\\\n)*.*$",
        (ROOT / "requirements-build.lock").read_text(),
        re.MULTILINE,
    )
    assert block
    lock = tmp_path / "one.lock"
    lock.write_text(block[0].replace(block[0].split(" ")[0], "editables==0.6") + "\n")
    done = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "uv"), "pip", "install", "--no-cache"),
            *("--no-index", "--find-links", str(wheel.parent), "--require-hashes", "--no-deps"),
            *("--only-binary", ":all:", "--target", str(tmp_path / "to"), "-r", str(lock)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "hash" in done.stderr.lower(), done.stderr
    assert not (tmp_path / "to" / "editables.py").exists()


# -- Spark's jars


GOOD = b"what was published" * 1000
LIE = b"something else" * 1000
A_JAR = Jar("org.example", "driver", "1.0", len(GOOD), hashlib.sha256(GOOD).hexdigest())


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home in which no Ivy and no Maven ever was, and no repository anywhere."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("DEFAULT_ARTIFACT_REPOSITORY", "http://127.0.0.1:1")
    return cache_folder()


def serving(body: bytes) -> Answer:
    return lambda _: (200, {}, body)


def test_a_jar_is_fetched_once_and_verified_at_every_start(away: Path) -> None:
    said: list[str] = []
    with web(serving(GOOD)) as maven:
        conf = {"spark.jars.repositories": maven.url}
        [made] = provide(away, conf, said.append, [A_JAR])
        assert [asked.path for asked in maven.asked] == ["/org/example/driver/1.0/driver-1.0.jar"]
        assert any("fetching driver-1.0.jar" in line for line in said)
        made.write_bytes(LIE)
        provide(away, conf, said.append, [A_JAR])
        assert made.read_bytes() == GOOD
        assert any(f"{made} isn't org.example:driver:1.0" in line for line in said)
    assert provide(away, {}, said.append, [A_JAR]) == [made]  # nobody serves any more
    assert (away.stat().st_mode & 0o777, made.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize("lie", [LIE, GOOD + b"more", GOOD[:-1], b""])
def test_a_jar_that_is_not_what_was_published_is_named_and_thrown_away(
    away: Path, lie: bytes
) -> None:
    said: list[str] = []
    with web(serving(lie)) as maven, pytest.raises(EnvironmentProblem) as caught:
        provide(away, {"spark.jars.repositories": maven.url}, said.append, [A_JAR])
    assert "org.example:driver:1.0" in caught.value.what
    assert A_JAR.sha256 in caught.value.what
    assert maven.url in caught.value.what
    assert str(away / A_JAR.name) in caught.value.remedy
    assert list(away.iterdir()) == []


def test_a_mirror_comes_first_and_its_password_is_not_said(away: Path) -> None:
    said: list[str] = []
    with web(serving(GOOD)) as maven, web(serving(LIE)) as liar:
        mirror = maven.url.replace("//", "//me:plan%20ted@")
        repositories = {"spark.jars.repositories": f"{liar.url}/m2, {mirror}/m2/"}
        provide(away, repositories, said.append, [A_JAR])
        assert maven.asked[0].headers["Authorization"] == "Basic bWU6cGxhbiB0ZWQ="
        assert maven.asked[0].path.startswith("/m2/org/example/")
    assert "plan" not in " ".join(said).replace("planned", "")


def test_what_ivy_left_is_taken_if_it_is_right(away: Path) -> None:
    left = Path.home() / ".ivy2.5.2" / "jars" / "org.example_driver-1.0.jar"
    left.parent.mkdir(parents=True)
    left.write_bytes(GOOD)
    [made] = provide(away, {}, print, [A_JAR])
    assert made.read_bytes() == GOOD
    made.unlink()
    left.write_bytes(LIE)
    with pytest.raises(EnvironmentProblem, match=r"ivy2\.5\.2.* has another file"):
        provide(away, {}, print, [A_JAR])


def test_a_user_without_a_home_that_can_be_written_is_told_and_may_name_a_folder(
    away: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jars, "JARS", (A_JAR,))
    monkeypatch.setattr(jars, "PACKAGES", (A_JAR.coordinates,))
    ivy = {"spark.jars.ivy": str(tmp_path / "ivy")}
    for name, home in (("XDG_CACHE_HOME", "/proc/none"), ("HOME", "/proc/none")):
        with monkeypatch.context() as patched, web(serving(GOOD)) as maven:
            patched.delenv("XDG_CACHE_HOME")
            patched.setenv(name, home)
            conf = {"spark.jars.repositories": maven.url}
            with pytest.raises(EnvironmentProblem, match=r"kept in /proc/none.* spark\.jars\.ivy"):
                provided(conf, print)
            found = provided(conf | ivy, print).class_path
            assert found == str(tmp_path / "ivy" / "cdc_assets" / A_JAR.name)
    # What was fetched beforehand, to where it is kept by default, is found.
    shutil.rmtree(tmp_path / "ivy")
    away.mkdir(parents=True)
    (away / A_JAR.name).write_bytes(GOOD)
    assert provided(ivy, print).class_path.startswith(str(tmp_path / "ivy"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes a user whom nobody knows")
def test_a_user_whom_nobody_knows_is_told_so() -> None:
    code = (
        "import os; from cdc_assets.lake.spark.jars import main; os.setuid(64321); exit(main([]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "no home folder" in done.stderr) == (1, True), done.stderr


def test_a_folder_that_others_may_write_to_is_refused(away: Path) -> None:
    away.mkdir(parents=True)
    away.chmod(0o777)
    with pytest.raises(EnvironmentProblem, match="others may write"):
        provide(away, {}, print, [A_JAR])


@pytest.mark.parametrize("right", [True, False])
def test_ivy_fetches_by_the_users_settings_and_is_not_believed_either(
    right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = JARS[2]
    [real] = provide(cache_folder(), {}, print, [driver])
    maven = tmp_path / "m2" / driver.path
    maven.parent.mkdir(parents=True)
    shutil.copy(real, maven)
    if not right:
        with maven.open("ab") as file:
            file.write(b"planted")
    maven.with_suffix(".pom").write_text(
        "<project><modelVersion>4.0.0</modelVersion><groupId>org.postgresql</groupId>"
        f"<artifactId>postgresql</artifactId><version>{driver.version}</version></project>"
    )
    settings = tmp_path / "ivysettings.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="m"/><resolvers><ibiblio name="m"'
        f' m2compatible="true" root="{(tmp_path / "m2").as_uri()}/"/></resolvers></ivysettings>'
    )
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    conf = {"spark.jars.ivySettings": str(settings)}
    if right:
        [made] = provide(tmp_path / "jars", conf, print, [driver])
        assert made.read_bytes() == real.read_bytes()
    else:
        with pytest.raises(EnvironmentProblem, match="more than"):
            provide(tmp_path / "jars", conf, print, [driver])


def test_the_users_own_packages_and_jars_stay_theirs_and_that_is_said(
    away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jars, "JARS", (A_JAR,))
    monkeypatch.setattr(jars, "PACKAGES", (A_JAR.coordinates,))
    (Path.home() / ".m2" / "repository" / A_JAR.path).parent.mkdir(parents=True)
    (Path.home() / ".m2" / "repository" / A_JAR.path).write_bytes(GOOD)

    def found(conf: Mapping[str, str], folder: Path = away) -> tuple[Provided, str]:
        said: list[str] = []
        return provided(conf, said.append, folder), " ".join(said)

    ours = away / A_JAR.name
    assert found({})[0] == Provided(str(ours), {"spark.jars": "", "spark.jars.packages": ""})
    both = f"{A_JAR.coordinates},com.example:theirs:2"
    named, said = found({"spark.jars.packages": both, "spark.jars": "/mine.jar"})
    # Where ours can load them: classes of the class path don't see those of spark.jars.
    together = f"{ours.as_uri()},/mine.jar"
    assert named == Provided(
        "", {"spark.jars": together, "spark.jars.packages": "com.example:theirs:2"}
    )
    assert "not verified, as spark.conf names them: com.example:theirs:2, /mine.jar" in said
    assert found({"spark.jars.packages": ""})[0].class_path == ""
    # A folder whose name a class path would take for two.
    apart = found({}, away / "a:b")[0]
    assert apart.class_path == ""
    assert apart.settings["spark.jars"] == (away / "a:b" / A_JAR.name).as_uri()


def test_no_jvm_starts_when_a_jar_is_not_what_was_published(
    away: Path, tmp_path: Path, tmp_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "java_home" / "bin" / "java"
    java.parent.mkdir(parents=True)
    started = tmp_path / "started"
    real = shutil.which("java")
    java.write_text(f'#!/bin/sh\n[ "$*" = -version ] || touch "{started}"\nexec "{real}" "$@"\n')
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(java.parents[1]))
    server = SparkServer(SparkServerSettings(), tmp_home)
    with web(serving(LIE)) as maven:
        monkeypatch.setenv("DEFAULT_ARTIFACT_REPOSITORY", maven.url)
        with pytest.raises(SparkProblem, match="ended with 1"):
            server.ensure(60)
        server.stop()
    log = server.log_path.read_text()
    assert f"Spark's jar {PACKAGES[0]}" in log
    assert "was thrown away" in log
    assert not started.exists()


# -- audit and bill of materials


def script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / ".ci" / name), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_audit_asks_for_every_package_and_jar() -> None:
    def osv(asked: object) -> tuple[int, dict[str, str], bytes]:
        queries = json.loads(asked.body)["queries"]  # type: ignore[attr-defined]
        bad = [query["package"]["name"] == "org.postgresql:postgresql" for query in queries]
        results = [{"vulns": [{"id": "GHSA-planted"}]} if one else {} for one in bad]
        return 200, {}, json.dumps({"results": results}).encode()

    with web(osv) as database:
        done = script("audit", OSV_URL=database.url, PYTHONPATH=str(ROOT))
    asked = {
        (query["package"]["ecosystem"], query["package"]["name"], query["version"])
        for request in database.asked
        for query in json.loads(request.body)["queries"]
    }
    wanted = {("PyPI", *pin) for lock in LOCKS for pin in pins(lock)}
    wanted |= {("Maven", f"{jar.group}:{jar.artifact}", jar.version) for jar in JARS}
    assert asked == wanted
    assert done.returncode == 1
    assert "GHSA-planted" in done.stdout


def test_a_database_of_vulnerabilities_that_answers_nonsense_audits_nothing() -> None:
    for body in (b"<html>", b"{}", b'{"results": []}'):
        with web(serving(body)) as database:
            done = script("audit", OSV_URL=database.url, AUDIT_REQUIRED="1", PYTHONPATH=str(ROOT))
        assert done.returncode == 1
        assert "NOT AUDITED" in done.stderr


def test_the_bill_of_materials_has_all_of_production_with_hashes(tmp_path: Path) -> None:
    done = script("sbom", str(tmp_path / "sbom.json"), PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    bill = json.loads((tmp_path / "sbom.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    found = {
        (one["name"], one["version"]): {hashed["content"] for hashed in one["hashes"]}
        for one in bill["components"]
    }
    wanted = pins("requirements.lock")
    wanted |= {(jar.artifact, jar.version): {jar.sha256} for jar in JARS}
    assert found == wanted
