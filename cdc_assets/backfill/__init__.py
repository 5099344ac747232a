"""Backfills: reading rows of a table that streams once more, all or some, while it goes on.

The rule, for which neither the stream nor the merges stop. A reader takes a *horizon* first
(``horizons``): an LSN h such that whatever committed below h is visible to every later snapshot.
Then it reads rows in one short transaction (``reader``), and after that takes an LSN r, so that
whatever it saw had committed below r. Under the table's writer lock the log is applied up to r at
least. Let K be the keys of all changes in the log that committed at h or later and are applied by
then. The rows of K are left to the stream; the lake gets every other row as it was read
(``apply``), in a commit that leaves the cursor where it is.

It is right for each key k. What the reader didn't see of k committed at h or later; what it saw
committed below r and is applied. So if k isn't in K, no change of k is applied that the reader
didn't see, and none that it saw is missing: the row is what the lake should have. If k is in K, the
lake's row is the stream's, and at least as new as the row that was read; but what an update left
out (unchanged TOAST) it has from the row that was there, so rows with such changes are read once
more, by key. Changes that aren't applied yet come later, as ever. Nothing is said of the order of
rows, pages or readers, so there may be any number of these. A row that some earlier snapshot of the
lake has as it was read isn't written (``equal``).

In query mode the log is of polls, and has rows with LSNs of after they were read: there the present
LSN is such an h at once (``horizons``). A key that a lookup at h doesn't find is gone, even if a
poll before h found it.

The low watermark alone, as published descriptions have it, isn't a horizon: a transaction is in the
WAL before it is visible (``postgres.horizon``), and its row that was read would win over it.
"""
