"""Benchmarks: this library and others on the same work, timed alternately in one process, as ratios."""
