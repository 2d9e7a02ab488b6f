"""Prometheus metrics of the calls that a server answers."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

__all__ = ["RPC_IN_FLIGHT", "RPC_SECONDS", "RPC_TOTAL"]

RPC_TOTAL = Counter("sluice_rpc", "Calls answered, by status code.", ("service", "method", "code"))
RPC_SECONDS = Histogram(
    "sluice_rpc_seconds",
    "Time from the arrival of a call to its end, streams included.",
    ("service", "method"),
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800),
)
RPC_IN_FLIGHT = Gauge("sluice_rpc_in_flight", "Calls in progress.", ("service", "method"))
