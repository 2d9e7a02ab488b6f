"""A surrogate of the user's own, named by an import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping

from trainer_svc.objectives.surrogates import SURROGATES, Surrogate

__all__ = ["check_parameters", "find_surrogate"]


def find_surrogate(name: str) -> Surrogate:
    """A surrogate of the table, or what `package.module:function` names.

    The module is found as Python finds any: installed, or in a directory of PYTHONPATH.

    Raises:
        ValueError: with what is wrong, if it cannot be imported or is no function.
    """
    if ":" not in name:
        return SURROGATES[name]
    module_name, function_name = name.split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"objective {name!r}: there is no module {error.name!r}: install it, or put its directory on PYTHONPATH"
        ) from error
    surrogate: Surrogate | None = getattr(module, function_name, None)
    if not callable(surrogate):
        raise ValueError(  # noqa: TRY004 - the name is wrong, not a type
            f"objective {name!r}: {module.__file__} has no function {function_name!r}: correct the name"
        )
    return surrogate


def check_parameters(name: str, surrogate: Surrogate, parameters: Mapping[str, object]) -> None:
    """Whether a surrogate of the user's own can be called with the terms and these keyword arguments.

    Raises:
        ValueError: with what it lacks or does not take, so that a run ends at its start and not in its first step.
    """
    try:
        inspect.signature(surrogate).bind(None, **parameters)
    except TypeError as error:
        raise ValueError(
            f"objective {name!r} is called with the terms of a micro-batch and params ({', '.join(parameters) or 'none'}): "
            f"{error}; correct params or the function"
        ) from error
