"""Rules that hold for every test, as hooks and fixtures of pytest: tests/conftest.py takes them in.

* Numbers that a test draws without a seed of its own depend on the name of the test.
* A task or future that fails while nobody awaits it is an error of the test that made its event loop. asyncio reports it when it is
  collected, often during a later test.
* In CI a test may be skipped for want of a device or a container engine, not for want of a program.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

__all__ = [
    "generators_are_seeded",
    "pytest_runtest_makereport",
    "pytest_runtest_protocol",
    "pytest_sessionfinish",
    "seed_generators",
]

MAY_SKIP = ("gpu", "docker")
"""Marks of tests that need what CI does not have."""

_running: list[pytest.Item] = []
_owners: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, pytest.Item] = weakref.WeakKeyDictionary()
_create: Callable[..., None] = asyncio.BaseEventLoop.__init__
_handle: Callable[..., None] = asyncio.BaseEventLoop.call_exception_handler


@pytest.fixture
def seed_generators(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Seeds the generators of Python, numpy and torch by the name of the test."""

    def seed() -> None:
        number = zlib.crc32(request.node.nodeid.encode())
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)

    return seed


@pytest.fixture(autouse=True)
def generators_are_seeded(seed_generators: Callable[[], None]) -> None:
    """A test that fails by the numbers that it draws fails again."""
    seed_generators()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """In CI, make a skipped test a failed one unless its marks allow it."""
    report: pytest.TestReport = yield
    expected = hasattr(report, "wasxfail") or any(item.get_closest_marker(mark) for mark in MAY_SKIP)
    if report.skipped and os.environ.get("CI") == "true" and not expected:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"CI skips no test. {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note which test makes event loops."""
    _running[:] = [item]
    return (yield)


def pytest_sessionfinish() -> None:
    """Collect what the last test left behind, while it can still be blamed."""
    gc.collect()


def _create_owned(loop: asyncio.BaseEventLoop, *args: Any) -> None:
    _create(loop, *args)
    if _running:
        _owners[loop] = _running[-1]


def _handle_and_blame(loop: asyncio.BaseEventLoop, context: dict[str, Any]) -> None:
    _handle(loop, context)
    owner = _owners.get(loop)
    if owner is not None and "was never retrieved" in context.get("message", ""):
        failure = (
            f"{context['message']}: {context.get('exception')!r}\n{context.get('future') or context.get('task')!r}"
        )
        report = pytest.TestReport(owner.nodeid, owner.location, {}, "failed", failure, "teardown")
        with _reporting_for(owner):
            owner.ihook.pytest_runtest_logreport(report=report)


@contextlib.contextmanager
def _reporting_for(item: pytest.Item) -> Iterator[None]:
    """Let a worker of pytest-xdist report on a test other than the running one, which it refuses."""
    workers = [each for each in item.config.pluginmanager.get_plugins() if type(each).__name__ == "WorkerInteractor"]
    running = [each.item_index for each in workers]
    for each in workers:
        each.item_index = item.session.items.index(item)
    try:
        yield
    finally:
        for each, index in zip(workers, running, strict=True):
            each.item_index = index


asyncio.BaseEventLoop.__init__ = _create_owned  # type: ignore[method-assign]
asyncio.BaseEventLoop.call_exception_handler = _handle_and_blame  # type: ignore[method-assign]
