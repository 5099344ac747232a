"""Rows by COPY in binary, read past libpq and by columns: from a session's bytes to Arrow."""
