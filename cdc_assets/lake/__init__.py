"""An Iceberg table of the lake: definition, values, snapshots, and how commits are published."""
