"""Lies here so that modules beside it, such as `small_models`, can be imported by the tests of every folder."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import structlog
from rank_programs import RankPrograms
from run_suite import pytest_ignore_collect  # noqa: F401 - a hook
from suite_rules import *  # noqa: F403 - hooks and fixtures for every test

gc.disable()  # until all tests are collected, because the modules that they import stay


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage from now on, after one collection over all imported modules."""
    gc.collect()
    gc.enable()


_SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("sluice", deadline=None, suppress_health_check=_SLOW)  # machines are busy
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("sluice"), derandomize=True)
# `make test-fast` draws fewer examples, where a test does not say how many.
hypothesis.settings.register_profile("fast", hypothesis.settings.get_profile("sluice"), max_examples=10)
# CI draws the same examples each time, so that no change fails because of an older, undiscovered fault. Other runs keep searching.
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "sluice")

_COSTLY_FIRST = ("integration", "chaos", "contract", "unit")
"""Folders in the order in which their tests run. The short files come last, so that all workers end at about the same time."""

_LONGEST = (
    *("test_slurm.py", "test_ray.py", "test_examples.py", "test_helm_pods.py", "test_trainer_nodes.py"),
    *("test_two_machines.py", "test_cli_rl.py", "test_quickstart.py", "test_parallel_engine.py"),
    *("test_weightsync_faults.py", "test_vllm_weight_update.py", "test_extending_guide.py"),
)
"""Files that take a worker a minute or more. They run before all others, because one worker runs a whole file: its tests share fixtures."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order tests by the length of their file and by folder; the order within a folder stays."""

    def place(item: pytest.Item) -> tuple[int, int]:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        file = _LONGEST.index(item.path.name) if item.path.name in _LONGEST else len(_LONGEST)
        return file, _COSTLY_FIRST.index(folder) if folder in _COSTLY_FIRST else len(_COSTLY_FIRST)

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
