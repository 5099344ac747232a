"""What all runs of ours do: they end with their owner, and report an error as one sentence.

A person who opens a failed run reads its error first. So the error names the problem and the way
out, without any stack trace; that of a foreign error is in the file that the sentence names, and
that of the work itself was never the reader's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import isgeneratorfunction
from typing import Any, TypeVar

import dagster as dg

from cdc_assets.config.source import SourceConfig
from cdc_assets.dagster.resources.owner import end_with_owner
from cdc_assets.readiness.foreign_errors import explained

Work = TypeVar("Work", bound=Callable[..., Any])


@contextmanager
def reported(config: SourceConfig) -> Iterator[None]:
    """Raise any error of the block as a Failure that says what is wrong."""
    try:
        yield
    except (dg.Failure, dg.DagsterError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, a person gets a sentence
        raise dg.Failure(str(explained(error, config))) from None


def run_of(config: SourceConfig) -> Callable[[Work], Work]:
    """Decorates the function of an asset, a check or an op of this source."""

    def decorate(work: Work) -> Work:
        @wraps(work)
        def once(*arguments: Any, **named: Any) -> Any:
            end_with_owner()
            with reported(config):
                return work(*arguments, **named)

        @wraps(work)
        def results(*arguments: Any, **named: Any) -> Iterator[Any]:
            end_with_owner()
            with reported(config):
                yield from work(*arguments, **named)

        return results if isgeneratorfunction(work) else once  # type: ignore[return-value]

    return decorate
