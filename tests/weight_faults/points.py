"""Places in the product at which a process is stopped, set from outside: the product has no hooks."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import re
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

__all__ = ["Point", "arm"]

Anything: TypeAlias = Any
"""What the functions of the product take and give."""


@dataclass(frozen=True, slots=True)
class Point:
    """A call of a function.

    Attributes:
        target: The function, as ``module:function`` or ``module:Class.method``.
        when: Before it runs, or after it returned.
        nth: At which of its calls from now on.
        match: Regular expression that a path or text among its arguments must match; empty: any call counts.
    """

    target: str
    when: Literal["before", "after"] = "before"
    nth: int = 1
    match: str = ""


class _Counter:
    """Says which call is the one; calls come from several threads."""

    def __init__(self, point: Point) -> None:
        self._point = point
        self._lock = threading.Lock()
        self._seen = 0

    def is_due(self, args: tuple[Anything, ...]) -> bool:
        words = " ".join(str(each) for each in args if isinstance(each, str | Path))
        if not re.search(self._point.match, words):
            return False
        with self._lock:
            self._seen += 1
            return self._seen == self._point.nth


def arm(point: Point, reached: Callable[[], None]) -> None:
    """Have `reached` called at the point; the call goes on when it returns. It may block.

    Raises:
        AttributeError, ModuleNotFoundError: if the product has no such function.
    """
    module, _, path = point.target.partition(":")
    *outer, name = path.split(".")
    owner: Anything = importlib.import_module(module)
    for each in outer:
        owner = getattr(owner, each)
    original = getattr(owner, name)
    wrapped = _wrapped(original, point, reached)
    setattr(owner, name, wrapped)
    for other in [each for key, each in sys.modules.items() if key.startswith(("weightsync", "weight_faults"))]:
        if vars(other).get(name) is original:  # imported by name
            setattr(other, name, wrapped)


def _wrapped(original: Anything, point: Point, reached: Callable[[], None]) -> Callable[..., Anything]:
    counter, first = _Counter(point), point.when == "before"
    if inspect.isasyncgenfunction(original):
        return _wrapped_generator(original, counter, reached)
    if inspect.iscoroutinefunction(original):
        return _wrapped_coroutine(original, counter, reached, first)

    @functools.wraps(original)
    def call(*args: Anything, **kwargs: Anything) -> Anything:
        due = counter.is_due(args)
        if due and first:
            reached()
        result = original(*args, **kwargs)
        if due and not first:
            reached()
        return result

    return call


def _wrapped_coroutine(
    original: Callable[..., Awaitable[Anything]], counter: _Counter, reached: Callable[[], None], first: bool
) -> Callable[..., Awaitable[Anything]]:
    @functools.wraps(original)
    async def call(*args: Anything, **kwargs: Anything) -> Anything:
        due = counter.is_due(args)
        if due and first:
            await asyncio.to_thread(reached)
        result = await original(*args, **kwargs)
        if due and not first:
            await asyncio.to_thread(reached)
        return result

    return call


def _wrapped_generator(
    original: Callable[..., AsyncIterator[Anything]], counter: _Counter, reached: Callable[[], None]
) -> Callable[..., AsyncIterator[Anything]]:
    """A point in a stream lies before one of the messages that it yields."""

    @functools.wraps(original)
    async def call(*args: Anything, **kwargs: Anything) -> AsyncIterator[Anything]:
        async for each in original(*args, **kwargs):
            if counter.is_due(args):
                await asyncio.to_thread(reached)
            yield each

    return call
