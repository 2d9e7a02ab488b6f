"""Environments written for `verifiers`, unmodified: version 0.3 with `load_environment`, and tasksets of version 0.3 and 0.4.

MIT: https://github.com/PrimeIntellect-ai/verifiers. The library runs the episodes itself, with the gateway as its model.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import os
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.environments.base import Task
from sluice.environments.libraries.imports import library
from sluice.errors import ConfigError

_MODEL = "policy"
"""Name of the model in requests. The gateway accepts any name."""

_HARNESS = "sluice_chat"

_INSTALL_S = 600.0
_MOST_SAID = 2000
"""Maximum number of characters of an installer's output in an error."""

_keys = itertools.count(1)


def load(  # the parameters are the settings
    id: str,  # noqa: A002 - what verifiers calls it
    *,
    args: Mapping[str, Any] | None = None,
    eval_args: Mapping[str, Any] | None = None,
    held_out: int = 128,
    limit: int | None = None,
    harness: str = "",
    max_turns: int | None = None,
) -> ClassicEnvironment | Taskset:
    """Plays an environment of the library verifiers, by the name of its package.

    Args:
        id: Its name, such as ``reverse-text``, if its package is installed beside verifiers; or ``owner/name`` of the Environments
            Hub. That is installed there unless the name after the slash can be imported.
        args: Arguments of its `load_environment`, or settings of its taskset.
        eval_args: Arguments for evaluation, such as ``{"split": "test"}``, if it has separate tasks for evaluation.
        held_out: Number of tasks to keep for evaluation if it has no separate ones.
        limit: Maximum number of tasks to train on; needed if a taskset is infinite.
        harness: For a taskset: id of the program that plays. Empty: a chat loop with the tools of the task, in this process.
        max_turns: For a taskset: maximum number of answers of an episode.
    """
    library("verifiers", "verifiers")
    name = id.rsplit("/", 1)[-1].split("@", 1)[0]
    module = name.replace("-", "_")
    if "/" in id and importlib.util.find_spec(module) is None:
        install_from_hub(id)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the environment {id} is not installed in {sys.prefix} ({error}): install its package there with pip, or name it as"
            " owner/name if it is on the Environments Hub"
        ) from error
    evaluated = None if eval_args is None else {**(args or {}), **eval_args}
    wanted = _Wanted(name, dict(args or {}), evaluated, held_out, limit)
    if hasattr(found, "load_environment"):
        return ClassicEnvironment(wanted)
    return Taskset(wanted, harness, max_turns)


def install_from_hub(hub_id: str) -> None:
    """Install an environment beside verifiers with the hub's own program.

    Raises:
        ConfigError: if there is no such program, or it fails.
    """
    beside = Path(sys.prefix) / "bin"
    path = f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"
    by_hand = f"install it into {sys.prefix} by hand, where the network allows it"
    program = shutil.which("prime", path=path)
    if program is None:
        raise ConfigError(
            f"{hub_id} is not installed, and there is no program `prime` that could:"
            f" `{sys.executable} -m pip install prime`, or {by_hand}"
        )
    tool = "uv" if shutil.which("uv", path=path) else "pip"
    sys.stdout.write(f"installing {hub_id} into {sys.prefix}\n")
    command = (program, "env", "install", hub_id, "--with", tool, "--no-upgrade")
    variables = {**os.environ, "PATH": path, "VIRTUAL_ENV": sys.prefix}
    try:
        done = subprocess.run(  # noqa: S603 - the hub's own program
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INSTALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"`{shlex.join(command)}` took longer than {_INSTALL_S:g} s: {by_hand}") from error
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-_MOST_SAID:]
        raise ConfigError(f"`{shlex.join(command)}` ended with code {done.returncode}: {said}\n{by_hand}")
    importlib.invalidate_caches()


@dataclass(frozen=True)
class _Wanted:
    """Which tasks of which environment; see `load`."""

    name: str
    args: dict[str, Any]
    eval_args: dict[str, Any] | None
    held_out: int
    limit: int | None


