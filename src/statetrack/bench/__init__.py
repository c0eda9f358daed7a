"""Benchmarks: the same work by us and by others, timed in turn in one process, as ratios."""
