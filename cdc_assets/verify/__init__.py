"""Comparing every row of source and lake at one LSN."""
