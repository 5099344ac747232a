"""Reading a configuration: the file's text, and sentences about what is wrong in it."""
