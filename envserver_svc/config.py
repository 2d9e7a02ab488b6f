"""Settings of a served environment. Imports nothing heavy, so that `--help` is fast."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from sluice.config import CommonConfig, ConfigError, Section, ServerConfig
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.loading import locate
from sluice.loading import check_there


class EnvServerConfig(Section):
    """The table `[envserver]`."""

    source: str = Field(
        "", description="Environment to serve: an installed id, `module:Attr`, or `path/to/env.py:Attr`."
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the environment's class or function."
    )
    environment_processes: EnvironmentProcessesConfig = Field(
        default_factory=EnvironmentProcessesConfig, description="Processes that run the environment's code."
    )
    start_s: float = Field(60.0, gt=0, description="Seconds to construct the environment, and to list its tasks.")
    most_episodes: int = Field(
        4096,
        ge=1,
        description="Episodes that are open at a time; a further one is answered with a delay to retry after.",
    )
    idle_s: float = Field(900.0, gt=0, description="Seconds after which an episode without a call is closed.")
    server: ServerConfig = Field(
        default_factory=lambda: ServerConfig(port=7106), description="Where the environment is served."
    )

    def check_start(self, run: CommonConfig) -> None:
        """Refuse settings that would make the service fail at start; see `Section.check_start`."""
        if not self.source:
            raise ConfigError('no environment is named: give envserver.source = "path/to/env.py:Class"')
        check_there(locate(self.source), "environment")


CONFIG = EnvServerConfig
