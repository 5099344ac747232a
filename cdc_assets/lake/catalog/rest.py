"""A commit of a table that a REST catalog's server is asked for (``lake.catalog.commits``).

The server writes the metadata: it is told what differs between the former metadata and the new.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping

from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import BadRequestError, CommitFailedException, RESTError
from pyiceberg.table import CommitTableRequest, Table
from pyiceberg.typedef import Identifier
from requests.exceptions import RequestException

from cdc_assets.errors import first_line
from cdc_assets.lake.catalog.commits import Metadata, Unknown

logger = logging.getLogger(__name__)

_Refs = Mapping[str, Metadata]

# Settings by which a server opens files that the client's own keys may not: its keys, or its
# signature. In S3, Google's and Azure's store.
_LENT = re.compile(
    r"access-key|session-token|remote-signing-enabled|signer|credentials|oauth2|sas-token"
    r"|account-key"
)
# The server didn't do it now. It may have before, when its answer was lost.
_REFUSED = (CommitFailedException, BadRequestError)
# Nobody knows whether it is done.
_UNKNOWN = (RESTError, RequestException)


def rest_entries(catalog: Catalog, loaded: Table) -> RestEntries | None:
    """The entries of a REST catalog, for a table; None if its server alone opens its files."""
    return RestEntries(catalog) if isinstance(catalog, RestCatalog) and not lends(loaded) else None


def lends(table: Table) -> bool:
    """Whether the server opens a table's files for its clients."""
    own = table.catalog.properties
    given = {**table.io.properties, **table.config}
    return any(
        _LENT.search(key) and value not in {own.get(key), "false"} for key, value in given.items()
    )


class RestEntries:
    """What a REST catalog says of its tables. Raises what pyiceberg does where it fails."""

    def __init__(self, catalog: RestCatalog) -> None:
        self._catalog = catalog

    def led_to(self, table: Identifier) -> str:
        """The place of a table's metadata. Raises NoSuchTableError."""
        return str(self._catalog.load_table(table).metadata_location)

    def commit(self, loaded: Table, former: Metadata, new: Metadata) -> bool:
        """Have the table changed from ``former`` metadata to ``new``; False if that was refused.

        Of the metadata only snapshots and refs may differ, and what follows from them. Raises
        Unknown.
        """
        asked = CommitTableRequest.model_validate(
            {
                "identifier": {"namespace": loaded.name()[:-1], "name": loaded.name()[-1]},
                "requirements": [
                    {"type": "assert-table-uuid", "uuid": former["table-uuid"]},
                    *_requirements(former["refs"], new["refs"]),
                ],
                "updates": [
                    *_added(former["snapshots"], new["snapshots"]),
                    *_moved(former["refs"], new["refs"]),
                ],
            }
        )
        try:
            self._catalog.commit_table(loaded, asked.requirements, asked.updates)
        except _REFUSED as error:
            logger.info("%s: %s", ".".join(loaded.name()), first_line(error))
            return False
        except _UNKNOWN as error:
            raise Unknown(
                f"the REST catalog doesn't say whether it changed {'.'.join(loaded.name())}:"
                f" {first_line(error)}",
                "See to its server. Whether it did is looked at before the table is changed again.",
            ) from error
        return True


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
