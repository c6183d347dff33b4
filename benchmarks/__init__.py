"""Benchmarks of the figures in docs/benchmarks.md. ``python -m benchmarks`` runs all of them."""
