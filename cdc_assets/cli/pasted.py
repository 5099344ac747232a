"""Text for a terminal: literal, its commands ready to be pasted into the shell that ran ours."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from cdc_assets.messages.texts import plain

_COMMAND = re.compile(r"\bcdc-assets(?: --config FILE)?(?= [a-z])")


@dataclass
class _Own:
    """How a person calls this command line: what messages tell is run the same way."""

    prefix: str | None = None
    names: frozenset[str] = frozenset()

    def put(self, found: re.Match[str]) -> str:
        following = found.string[found.end() + 1 :].split(maxsplit=1)[0].strip(".,;:`'")
        return self.prefix if self.prefix and following in self.names else found[0]


_own = _Own()


def called_by(config: str | None, names: Iterable[str]) -> None:
    """Have the commands ``names`` in messages begin as ours does, which was given ``config``."""
    _own.prefix = f"cdc-assets --config {shlex.quote(config)}" if config else "cdc-assets"
    _own.names = frozenset(names)


def told(text: str) -> str:
    """``text`` as a terminal shows it: literally, with commands that run where this one did."""
    return _COMMAND.sub(_own.put, plain(text))
