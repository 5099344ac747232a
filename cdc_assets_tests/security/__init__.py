"""The promises of ``docs/security.md``: a file or two each."""
