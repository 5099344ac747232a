"""What the decoder process writes to its log, and how much."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cdc_assets.errors import ConfigurationError
from cdc_assets.flusher.decode.decoder import Decoder
from cdc_assets.flusher.decode.specs import DecodeSpec
from cdc_assets.flusher.decoder_process.link import (
    DecoderProcess,
    Finish,
    Settings,
    Specs,
    send_frames,
)
from cdc_assets.flusher.flusher import main
from cdc_assets.log.staged.storage import Storage
from cdc_assets.postgres.names import TableId
from cdc_assets_tests.support import pgoutput_reference as ref

# What a terminal obeys, and what looks like a line of ours.
NAME = "v\x1b[31m\u202e\n2026-01-01 ERROR cdc_assets: it ended"


def _settings(folder: Path) -> Settings:
    return Settings("src", "", "p", folder.as_uri(), Storage(), 2**20, 0.0, 0)


@pytest.mark.parametrize("level", ["INFO", "debug"])
def test_a_name_is_one_line_of_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], level: str
) -> None:
    monkeypatch.setenv("CDC_ASSETS_LOG_LEVEL", level)
    told = ref.relation(7, ["id"], ["id"], name=NAME)
    frames = [
        ref.xlog(100, ref.begin(900, 0, 7)),
        ref.xlog(0, told),
        ref.xlog(0, ref.insert(7, ["1"])),
        ref.xlog(908, ref.commit(900, 908, 0)),
    ]
    decoder = DecoderProcess(_settings(tmp_path))
    try:
        decoder.pipe.send(Specs({}))
        lengths = np.array([*map(len, frames)], np.int32)
        send_frames(decoder.pipe, lengths, b"".join(frames))
        decoder.pipe.send(Finish())
        assert decoder.wait(60) == 0
    finally:
        decoder.kill()
        decoder.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert "\\x1b[31m" in line and line.endswith("are skipped: it is not followed")
    assert line.isprintable()


def test_a_relation_is_skipped_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    """A partition of a followed table has a Relation message too, but no changes: its root has."""
    decoder = Decoder({7: DecodeSpec(TableId("public", "root"), ("id",), frozenset())}.get)

    def feed(at: int, *messages: bytes) -> list[str]:
        frames = [
            ref.xlog(at - 50, ref.begin(at, 0, at)),
            *(ref.xlog(0, message) for message in messages),
            ref.xlog(at + 8, ref.commit(at, at + 8, 0)),
        ]
        caplog.clear()
        decoder.feed(b"".join(frames), np.array([*map(len, frames)], np.int32))
        return caplog.messages

    root, leaf = (
        ref.relation(oid, ["id"], ["id"], name=n) for oid, n in ((7, "root"), (8, "leaf"))
    )
    with caplog.at_level("INFO"):
        assert feed(100, leaf, root, ref.insert(7, ["1"])) == []
        said = ["changes of public.leaf are skipped: it is not followed"]
        assert feed(200, ref.insert(7, ["2"]), ref.insert(8, ["2"])) == said
        assert feed(300, ref.insert(8, ["3"])) == []


def test_a_level_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CDC_ASSETS_LOG_LEVEL", "loud")
    with pytest.raises(ConfigurationError, match="CDC_ASSETS_LOG_LEVEL is loud"):
        DecoderProcess(_settings(tmp_path))
    (tmp_path / "source.yaml").touch()
    assert main(["--config", str(tmp_path / "source.yaml")]) == 2
    assert "CDC_ASSETS_LOG_LEVEL is loud" in caplog.text
