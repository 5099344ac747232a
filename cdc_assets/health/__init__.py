"""How a source is and was: samples, small plots, one report; values that the lake lost."""
