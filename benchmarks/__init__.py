"""Benchmarks: seeded, small by default, compared as ratios within one run."""
