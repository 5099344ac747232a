"""OpenLineage events of copies and merges: what a lineage backend is told, after the fact.

Nothing that copies or merges waits for a backend: each table's state is compared with what was told
of it, and what happened since is told. A copy is a run; so are all merges between two looks. A run
is named after its table, epoch and offsets, so an event that is sent twice is of the same run.

The client (openlineage-python) is an extra: it is imported where it is used.
"""