class _Numbered:
    """Lists tasks by their number. The tasks for evaluation differ from the tasks to train on.

    Args:
        wanted: Which tasks.
        count: Number of tasks.
        evaluated: Number of tasks only for evaluation; None if there are none.

    Attributes:
        name: The environment's name.
    """

    def __init__(self, wanted: _Wanted, count: int, evaluated: int | None) -> None:
        self.name = wanted.name
        held_out = min(wanted.held_out, count // 2) if evaluated is None else 0
        self._numbers = {
            "train": range(held_out, count)[: wanted.limit],
            "eval": range(held_out if evaluated is None else evaluated),
        }

    def tasks(self, split: str, seed: int) -> Sequence[Task]:
        """Return the tasks of the split ``train``, in an order that the seed determines, or ``eval``."""
        if split not in self._numbers:
            raise ConfigError(f"verifiers environments have the splits train and eval here, not {split!r}")
        numbers = list(self._numbers[split])
        if split == "train":
            random.Random(seed).shuffle(numbers)  # noqa: S311 - an order, not a secret
        return [Task(f"{split}-{number}", {"split": split, "number": number}) for number in numbers]


class ClassicEnvironment(_Numbered):
    """An environment made by `load_environment` of its package."""

    def __init__(self, wanted: _Wanted) -> None:
        try:
            from verifiers.types import ClientConfig  # type: ignore[import-not-found]  # noqa: PLC0415 - of 0.3 alone
            from verifiers.utils.env_utils import load_environment  # type: ignore[import-not-found]  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{wanted.name} is written for the classic API, which verifiers 0.4 has no more: install verifiers==0.3.1 in {sys.prefix}"
            ) from error
        self._client_config = ClientConfig
        self._train = load_environment(wanted.name, **wanted.args)
        self._eval = self._train if wanted.eval_args is None else load_environment(wanted.name, **wanted.eval_args)
        rows = self._train.get_dataset()
        own = self._eval.build_eval_dataset()
        if own is None and wanted.eval_args is not None:
            own = self._eval.get_dataset()
        self._rows = {"train": rows, "eval": rows if own is None else own}
        super().__init__(wanted, len(rows), None if own is None else len(own))

    async def run(self, data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        """Play an episode; return its reward."""
        environment = self._eval if data["split"] == "eval" else self._train
        row = dict(self._rows[data["split"]][int(data["number"])])
        with _variable(api_key) as variable:
            client = self._client_config(api_base_url=base_url, api_key_var=variable)
            made = await environment.run_rollout(row, client, _MODEL, {})
        if made.get("error"):
            raise RuntimeError(f"verifiers says: {made['error']}")
        return float(made["reward"])


class Taskset(_Numbered):
    """A taskset, played by one agent."""

    def __init__(self, wanted: _Wanted, harness: str, max_turns: int | None) -> None:
        from verifiers.v1.utils import loaders  # type: ignore[import-not-found]  # noqa: PLC0415 - only where it is used

        if loaders.environment_class(wanted.name) is not loaders.SingleAgentEnv:
            raise ConfigError(
                f"{wanted.name} has an environment of several agents, of which a run trains none: it needs a plain taskset"
            )
        self._max_turns, self._harness = max_turns, harness or self._chat()

        def tasks(settings: dict[str, Any]) -> list[Any]:
            config = loaders.taskset_config_type(wanted.name).model_validate({**settings, "id": wanted.name})
            taskset = loaders.load_taskset(config)
            if not taskset.bounded and wanted.limit is None:
                raise ConfigError(f"the taskset {wanted.name} has no end: set limit in environment_args")
            most = None if wanted.limit is None else wanted.limit + wanted.held_out
            return list(itertools.islice(taskset, most))

        train = tasks(wanted.args)
        own = None if wanted.eval_args is None else tasks(wanted.eval_args)
        self._tasks = {"train": train, "eval": train if own is None else own}
        super().__init__(wanted, len(train), None if own is None else len(own))

    @staticmethod
    def _chat() -> str:
        """Register our chat loop as a harness of the library; return its id."""
        from sluice.environments.libraries import verifiers_chat  # noqa: PLC0415 - imports verifiers

        sys.modules[_HARNESS] = verifiers_chat
        return _HARNESS

    async def run(self, data: Mapping[str, Any], base_url: str, api_key: str) -> float:
        """Play an episode; return its reward."""
        import verifiers.v1 as vf  # type: ignore[import-not-found]  # noqa: PLC0415 - imported already

        task = self._tasks[data["split"]][int(data["number"])]
        with _variable(api_key) as variable:
            config = vf.AgentConfig.model_validate(
                {
                    "model": _MODEL,
                    "client": {"type": "eval", "base_url": base_url, "api_key_var": variable},
                    "harness": {"id": self._harness},
                    "runtime": vf.SubprocessConfig(),
                    "max_turns": self._max_turns,
                }
            )
            trace = await vf.make_agent(config).run(task)
        if trace.has_error:
            raise RuntimeError(f"verifiers says: {trace.last_error}")
        return float(trace.reward)


@contextlib.contextmanager
def _variable(key: str) -> Iterator[str]:
    """Keep a session key in an environment variable while the block runs, because verifiers reads keys only from there."""
    name = f"SLUICE_SESSION_KEY_{next(_keys)}"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]
