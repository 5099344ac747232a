"""Chromium without a window, driven by its DevTools protocol: open, wait for words, click, shoot.

Debian's package is all that is needed, and `websockets`, which Dagster's web server has anyway.
https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

_START_SECONDS = 60.0
_COMMAND_SECONDS = 60.0
_LOOK_SECONDS = 0.5
# What a person needs to read a picture at full width in a README.
_SIZE = (1680, 1050)


def chromium() -> str | None:
    """Where it is, None if it isn't installed (Debian's package is called chromium)."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """The browser's one tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result; events that come meanwhile are nobody's business."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=_COMMAND_SECONDS))
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    @property
    def text(self) -> str:
        """What a person can read, without the layout; empty while a page is loading."""
        return str(self.run("document.body ? document.body.innerText : ''"))

    def shows(self, *words: str, seconds: float = 60.0) -> str:
        """Wait until all of ``words`` can be read, and return the whole text."""
        deadline = time.monotonic() + seconds
        while True:
            text = self.text
            missing = [word for word in words if word not in text]
            if not missing:
                return text
            assert time.monotonic() < deadline, f"{missing} never came; it shows: {text}"
            time.sleep(_LOOK_SECONDS)

    def click(self, words: str) -> None:
        """Click the innermost element with just this text."""
        found = self.run(
            "(() => { const all = [...document.querySelectorAll('a, button, div, span')]"
            f".filter((e) => e.innerText && e.innerText.trim() === {json.dumps(words)});"
            " const e = all[all.length - 1]; if (e) e.click(); return Boolean(e); })()"
        )
        assert found, f"nothing to click says {words!r}; it shows: {self.text}"

    def press(self, code: str, *, alt: bool = False) -> None:
        """Press a key: ``KeyE``, as KeyboardEvent.code has it."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                code=code,
                key=code[-1].lower(),
                windowsVirtualKeyCode=ord(code[-1]),
                modifiers=1 if alt else 0,
            )

    @contextmanager
    def high(self, pixels: int) -> Iterator[None]:
        """For what is opened in the block, the page is so high."""
        size = {"width": _SIZE[0], "height": pixels}
        self.call("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)
        yield
        self.call("Emulation.clearDeviceMetricsOverride")

    def wait(self, seconds: float) -> None:
        """While the page does what it does."""
        self.run(f"new Promise((done) => setTimeout(done, {1000 * seconds}))")

    def shoot(self, target: Path) -> None:
        """Write what is seen as a PNG."""
        target.parent.mkdir(parents=True, exist_ok=True)
        data = self.call("Page.captureScreenshot", format="png")["data"]
        target.write_bytes(base64.b64decode(data))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start it with a profile of its own below ``folder``; it is gone afterwards."""
    program = chromium()
    assert program is not None, "apt-get install chromium"
    profile = folder / "browser"
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
                *("--no-first-run", "--disable-background-networking"),
                *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
                f"--window-size={_SIZE[0]},{_SIZE[1]}",
                f"--user-data-dir={profile}",
                "--remote-debugging-port=0",
                "about:blank",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        address = _page_address(profile, process)
        with connect(address, max_size=None, proxy=None, open_timeout=_START_SECONDS) as socket:
            yield Page(socket)
            socket.send(json.dumps({"id": 0, "method": "Browser.close"}))
        with suppress(subprocess.TimeoutExpired):
            process.wait(_START_SECONDS)
    finally:
        process.kill()
        process.wait()


def _page_address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + _START_SECONDS
    told = profile / "DevToolsActivePort"
    while time.monotonic() < deadline:
        assert process.poll() is None, f"chromium ended; see {profile.parent / 'browser.log'}"
        with suppress(FileNotFoundError, IndexError, OSError):
            port = told.read_text().splitlines()[0]
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"http://127.0.0.1:{port}/json/list", timeout=10) as answer:
                pages = [p for p in json.load(answer) if p["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(_LOOK_SECONDS)
    raise AssertionError("chromium didn't open its port for a minute")
