"""Keeps freed memory in the process, because chunks come and go thousands of times a second."""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Parameters of mallopt(3)."""

_KEPT_BYTES = 256 << 20
_LARGEST_KEPT = 32 << 20
"""glibc's own bounds follow the chunks' size, so that it would give each buffer back to the kernel and fault it in again."""


def keep_freed_memory() -> None:
    """Let the C library keep up to 256 MiB that were freed; without effect where it is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
