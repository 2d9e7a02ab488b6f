"""Settings of `sluice eval`; the file is flat: its keys stand at the top level."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from orchestrator_svc.config import RewardConfig
from sluice.config import Section, SecurityConfig

__all__ = ["EvalConfig"]


class EvalConfig(Section):
    """What is evaluated, on what, and how."""

    model: str = Field("", description="Model directory or hub id; a replica is started for it and stopped afterwards.")
    address: str = Field(
        "", description="Address of a running rollout server, as host:port, instead of `model`; give one of the two."
    )
    engine: Literal["vllm", "transformers"] = Field("vllm", description="What samples from `model`.")
    max_model_len: int | None = Field(
        None, ge=2, description="Most tokens of prompt and continuation together; none takes the model's own."
    )
    rollout: dict[str, Any] = Field(
        default_factory=dict, description="Further settings of the replica started for `model`, as of [rollout]; flat."
    )
    environment: str = Field("", description="Environment: an installed id, `module:Attr`, or `path/to/env.py:Attr`.")
    environment_args: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of the environment's class or function."
    )
    split: str = Field("eval", description="Split of the environment.")
    workflow: str = Field("auto", description="How an episode runs; as orchestrator.workflow.")
    max_turns: int = Field(8, ge=1, description="Most assistant turns of a multi-turn episode.")
    prompts: int = Field(200, ge=1, description="Tasks to evaluate, the first ones of the split.")
    samples: int = Field(4, ge=0, description="Samples per task at `temperature`; 0 leaves them out.")
    temperature: float = Field(1.0, gt=0, description="Softmax temperature of the samples.")
    greedy: bool = Field(True, description="Also decode each task once without randomness.")
    max_tokens: int = Field(256, ge=1, description="Most tokens sampled per turn.")
    stop: list[str] = Field(default_factory=list, description="Strings that end a turn.")
    concurrency: int = Field(64, ge=1, description="Tasks evaluated at a time.")
    seed: int = Field(0, ge=0, description="Seed of the order of tasks.")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Scoring.")
    output: Path | None = Field(None, description="JSON file for the result; none prints it only.")
    samples_output: Path | None = Field(
        None, description="JSONL file for every attempt with its text; none writes none."
    )
    start_s: float = Field(600.0, gt=0, description="Seconds for the replica of `model` to be ready.")
    connect_s: float = Field(30.0, gt=0, description="Seconds for the server at `address` to answer.")
    deadline_s: float = Field(3600.0, gt=0, description="Seconds for the evaluation itself.")
    security: SecurityConfig = Field(
        default_factory=SecurityConfig, description="Tokens and TLS, for a server at `address`."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.model) == bool(self.address):
            raise ValueError("give either model (a directory or hub id) or address (of a running server)")
        if not self.samples and not self.greedy:
            raise ValueError("nothing to do: set samples above 0, or greedy")
        return self
