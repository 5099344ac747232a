"""Keeping lake tables and the log healthy: compaction, expiry, and removal of what nobody needs.

Nothing here changes what a reader sees. What is removed is unreferenced first and deleted then, so
that a run that dies at any point leaves files too many, never a file too few; the next run goes on.
When it runs is decided elsewhere: a schedule, or ``cdc-assets maintain``.
"""
