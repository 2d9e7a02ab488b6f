"""What `allocation_mode`, or a `backend` per role, says, written into the settings that it is about."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from sluice.allocation import Allocation, Dimensions, Side
from sluice.config.errors import ConfigError
from sluice.config.sections import CommonConfig, Section

__all__ = ["allocated", "allocation_of"]

_Run = TypeVar("_Run", bound=CommonConfig)


def allocation_of(run: CommonConfig) -> Allocation | None:
    """The allocation that the settings name; None where they name none.

    Raises:
        ConfigError: if `allocation_mode` and a `backend` contradict each other.
    """
    named = {role: getattr(_section(run, role), "backend", None) for role in ("rollout", "trainer")}
    backends = {role: text for role, text in named.items() if text is not None}
    per_role = Allocation.parse_roles(backends) if backends else None
    if run.allocation_mode is None:
        return per_role
    whole = Allocation.parse(run.allocation_mode)
    for role, text in backends.items():
        one: Side | None = getattr(whole, role)
        other: Side = getattr(per_role, role)
        if one is None or one.dimensions != other.dimensions or other.backend not in ("", one.backend):
            raise ConfigError(
                f"allocation_mode {run.allocation_mode!r} and {role}.backend {text!r} say different things: remove one of them"
            )
    return whole


def allocated(run: _Run) -> _Run:
    """Settings in which engines and trainer have the dimensions of the allocation; unchanged where there is none.

    Raises:
        ConfigError: if a setting that was given contradicts it; the message names both.
    """
    allocation = allocation_of(run)
    if allocation is None:
        return run
    updates: dict[str, Any] = {}
    trainer, rollout = _section(run, "trainer"), _section(run, "rollout")
    if allocation.trainer is not None and trainer is not None:
        sized = _trainer(trainer, allocation.trainer.dimensions, _source(run, "trainer"))
        updates["trainer"] = _checked(sized, _source(run, "trainer"))
    if allocation.rollout is not None and rollout is not None:
        updates["rollout"] = _rollout(rollout, allocation.rollout, _source(run, "rollout"))
    return run.model_copy(update=updates)


def _section(run: CommonConfig, name: str) -> Section | None:
    """The table of a service; None where its package is not installed."""
    section = getattr(run, name, None)
    return section if isinstance(section, Section) else None


def _source(run: CommonConfig, role: str) -> str:
    """The setting that speaks for a role, for messages."""
    if run.allocation_mode is not None:
        return f"allocation_mode {run.allocation_mode!r}"
    return f"{role}.backend {getattr(_section(run, role), 'backend', None)!r}"


def _trainer(trainer: Section, dimensions: Dimensions, source: str) -> Section:
    parallel: Section = getattr(trainer, "parallel")  # noqa: B009 - a field of a package that this one does not import
    given = {name: getattr(parallel, name) for name in parallel.model_fields_set}
    for name, size in (("tp", dimensions.tensor), ("cp", dimensions.context), ("pp", dimensions.pipeline)):
        if given.get(name, size) != size:
            raise _contradiction(source, f"{name} = {size}", f"trainer.parallel.{name}", given[name])
    shard = given.get("dp_shard", -1)
    replicate = given.get("dp_replicate", 1 if shard == -1 else max(1, dimensions.data // shard))
    if dimensions.data % replicate or shard not in (-1, dimensions.data // replicate):
        written = f"{replicate} x {'the rest' if shard == -1 else shard}"
        raise _contradiction(source, f"d{dimensions.data}", "trainer.parallel.dp_replicate x dp_shard", written)
    sizes = {
        "dp_replicate": replicate,
        "dp_shard": dimensions.data // replicate,
        "tp": dimensions.tensor,
        "cp": dimensions.context,
        "pp": dimensions.pipeline,
    }
    return trainer.model_copy(update={"parallel": parallel.model_copy(update=sizes)})


def _rollout(rollout: Section, side: Side, source: str) -> Section:
    settings = rollout.model_dump(include={"engine", "engine_args"})
    engine, arguments = settings["engine"], dict(settings["engine_args"])
    if side.backend and side.backend != engine:
        if "engine" in rollout.model_fields_set:
            raise _contradiction(source, side.backend, "rollout.engine", engine)
        engine = side.backend
    tensor = side.dimensions.tensor
    if engine != "vllm" and tensor > 1:
        raise _contradiction(source, f"t{tensor}", "rollout.engine", f"{engine}, which has one device per replica")
    for name, size in (("tensor_parallel_size", tensor), ("pipeline_parallel_size", 1), ("data_parallel_size", 1)):
        if arguments.get(name, size) != size:
            raise _contradiction(source, f"{name} = {size}", f"rollout.engine_args.{name}", arguments[name])
    if tensor > 1:
        arguments["tensor_parallel_size"] = tensor
    return rollout.model_copy(update={"engine": engine, "engine_args": arguments})


def _checked(section: Section, source: str) -> Section:
    """A table whose sizes the allocation set, with the rules applied that settings of a file go through."""
    try:
        return type(section).model_validate(section.model_dump(exclude_unset=True))
    except ValidationError as error:
        reasons = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
        raise ConfigError(f"{source}: {reasons}") from error


def _contradiction(source: str, wants: str, setting: str, value: object) -> ConfigError:
    return ConfigError(f"{source} wants {wants}, but {setting} is {value}: remove one of the two settings")
