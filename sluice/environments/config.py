"""Settings of the processes that run an environment's code. Imports nothing heavy: every command loads them."""

from __future__ import annotations

from pydantic import Field

from sluice.config import Section


class EnvironmentProcessesConfig(Section):
    """Processes that run the environment's code. One that hangs, dies or needs too much memory is killed and replaced."""

    python: str = Field(
        "",
        description="Interpreter that runs the processes, such as `.venv-games/bin/python`, for an environment whose packages do not fit beside Sluice's. It needs Python 3.11 or newer and nothing of Sluice's. Empty: the one that runs Sluice.",
    )
    count: int = Field(
        0, ge=0, description="Most processes, started when calls wait for one; 0: one per core, at most 4."
    )
    calls: int = Field(
        0,
        ge=0,
        description="Calls that one process runs at a time; a hung one takes all of them along. 0: one, or 64 if the environment's methods are coroutines. With two or more, plain methods run in threads.",
    )
    call_s: float = Field(
        60.0, gt=0, description="Seconds for one call of messages, reset or step; then its process is killed."
    )
    score_s: float = Field(
        0.0,
        ge=0,
        description="Seconds to score one group; then the process is killed. 0: 10, or as long as the environment's own limits of time may take for the group, such as those of programs in the sandbox.",
    )
    score_retries: int = Field(
        1, ge=0, description="Further attempts to score a completion before its reward is missing, which is never 0."
    )
    memory_mib: int = Field(
        8192,
        ge=0,
        description="Most memory of one process and what it started, in MiB; then it is killed. 0: no limit. Linux only.",
    )
    max_restarts: int = Field(
        16,
        ge=0,
        description="Processes that may die one after the other, without an answer and without a call at fault, before no more are started.",
    )
    variables: list[str] = Field(
        default_factory=list,
        description="Environment variables that the processes get although their names are of secrets, such as OPENAI_API_KEY.",
    )
