"""The state of a source, which is its rows in the coordination schema, as a person moves it."""
