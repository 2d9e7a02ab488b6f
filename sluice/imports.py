"""Imports of what is large: PyTorch, transformers and vLLM."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def large_imports() -> Iterator[None]:
    """Keep the garbage collector off while the block imports.

    What an import makes lives to the end of the process, and the collector looks at it again and again: a fifth of an import's time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
