"""The earlier name of a module that deployments name in their Spark settings."""
