"""Finds an environment by its name in the settings, and constructs it.

The processes of an environment load this module each time one starts, so it imports no settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.environments.base import Environment
from sluice.errors import ConfigError
from sluice.loading import construct

ENVIRONMENT_GROUP = "sluice.environments"
"""Entry points of this group name installed environments."""

BUILT_IN: Mapping[str, str] = {
    "mcp": "sluice.environments.libraries.mcp:McpTools",
    "openenv": "sluice.environments.libraries.openenv:OpenEnv",
    "question_answer": "sluice.environments.question_answer:load",
    "reasoning_gym": "sluice.environments.libraries.reasoning_gym:ReasoningGym",
    "textarena": "sluice.environments.libraries.textarena:TextArena",
    "trl": "sluice.environments.libraries.trl:load",
    "verifiers": "sluice.environments.libraries.verifiers:load",
    "verl": "sluice.environments.libraries.verl:load",
}
"""Environments that come with Sluice. Those in `libraries` need the library of the same name."""

SERVED = "grpc://"
"""Beginning of the reference of an environment on a server."""

PLAYING = frozenset({"verifiers"})
"""Names of environments that play their episodes themselves, with a gateway as their model."""

_REMOTE = "sluice.environments.remote:connect_environment"


def load_environment(reference: str, arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a class of the user's
    """Construct an environment, or an agent, which only needs `run`.

    Args:
        reference: An installed id, ``module:Attr``, ``path/to/env.py:Attr``, or ``grpc://host:port`` of a server.
        arguments: Keyword arguments of the class or function that it names.

    Raises:
        ConfigError: if it cannot be found or constructed, or is not an environment.
    """
    if reference.startswith(SERVED):
        arguments = {**arguments, "address": reference.removeprefix(SERVED)}
    environment: Any = construct(locate(reference), "environment", arguments, "environment_args", reference)
    if not isinstance(environment, Environment) and not hasattr(environment, "run"):
        raise ConfigError(
            f"{reference} is not an environment{_lacks(environment)}: it needs name, tasks(split, seed), and either messages(task) with"
            " score(task, completion), or reset(task, seed); name and tasks are enough if external agents run its episodes. An agent needs run(data, base_url, api_key)"
        )
    return environment


def _lacks(environment: object) -> str:
    """Return which of the two required parts of an environment are missing, as a clause for people."""
    missing = [name for name in ("name", "tasks") if not hasattr(environment, name)]
    return f", since it has no {' and no '.join(missing)}" if missing else ""


def locate(reference: str) -> str:
    """Return where an environment is, as ``module:Attr`` or ``path/to/env.py:Attr``.

    Raises:
        ConfigError: if none is named, or the name is not installed.
    """
    if not reference:
        raise ConfigError('no environment is set: give orchestrator.environment = "path/to/env.py:Class"')
    if reference in BUILT_IN:
        return BUILT_IN[reference]
    if reference.startswith(SERVED):
        return _REMOTE
    if ":" in reference:
        return reference
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow to import, needed for installed names alone

    installed = {point.name: point.value for point in entry_points(group=ENVIRONMENT_GROUP)}
    if reference not in installed:
        known = ", ".join(sorted({*BUILT_IN, *installed}))
        raise ConfigError(
            f"no environment {reference!r} is installed; there are: {known}; or give module:Attr or path/to/env.py:Attr"
        )
    return installed[reference]
