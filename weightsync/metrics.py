"""Prometheus metrics of the weight path: of the service's commits and of a replica's updates."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 300)

COMMIT_SECONDS = Histogram(
    "sluice_weights_commit_seconds", "Time to verify and publish a pushed version.", buckets=_SECONDS
)
DENSE_SECONDS = Histogram(
    "sluice_weights_dense_seconds", "Time to make a dense form of deltas, in the background.", buckets=_SECONDS
)
COMMITTED_BYTES = Counter("sluice_weights_committed_bytes", "Bytes of committed versions.", ("run",))
HELD_BYTES = Gauge("sluice_weights_held_bytes", "Bytes of versions on disk, uploads included.", ("run",))
RELAYED_BYTES = Counter("sluice_weights_relayed_bytes", "Bytes that a relay pulled from upstream.", ("run",))
RELAY_LAG = Gauge("sluice_weights_relay_lag", "Versions that a relay is behind its upstream.", ("run",))
MIRROR_BYTES = Counter(
    "sluice_weights_mirror_bytes",
    "Bytes of versions that were sent to an object store or received from it.",
    ("run", "direction", "form"),
)
MIRROR_LAG = Gauge(
    "sluice_weights_mirror_lag",
    "Versions that an object store is behind the service that writes it, or ahead of the one that reads it.",
    ("run", "direction"),
)
MIRROR_DAMAGED = Counter(
    "sluice_weights_mirror_damaged", "Objects that came with other bytes than their digest says.", ("run",)
)
UPDATES = Counter("sluice_weights_updates", "Versions that a replica took or failed to take.", ("outcome",))
FALLBACKS = Counter(
    "sluice_weights_fallbacks",
    "Times that a way to a version failed and another was taken: delta (again, by sockets) or dense.",
    ("way",),
)
PULLED_BYTES = Counter(
    "sluice_weights_pulled_bytes", "Bytes of versions that a replica took, by where they came from.", ("source",)
)
PULL_SECONDS = Histogram(
    "sluice_weights_pull_seconds",
    "Time from the announcement to the last byte; the engine produces tokens during it.",
    buckets=_SECONDS,
)
STAGE_SECONDS = Histogram(
    "sluice_weights_stage_seconds",
    "Time from the last byte to a verified file in shared memory; the engine produces tokens during it.",
    buckets=_SECONDS,
)
PAUSE_SECONDS = Histogram(
    "sluice_weights_pause_seconds", "Time without sampling while a version was applied.", buckets=_SECONDS
)
APPLY_SECONDS = Histogram("sluice_weights_apply_seconds", "Time of the copy into the engine.", buckets=_SECONDS)
UPDATE_SECONDS = Histogram(
    "sluice_weights_update_seconds",
    "Time from the announcement of a version until the replica serves it.",
    buckets=_SECONDS,
)
