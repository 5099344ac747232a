"""Which rows of a table are read at the source: those that the publication's row filter has."""

from __future__ import annotations

from cdc_assets.config.source import SourceConfig
from cdc_assets.errors import TableProblem
from cdc_assets.log.table_row import TableRow
from cdc_assets.messages.texts import copy_anew
from cdc_assets.postgres.publication.contents import publication_of, row_filters
from cdc_assets.postgres.session.connect import Connection


def row_filter(source: Connection, config: SourceConfig, row: TableRow) -> str | None:
    """The table's filter in SQL, with the names that its columns have now; None: all rows.

    It is the publication's, or of a table that is only copied the configuration's, and never the
    log's: whoever writes there could have our statements read other tables. Raises TableProblem
    unless the publication has a filter just if the configuration has one.
    """
    wanted = config.row_filters.get(row.table)
    if not config.publishes:
        return wanted
    publication = publication_of(config.publication, inserts_only=row.inserts_only)
    found = row_filters(source, publication, [row.oid]).get(row.oid)
    if (found is None) != (wanted is None):
        raise TableProblem(
            row.table,
            f"the publication {publication} has {'a' if found else 'no'} row filter for it, and"
            f" the configuration {'none' if found else 'one'} (where)",
            copy_anew(row.table),
        )
    return found
