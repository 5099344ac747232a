"""A run that ends at an LSN has it staged as soon as it arrives, whenever the next flush is due."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cdc_assets.flusher.decoder_process.link import (
    Consumed,
    DecoderProcess,
    Flushed,
    Settings,
    Specs,
    send_frames,
)
from cdc_assets.log.staged.storage import Storage
from cdc_assets_tests.support import pgoutput_reference as ref

_HOUR_SECONDS = 3600.0


def test_what_somebody_waits_for_is_flushed_when_it_has_arrived(tmp_path: Path) -> None:
    settings = Settings(
        "src", "", "p", tmp_path.as_uri(), Storage(), 2**20, _HOUR_SECONDS, 0, until=1908
    )
    decoder = DecoderProcess(settings)

    def feed(at: int) -> None:
        frames = [
            ref.xlog(at - 800, ref.begin(at, 0, 7)),
            ref.xlog(at + 8, ref.commit(at, at + 8, 0)),
        ]
        lengths = np.array([*map(len, frames)], np.int32)
        send_frames(decoder.pipe, lengths, b"".join(frames))

    def reply() -> object:
        assert decoder.pipe.poll(60)
        return decoder.pipe.recv()

    try:
        decoder.pipe.send(Specs({}))
        for at in (900, 1900):
            feed(at)
            assert isinstance(reply(), Consumed)
        flushed = reply()
        assert isinstance(flushed, Flushed)
        assert flushed.position == 1908
    finally:
        decoder.kill()
        decoder.close()
