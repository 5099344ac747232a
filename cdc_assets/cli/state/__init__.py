"""The commands about the coordination schema."""
