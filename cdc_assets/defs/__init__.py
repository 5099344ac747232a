"""The sources: one folder with one ``defs.yaml`` each. There is no code here."""
