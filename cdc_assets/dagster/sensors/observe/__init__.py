"""The sensors that tell of a source: alerts, its health, and its lineage."""
