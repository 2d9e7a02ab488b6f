"""The settings of `sluice eval`. For `--help` they load without the modules that an evaluation needs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from orchestrator_svc.config import EXTERNAL, AttemptsConfig, ExternalConfig
from sluice.config import CHAT_TEMPLATE, CHAT_TEMPLATE_KWARGS, RUN_PATTERN, Section, SecurityConfig, TemplateArguments
from sluice.engines import EngineName
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.loading import PLAYING

FORMATS = (".png", ".svg", ".pdf")
"""File name extensions that `plot` may have."""


class EvaluatedEnvironment(Section):
    """One of several environments; what is unset is as for all."""

    name: str = Field(min_length=1, description="Its name in the result.")
    environment: str = Field(min_length=1, description="As `environment`.")
    environment_args: dict[str, Any] = Field(default_factory=dict, description="As `environment_args`.")
    split: str | None = Field(None, description="As `split`.")
    prompts: int | None = Field(None, ge=1, description="As `prompts`.")
    samples: int | None = Field(None, ge=0, description="As `samples`.")
    max_tokens: int | None = Field(None, ge=1, description="As `max_tokens`.")
    max_turns: int | None = Field(None, ge=1, description="As `max_turns`.")
    environment_processes: EnvironmentProcessesConfig | None = Field(None, description="As `environment_processes`.")


class EvalConfig(AttemptsConfig):
    """What is evaluated, on what, and how."""

    model: str = Field(
        "",
        description="Model directory or hub id; a replica is started for it and stopped afterwards. With `url`: the model's name there.",
    )
    weights_dir: Path | None = Field(
        None,
        description="Directory of a run's weights, such as `outputs/my-run/weights`, in place of `model`: each version there is evaluated.",
    )
    steps: list[int] = Field(default_factory=list, description="Steps of `weights_dir` to evaluate; none: all.")
    url: str = Field(
        "",
        description="OpenAI-compatible endpoint, such as `https://api.openai.com/v1`, whose model `model` is evaluated.",
    )
    key_variable: str = Field(
        "OPENAI_API_KEY", description="Environment variable with the API key for `url`; without it no key is sent."
    )
    baseline: str = Field(
        "",
        description="Another model directory or hub id, evaluated first on the same tasks: the result has the gain of `model` over it.",
    )
    address: str = Field(
        "", description="Address of a running rollout server, as host:port, instead of `model`; give one of the two."
    )
    engine: EngineName = Field("vllm", description="What samples from `model`.")
    max_model_len: int | None = Field(
        None, ge=2, description="Most tokens of prompt and continuation together; none takes the model's own."
    )
    chat_template: Path | None = Field(None, description=CHAT_TEMPLATE)
    chat_template_kwargs: TemplateArguments = Field(
        default_factory=dict,
        description=f"{CHAT_TEMPLATE_KWARGS} A server at `address` or `url` gets them with each request.",
    )
    rollout: dict[str, Any] = Field(
        default_factory=dict, description="Further settings of the replica started for `model`, as of [rollout]; flat."
    )
    environment: str = Field("", description="Environment: an installed id, `module:Attr`, or `path/to/env.py:Attr`.")
    environment_args: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the environment's class or function."
    )
    environments: list[EvaluatedEnvironment] = Field(
        default_factory=list,
        description="Several environments in place of `environment`, one evaluated after the other.",
    )
    workflow: str = Field("auto", description="How an episode runs; as orchestrator.workflow.")
    agent: str = Field(
        "",
        description='Command that plays the episodes of external agents, run in a shell that knows $SLUICE_GATEWAY (gRPC), $SLUICE_GATEWAY_URL (HTTP) and $SLUICE_RUN; again whenever it ends in order. It implies `workflow = "external"`. Empty: start agents by hand.',
    )
    agents: int = Field(1, ge=1, le=256, description="How often `agent` runs at a time.")
    gateway: dict[str, Any] = Field(
        default_factory=dict, description="Further settings of the gateway started for agents, as of [gateway]; flat."
    )
    external: ExternalConfig = Field(default_factory=ExternalConfig, description="Episodes that external agents run.")
    run: str = Field("eval", pattern=RUN_PATTERN, description="Name of the run that agents lease tasks of.")
    max_turns: int = Field(8, ge=1, description="Most assistant turns of a multi-turn episode.")
    prompts: int = Field(200, ge=1, description="Tasks to evaluate, the first ones of the split.")
    samples: int = Field(4, ge=0, description="Samples per task at `temperature`; 0 leaves them out.")
    max_tokens: int = Field(256, ge=1, description="Most tokens sampled per turn.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a turn.")
    concurrency: int = Field(64, ge=1, description="Tasks evaluated at a time.")
    seed: int = Field(0, ge=0, description="Seed of the order of tasks.")
    environment_processes: EnvironmentProcessesConfig = Field(
        default_factory=EnvironmentProcessesConfig, description="Processes that run the environment's code."
    )
    output: Path | None = Field(None, description="JSON file for the result; none prints it only.")
    samples_output: Path | None = Field(
        None, description="JSONL file for every attempt with its text; none writes none."
    )
    attempts: Path | None = Field(
        None,
        description="JSONL file that the attempts at each task are added to as they end; an evaluation that was interrupted continues with the same file. Of several evaluations each has its own, by its checkpoint and environment.",
    )
    plot: Path | None = Field(
        None,
        description="PNG, SVG or PDF file: rewards and pass@k of each checkpoint of `weights_dir`, with intervals.",
    )
    start_s: float = Field(
        600.0,
        gt=0,
        description="Seconds to construct the environment, to list the tasks, and again for the replica of `model` to be ready.",
    )
    connect_s: float = Field(30.0, gt=0, description="Seconds for the server at `address` to answer.")
    deadline_s: float = Field(3600.0, gt=0, description="Seconds for the evaluation itself.")
    security: SecurityConfig = Field(
        default_factory=SecurityConfig, description="Tokens and TLS, for a server at `address`."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sum(map(bool, (self.model, self.address, self.weights_dir))) != 1:
            raise ValueError(
                "give one of model (a directory or hub id), address (of a running server) and weights_dir (of a run)"
            )
        if self.url and not self.model:
            raise ValueError("url needs model: the name of the model there")
        if self.url and (self.baseline or self.external_agents):
            raise ValueError("url is for episodes that the environment runs, without a baseline")
        if self.url and self.workflow != "auto":
            raise ValueError(
                f"a model at a url is asked as the environment says, so workflow cannot be {self.workflow}: leave it out"
            )
        if bool(self.environment) == bool(self.environments):
            raise ValueError("give either environment, or a table for each of several environments")
        if self.plot is not None and self.plot.suffix not in FORMATS:
            raise ValueError(f"plot is a file that ends with {', '.join(FORMATS)}, not {self.plot.name!r}")
        if not self.samples and not self.greedy:
            raise ValueError("nothing to do: set samples above 0, or greedy")
        if self.baseline and not self.model:
            raise ValueError("baseline is compared with model: give model, not address")
        if self.agent_command and self.workflow not in {"auto", EXTERNAL}:
            raise ValueError(f"agent plays the episodes, so workflow cannot be {self.workflow}: leave it out")
        return self

    @model_validator(mode="after")
    def _has_its_own_template(self) -> Self:
        if self.chat_template is not None and (self.url or self.address):
            raise ValueError("a server has the chat template that it was started with: leave chat_template out")
        return self

    @property
    def external_agents(self) -> bool:
        """Whether external agents run the episodes."""
        return bool(self.agent_command) or self.workflow == EXTERNAL

    @property
    def agent_command(self) -> str:
        """`agent`; for an environment that plays its episodes itself, the command that starts it."""
        if self.agent or self.environment not in PLAYING:
            return self.agent
        given = {
            "agent": self.environment,
            "args": json.dumps(self.environment_args),
            "environment_processes": self.environment_processes.model_dump_json(),
            "start_s": str(self.start_s),
            "server.port": "0",
        }
        words = [sys.executable, "-m", "sluice.cli.main", "agents"]
        words += [word for name, value in given.items() for word in (f"--agents.{name}", value)]
        return f'{shlex.join(words)} --peers.gateway "$SLUICE_GATEWAY" --run "$SLUICE_RUN"'
