"""Optional: grids of runs and their tables, the paper's figures, and benchmarks."""
