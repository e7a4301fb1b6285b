"""Benchmarks: each prints our figure, a peer's, and the ratio, from the same run."""
