"""The command ``cdc-assets``, which a person may interrupt from its first moment on.

What it needs takes a second or two to be imported. Until then Ctrl-C ends it as it ends a program
that knows nothing of signals: at once, and without a trace of Python's.
"""

from __future__ import annotations

import io
import signal
import sys


def main() -> None:
    """The entry point of ``cdc-assets``, and of ``python -m cdc_assets``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name may be in no encoding of the terminal's
            stream.reconfigure(errors="backslashreplace")
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else whoever started it wants it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cdc_assets.cli.main import main as begin

    signal.signal(signal.SIGINT, before)
    begin()


if __name__ == "__main__":
    main()
