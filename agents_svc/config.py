"""Settings of agents that are Python classes. Imports neither torch nor vLLM, so that `--help` is fast."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from sluice.config import CommonConfig, ConfigError, ServerConfig
from sluice.config.tables import AgentsTable
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.loading import locate
from sluice.loading import check_there


class AgentsConfig(AgentsTable):
    """The table `[agents]`."""

    agent: str = Field(
        "",
        description="Class that plays the episodes of the run, as `path/to/agent.py:Class` or `module:Class`. It has `run(self, data, base_url, api_key)` or `arun_episode(self, engine, task)`. `sluice rl` then starts this service and a gateway, and environments with the workflow `auto` get the workflow `external`. Empty: agents outside play.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the class.")
    environment_processes: EnvironmentProcessesConfig | None = Field(
        None,
        description="Runs the class in processes of its own, which are killed when they hang, die or need too much memory, and may have another interpreter (`python`). It then needs `run`. Unset: in the service itself.",
    )
    start_s: float = Field(
        120.0, gt=0, description="Seconds to construct the class in a process of `environment_processes`."
    )
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that `sluice rl` starts. One is enough for agents that mostly wait for the policy.",
    )
    at_a_time: int = Field(64, ge=1, le=4096, description="Episodes that one process plays at a time.")
    episode_s: float = Field(600.0, gt=0, description="Seconds for one episode; a longer one is given up.")
    gateway_s: float = Field(
        900.0, gt=0, description="Seconds that the agents wait for a gateway that is away; then they fail."
    )
    most_failures: int = Field(
        64,
        ge=1,
        description="Failed episodes in a row, without any that was played to its end, after which the agents give up. Those that fail at the same moment, as when a gateway dies, are not enough.",
    )
    server: ServerConfig = Field(
        default_factory=ServerConfig,
        description="Where the agents report their health; `drain_s` is also what episodes under way get to end after SIGTERM.",
    )

    def check_start(self, run: CommonConfig) -> None:
        """Refuse settings that would make the agents fail at start; see `Section.check_start`."""
        if not self.agent:
            raise ConfigError('no agent is set: give agents.agent = "path/to/agent.py:Class"')
        check_there(locate(self.agent) if self.environment_processes is not None else self.agent, "agent")


CONFIG = AgentsConfig
