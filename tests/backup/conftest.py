"""A clean place for every test of jobs."""

from tests.cli.conftest import place, source, store

__all__ = ["place", "source", "store"]
