"""19.9 From data parallel to fully sharded: strategies, the one training loop, formulas and comparisons."""
