"""Figures of the README, each printed by a script of its own: `make bench`, or `python -m benchmarks.NAME`."""
