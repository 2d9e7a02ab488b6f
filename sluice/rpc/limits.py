"""Bounds that both sides of every call agree on."""

from __future__ import annotations

__all__ = ["CONTRACT_VERSION", "MAX_MESSAGE_BYTES", "MAX_SAMPLES", "TRANSPORT_OPTIONS"]

CONTRACT_VERSION = 1
"""Grows with every additive change within ``sluice.v1``."""

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message of the contracts; larger things stream."""

MAX_SAMPLES = 256
"""Most samples of one Generate request."""

_FRAMING_BYTES = 64 << 10
"""Room for field headers around a payload of the full size."""

_METADATA_BYTES = 64 << 10
"""gRPC's own 8 KiB drops the details of an error with a long list of field violations."""

TRANSPORT_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + _FRAMING_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES + _FRAMING_BYTES),
    ("grpc.max_metadata_size", _METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", _METADATA_BYTES),
    # A peer that disappears is noticed within 30 + 10 s, also on an idle watch stream.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
