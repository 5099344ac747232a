"""A commit of a table that a REST catalog's server is asked for (``lake.catalog.commits``).

The server writes the metadata: it is told what differs between the former metadata and the new.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any

from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import SNAPSHOT_LOADING_MODE
from pyiceberg.exceptions import BadRequestError, CommitFailedException, RESTError
from pyiceberg.table import CommitTableRequest, Table
from pyiceberg.typedef import Identifier
from requests.exceptions import RequestException

from cdc_assets.errors import first_line
from cdc_assets.lake.catalog.commits import Metadata, Unknown
from cdc_assets.lake.catalog.rest_client import TimedRest

logger = logging.getLogger(__name__)

_Refs = Mapping[str, Metadata]

# Settings by which a server opens files that the client's own keys may not: its keys, or its
# signature. In S3, Google's and Azure's store, and those of others. Where a signer is means
# nothing without the word that it signs; ``oauth2-server-uri`` is about the catalog.
_LENT = re.compile(
    r"access-key|(session|security|sas)-token|(adls|hf)\.token|gcs\.oauth2|account[.-]key"
    r"|connection-string|client-secret|credentials|remote-signing-enabled|s3\.signer$"
)
# The server didn't do it now. It may have before, when its answer was lost. It may never do such a
# thing (405, 406, 422, 501), which Spark's commits of a branch then have to do without.
_REFUSED = (CommitFailedException, BadRequestError, NotImplementedError)
# Nobody knows whether it is done. A ValueError is an answer that isn't understood.
_UNKNOWN = (RESTError, RequestException, ValueError)


def rest_entries(catalog: Catalog, loaded: Table) -> RestEntries | None:
    """The entries of a REST catalog, for a table; None if its server alone opens its files."""
    if not isinstance(catalog, TimedRest) or lends(loaded, catalog.given):
        return None
    return RestEntries(catalog)


def lends(table: Table, own: Mapping[str, Any]) -> bool:
    """Whether the server opens a table's files for its clients: by what it said at any time.

    ``own``: what the configuration says, which is all that Spark's catalog of drafts has.
    """
    told = {**table.io.properties, **table.config}
    return any(
        _LENT.search(key) and value not in {own.get(key), "false"} for key, value in told.items()
    )


class RestEntries:
    """What a REST catalog says of its tables. Raises what pyiceberg does where it fails."""

    def __init__(self, catalog: TimedRest) -> None:
        self._catalog = catalog
        # The same, with its session and its token, but for what it asks of a table: a history of
        # 1,500 snapshots is 1.6 MB and 50 ms of Python.
        self._brief = copy(catalog)
        self._brief.properties = {**catalog.properties, SNAPSHOT_LOADING_MODE: "refs"}

    def led_to(self, table: Identifier) -> str:
        """The place of a table's metadata. Raises NoSuchTableError."""
        return str(self._brief.load_table(table).metadata_location)

    def commit(self, loaded: Table, former: Metadata, new: Metadata) -> bool:
        """Have the table changed from ``former`` metadata to ``new``; False if that was refused.

        Of the metadata only snapshots and refs may differ, and what follows from them. Raises
        Unknown.
        """
        moved = list(_requirements(former["refs"], new["refs"]))
        asked = CommitTableRequest.model_validate(
            {
                "identifier": {"namespace": loaded.name()[:-1], "name": loaded.name()[-1]},
                "requirements": [
                    {"type": "assert-table-uuid", "uuid": former["table-uuid"]},
                    *moved,
                ],
                "updates": [
                    *_added(former["snapshots"], new["snapshots"]),
                    *_moved(former["refs"], new["refs"]),
                ],
            }
        )
        try:
            done = self._catalog.commit_table(loaded, asked.requirements, asked.updates)
        except (*_REFUSED, *_UNKNOWN) as error:
            # RESTError itself is a 4xx that pyiceberg has no other name for.
            if not isinstance(error, _REFUSED) and type(error) is not RESTError:
                raise _unknown(loaded, first_line(error)) from error
            logger.info("%s: %s", ".".join(loaded.name()), first_line(error))
            return False
        for was in moved:
            ref = done.metadata.refs.get(was["ref"])
            if (ref.snapshot_id if ref is not None else None) == was["snapshot-id"]:
                raise _unknown(loaded, f"by its answer {was['ref']} is where it was")
        return True


def _unknown(loaded: Table, why: str) -> Unknown:
    return Unknown(
        f"the REST catalog doesn't confirm that it changed {'.'.join(loaded.name())}: {why}",
        "See to its server. Whether it did is looked at before the table is changed again.",
    )


def _requirements(former: _Refs, new: _Refs) -> Iterator[Metadata]:
    """That the refs which are moved are where they were."""
    for name in new:
        if new[name] != former.get(name):
            at = former.get(name, {}).get("snapshot-id")
            yield {"type": "assert-ref-snapshot-id", "ref": name, "snapshot-id": at}


def _added(former: Iterable[Metadata], new: Iterable[Metadata]) -> Iterator[Metadata]:
    known = {snapshot["snapshot-id"] for snapshot in former}
    for snapshot in new:
        if snapshot["snapshot-id"] not in known:
            yield {"action": "add-snapshot", "snapshot": snapshot}


def _moved(former: _Refs, new: _Refs) -> Iterator[Metadata]:
    for name, ref in new.items():
        if ref != former.get(name):
            yield {"action": "set-snapshot-ref", "ref-name": name, **ref}
    for name in former:
        if name not in new:
            yield {"action": "remove-snapshot-ref", "ref-name": name}
