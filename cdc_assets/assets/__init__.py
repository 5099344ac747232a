"""The earlier name of a module that users import."""
