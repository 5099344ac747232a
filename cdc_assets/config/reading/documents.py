"""A file of YAML (JSON is YAML) as a value, of which nothing is lost on the way.

YAML itself takes a key that stands twice in a mapping, and the last one wins: tables of the first
one would be out of the configuration without a word. So it is refused here, like a list or mapping
that has an alias to itself in it, which nothing can be made of. A merge key (``<<``) may stand
twice, and what it brings may be overridden: that is its purpose.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cdc_assets.errors import ConfigurationError

_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """The safe loader, for documents in which each key stands once."""

    def construct_document(self, node: yaml.Node) -> Any:
        _refuse(node, str(self.name))
        return super().construct_document(node)


def value_of(path: Path) -> Any:
    """What stands in a file of one document; raises ConfigurationError."""
    try:
        with path.open(encoding="utf-8") as file:
            # An error of a string, unlike a file's, would quote the line with its secret.
            return yaml.load(file, Loader=_Loader)  # noqa: S506 - it is a safe loader
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigurationError(
            f"can't read the configuration {path}: {why}.", "Check --config."
        ) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise ConfigurationError(f"{path} is not YAML: {error}") from error
    except RecursionError:
        raise ConfigurationError(
            f"{path} is nested too deeply.", "Look for brackets that aren't closed."
        ) from None


def refuse_doubles(path: Path) -> None:
    """Raise ConfigurationError if a key stands twice in a file that somebody else has read.

    It may have several documents, and needn't be there: a component may be made in Python, too.
    """
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            for document in yaml.compose_all(file, Loader=yaml.SafeLoader):
                _refuse(document, str(path))


def _refuse(document: yaml.Node, origin: str) -> None:
    within, done = set[int](), set[int]()

    def look(node: yaml.Node, place: str) -> None:
        if id(node) in within:
            raise ConfigurationError(
                f"{origin}: {place} is an alias to what it stands in, of line"
                f" {node.start_mark.line + 1}.",
                "Write out what is meant.",
            )
        if id(node) in done or not isinstance(node, yaml.CollectionNode):
            return
        done.add(id(node))
        within.add(id(node))
        if isinstance(node, yaml.MappingNode):
            _refuse_keys(node, origin, place)
            for key, part in node.value:
                look(part, f"{place}.{key.value}" if place else str(key.value))
        else:
            for number, part in enumerate(node.value, 1):
                look(part, f"{place}[entry {number}]")
        within.remove(id(node))

    look(document, "")


def _refuse_keys(mapping: yaml.MappingNode, origin: str, place: str) -> None:
    lines = dict[tuple[str, str], int]()
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
            continue
        spelt, line = (key.tag, key.value), key.start_mark.line + 1
        if spelt in lines:
            named = f"{place}.{key.value}" if place else key.value
            raise ConfigurationError(
                f"{origin}: {named} stands twice, in lines {lines[spelt]} and {line}.",
                "Keep one of them, with all that is meant.",
            )
        lines[spelt] = line
