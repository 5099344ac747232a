"""The chunks of a copy: how far each is, and who has claimed it."""
