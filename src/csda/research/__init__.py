"""Grids of runs and their tables, the paper's figures, and benchmarks; the package works without it."""
