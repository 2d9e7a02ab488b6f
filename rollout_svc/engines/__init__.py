"""The engines that sample, each a package, and what they have in common."""

from __future__ import annotations

import importlib
from typing import Protocol

from rollout_svc.config import RolloutConfig
from rollout_svc.engines.base import InferenceEngine
from sluice.config import CommonConfig
from sluice.engines import ENGINES

__all__ = ["EnginePackage", "build_engine"]


class EnginePackage(Protocol):
    """What the package of an engine offers."""

    def build(self, model: str, config: RolloutConfig, max_staleness: int) -> InferenceEngine:
        """Return the engine that the settings ask for, not started.

        Raises:
            ConfigError: if it could not hold the adapters that the run's bound on staleness asks for.
        """

    def check(self, run: CommonConfig, config: RolloutConfig) -> None:
        """Refuse settings that the engine would fail on while it starts. Loads neither the model nor the engine's library.

        Raises:
            ConfigError: with the setting to change.
        """


def build_engine(model: str, config: RolloutConfig, max_staleness: int = 0) -> InferenceEngine:
    """Return the engine that the settings ask for, not started.

    Raises:
        ConfigError: as `EnginePackage.build`.
    """
    package: EnginePackage = importlib.import_module(ENGINES[config.engine].package)
    return package.build(model, config, max_staleness)
