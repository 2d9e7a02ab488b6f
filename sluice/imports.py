"""Imports of large libraries: PyTorch, transformers and vLLM."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Keep the garbage collector off while the block imports.

    Objects that an import creates live to the end of the process, but the collector would examine them again and again. That takes a
    fifth of the time of an import.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
