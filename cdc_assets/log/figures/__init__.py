"""Figures of a source's work that outlive the processes which did it."""
