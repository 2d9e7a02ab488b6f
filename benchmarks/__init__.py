"""Benchmarks that `sluice bench` runs; each prints ratios measured side by side."""
