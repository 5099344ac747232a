"""The Iceberg catalog: how Spark and pyiceberg open it, and which places it is believed."""
