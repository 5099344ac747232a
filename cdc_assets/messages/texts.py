"""Makes foreign text fit for where it is shown: names, comments, errors may hold anything.

One function a place: :func:`plain` and :func:`one_line` for terminals, logs and messages,
:func:`markdown` for what Dagster's UI renders, :func:`header` for a mail's or a topic's subject;
and :func:`bounded` for all that has a limit.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from difflib import get_close_matches

# Control characters but newline and tab; characters that turn the direction of writing; line ends
# other than newlines; lone surrogates, which nothing can encode.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_UNSHOWN = re.compile(rf"{_CONTROL.pattern}|[\n\t]")
# Characters that have a meaning in CommonMark and its tables anywhere in a line.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|!~&])")
# Places where text becomes a link without any mark: an invisible character takes it apart.
_LINK = re.compile(r"(?<=:)(?=//)|(?<=[Ww]{3})(?=\.)|(?<=@)(?=\w)")
_APART = "\u200b"
# SNS takes fewer than 100 characters, and a mail's subject reads no better when it is longer.
_SUBJECT = 99
# Limits of a check's description, of a Markdown report, and of comments in an asset's metadata: as
# much as a person reads. Each is an event in Dagster's storage for ever.
DESCRIPTION, REPORT, TABLE_COMMENT, COLUMN_COMMENT = 4_000, 100_000, 1_000, 300

_ALIKE = 0.75  # of two words, one of which may be the other misspelt


def bounded(text: str, most: int) -> str:
    """At most ``most`` characters, with an ellipsis where something was cut off."""
    return text if len(text) <= most else text[: most - 1] + "…"


def plain(text: str) -> str:
    """``text`` with Python's escapes for characters that a terminal obeys or no encoding has."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """:func:`plain`, with each stretch of white space as one blank."""
    return plain(" ".join(text.split()))


def named(name: str) -> str:
    """A column's name or the like in a sentence: in quotes, unless it is a plain word."""
    return plain(name) if name.isidentifier() else json.dumps(one_line(name), ensure_ascii=False)


def listed(names: Iterable[str]) -> str:
    """Such names in a row."""
    return ", ".join(map(named, names))


def meant(written: str, known: Iterable[str]) -> str | None:
    """The known name that ``written`` is most like, if it is like one: it may be misspelt."""
    spelt = {name.lower(): name for name in known}
    found = get_close_matches(written.lower(), spelt, 1, _ALIKE)
    return spelt[found[0]] if found else None


def counted(number: int, what: str, verb: str = "") -> str:
    """``2 keys``, ``1 key``; with ``verb`` in its plural: ``2 keys differ``, ``1 key differs``."""
    if number == 1:
        return f"1 {what}{f' {verb}s' if verb else ''}"
    return f"{number:,} {what}s{f' {verb}' if verb else ''}"


def command(*words: object) -> str:
    """``cdc-assets`` with these words, to be pasted into a shell: quoted where it needs quotes.

    Nothing follows it in its sentence that a shell would take for a part of it.
    """
    return " ".join(("cdc-assets", *map(_word, words)))


def _word(word: object) -> str:
    """One that can't be shown as it is in the quotes that bash, ksh and zsh have for that."""
    text = str(word)
    if not _UNSHOWN.search(text):
        return shlex.quote(text)
    escaped = re.sub(r"([\\'])", r"\\\1", text)
    return "$'" + _UNSHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", escaped) + "'"


def copy_anew(table: object) -> str:
    """The way out for a table that can't go on: what to run. It ends the message."""
    return f"Copy it anew: {command('resync', table)}"


def markdown(text: str) -> str:
    """``text`` as one line of Markdown that shows it as it is: no markup, image or link."""
    return _SPECIAL.sub(r"\\\1", _LINK.sub(_APART, one_line(text)))


def of_markdown(text: str) -> str:
    """The text that :func:`markdown` was given, in one line."""
    return re.sub(r"\\([\\`*_{}\[\]<>#|!~&])", r"\1", text).replace(_APART, "")


def header(text: str, end: str = "") -> str:
    """``text`` as a subject: one short line that always ends with ``end``."""
    return bounded(one_line(text), _SUBJECT - len(end)) + end


def described(text: str) -> str:
    """``text`` as the description of a check or an asset, which Dagster's UI takes for Markdown."""
    return markdown(bounded(text, DESCRIPTION))
