"""The tables of the source by whose rows people ask for something: signals and markers."""
