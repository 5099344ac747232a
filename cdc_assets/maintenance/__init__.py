"""Keeping lake tables and the log healthy: compaction, expiry, and removal of what nobody needs.

Nothing here changes what a reader sees. A file loses its reference before it is deleted, so a run
that dies at any point leaves surplus files, never a missing one; the next run goes on. A schedule,
or ``cdc-assets maintain``, decides when it runs.
"""
