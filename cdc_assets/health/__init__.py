"""How a source is and was: samples over time, small plots, one report for a person."""
