"""Lies here so that modules beside it, such as `small_models`, can be imported by the tests of every folder."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import structlog
from rank_programs import RankPrograms
from suite_rules import *  # noqa: F403 - hooks and fixtures for every test

_SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("sluice", deadline=None, suppress_health_check=_SLOW)  # machines are busy
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("sluice"), derandomize=True)
# CI draws the same examples each time, so that no change is red for what an earlier one left undiscovered. Other runs go on searching.
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "sluice")

_COSTLY_FIRST = ("integration", "chaos", "contract", "unit")
"""Folders in the order of their tests: workers end together if the short files come last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order tests by folder; the order within a folder stays."""

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return _COSTLY_FIRST.index(folder) if folder in _COSTLY_FIRST else len(_COSTLY_FIRST)

    items.sort(key=place)


@pytest.fixture(scope="session")
def rank_programs() -> Iterator[RankPrograms]:
    """Starts the ranks of test programs without a new import of PyTorch for each."""
    programs = RankPrograms()
    yield programs
    programs.close()


@pytest.fixture(autouse=True)
def logging_ends_with_the_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that configures logging writes to a stream that pytest closes afterwards: nothing of it may stay."""
    configure = structlog.configure

    def configure_uncached(**settings: Any) -> None:
        configure(**{**settings, "cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", configure_uncached)
    root = logging.getLogger()
    level = root.level
    yield
    structlog.reset_defaults()
    root.setLevel(level)
    for handler in list(root.handlers):
        # pytest's own handlers come and go by themselves
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
