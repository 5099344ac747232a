"""Workers that merge: which tables each looks after, and whose turn it is."""
