"""The bytes of a replication connection, and the frames in them."""
