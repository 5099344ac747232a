"""Sensors: each tick looks at what is, asks for what is missing, and says what it saw."""
