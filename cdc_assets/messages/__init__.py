"""What may stand in a message: foreign errors without values, text fit for its place."""
