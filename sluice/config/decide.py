"""Decisions that concern several services of a run: sizes from the allocation, values of `auto`, and tables that contradict each other.

The last section counts the devices of this machine, since the decisions depend on them.

The engine must sample from the weights that the trainer computes with. If the engine keeps bfloat16 weights and the trainer computes
in float32, an update smaller than half a bfloat16 step never reaches the engine: the policy does not learn, or drifts.

A service may come from another package. Decisions about its table are made only if its class derives from the class in
`sluice.config.tables`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from sluice.config.allocation import Allocation, Dimensions, Side
from sluice.config.schema import OWN_WORKFLOWS, CommonConfig, Section, check_repeatable, not_repeatable
from sluice.config.tables import (
    RolloutTable,
    TrainerTable,
    agents_of,
    environments_of,
    orchestrator_of,
    rollout_of,
    trainer_of,
)
from sluice.engines import ENGINES
from sluice.errors import ConfigError
from sluice.models import sizes_on_disk

_Run = TypeVar("_Run", bound=CommonConfig)
_Table = TypeVar("_Table", bound=Section)

_TRAINED = ("float32", "bfloat16")
"""Precisions that a trainer can compute in. An engine can use further ones."""

_VLLM_DTYPES: dict[str, str] = {name: name for name in (*_TRAINED, "float16")} | {"float": "float32", "half": "float16"}
"""Our name of each value of vLLM's argument `dtype`."""

EXTERNAL = "external"
"""The workflow whose episodes agents play."""

IN_BATCH = "batch"
"""Value that stands in the trainer's table in place of a model: each trajectory has the log-probabilities."""


VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Variable that names the devices a process may use."""

_NVML = "libnvidia-ml.so.1"
"""NVIDIA's management library, which comes with the driver. It counts devices without loading PyTorch."""


def allocation_of(run: CommonConfig) -> Allocation | None:
    """Return the allocation that the settings name; None if they name none.

    Raises:
        ConfigError: if `allocation_mode` and a `backend` contradict each other.
    """
    named = {"rollout": rollout_of(run), "trainer": trainer_of(run)}
    backends = {role: table.backend for role, table in named.items() if table is not None and table.backend is not None}
    per_role = Allocation.parse_roles(backends) if backends else None
    if run.allocation_mode is None:
        return per_role
    whole = Allocation.parse(run.allocation_mode)
    for role, text in backends.items():
        one, other = (getattr(each, role) for each in (whole, Allocation.parse_roles({role: text})))
        if one is None or one.dimensions != other.dimensions or other.backend not in ("", one.backend):
            raise ConfigError(
                f"allocation_mode {run.allocation_mode!r} and {role}.backend {text!r} contradict each other: remove one of them"
            )
    return whole


def allocated(run: _Run) -> _Run:
    """Set the dimensions of engines and trainer from the allocation; without one, return the settings unchanged.

    Raises:
        ConfigError: if an explicit setting contradicts the allocation; the message names both.
    """
    allocation = allocation_of(run)
    if allocation is None:
        return run
    updates: dict[str, Any] = {}
    trainer, rollout = trainer_of(run), rollout_of(run)
    if allocation.trainer is not None and trainer is not None:
        source = _source(run, "trainer", trainer.backend)
        updates["trainer"] = _checked(_trainer(trainer, allocation.trainer.dimensions, source), source)
    if allocation.rollout is not None and rollout is not None:
        updates["rollout"] = _rollout(rollout, allocation.rollout, _source(run, "rollout", rollout.backend))
    return run.model_copy(update=updates)


def _source(run: CommonConfig, role: str, backend: str | None) -> str:
    """Return the setting that sizes a role, for messages."""
    return f"{role}.backend {backend!r}" if run.allocation_mode is None else f"allocation_mode {run.allocation_mode!r}"


def _trainer(trainer: TrainerTable, dimensions: Dimensions, source: str) -> TrainerTable:
    parallel = trainer.parallel
    given = parallel.model_dump(exclude_unset=True)
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


def _rollout(rollout: RolloutTable, side: Side, source: str) -> RolloutTable:
    engine, arguments = rollout.engine, dict(rollout.engine_args)
    if side.backend and side.backend != engine:
        if "engine" in rollout.model_fields_set:
            raise _contradiction(source, side.backend, "rollout.engine", engine)
        engine = side.backend
    tensor = side.dimensions.tensor
    if tensor > 1 and not ENGINES[engine].several_devices:
        raise _contradiction(source, f"t{tensor}", "rollout.engine", f"{engine}, which has one device per replica")
    for name, size in (("tensor_parallel_size", tensor), ("pipeline_parallel_size", 1), ("data_parallel_size", 1)):
        if arguments.get(name, size) != size:
            raise _contradiction(source, f"{name} = {size}", f"rollout.engine_args.{name}", arguments[name])
    if tensor > 1:
        arguments["tensor_parallel_size"] = tensor
    return rollout.model_copy(update={"engine": engine, "engine_args": arguments})


def _checked(section: Section, source: str) -> Section:
    """Validate a table after the allocation set its sizes."""
    try:
        return type(section).model_validate(section.model_dump(exclude_unset=True))
    except ValidationError as error:
        reasons = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
        raise ConfigError(f"{source}: {reasons}") from error


def _contradiction(source: str, wants: str, setting: str, value: object) -> ConfigError:
    return ConfigError(f"{source} wants {wants}, but {setting} is {value}: remove one of the two settings")


def repeatable(run: _Run) -> _Run:
    """If the run is deterministic, return its settings with the values that this needs. Return any other run unchanged.

    Raises:
        ConfigError: if an explicit setting contradicts such a value.
    """
    if not run.deterministic:
        return run
    check_repeatable(run, "max_staleness", 0)
    if len(run.peers.rollout) > 1:
        raise not_repeatable("peers.rollout", f"{len(run.peers.rollout)} replicas", "one replica")
    updates: dict[str, Any] = {"max_staleness": 0}
    for name, table in (
        ("rollout", rollout_of(run)),
        ("trainer", trainer_of(run)),
        ("orchestrator", orchestrator_of(run)),
    ):
        if table is not None:
            updates[name] = table.repeatable()
    return run.model_copy(update=updates)


def played(run: _Run) -> tuple[_Run, tuple[str, ...]]:
    """Let the agents of `agents.agent` play the episodes of a run, unless an environment has the workflow `external` already.

    Returns:
        The settings, and one line per decision.

    Raises:
        ConfigError: if every environment sets another workflow.
    """
    run, notes = _playing(run)
    agents, orchestrator = agents_of(run), orchestrator_of(run)
    if agents is None or orchestrator is None or not agents.agent:
        return run, notes
    if any(each.workflow == EXTERNAL for each in orchestrator.mix):
        return run, notes
    data = orchestrator.model_dump(exclude_unset=True)
    free = [each for each in data.get("environments") or [data] if each.get("workflow", "auto") == "auto"]
    if not free:
        raise ConfigError(
            f"agents.agent is {agents.agent}, but no environment of the run has workflow = {EXTERNAL!r}: set it, or leave the workflow out"
        )
    for each in free:
        each["workflow"] = EXTERNAL
    note = f"orchestrator.workflow = {EXTERNAL} (auto: {agents.agent} plays the episodes)"
    return run.model_copy(update={"orchestrator": type(orchestrator).model_validate(data)}), (*notes, note)


def _playing(run: _Run) -> tuple[_Run, tuple[str, ...]]:
    """Make an environment that plays its episodes itself the agent of the run, unless `agents.agent` is set.

    Raises:
        ConfigError: if several environments play their episodes themselves.
    """
    agents = agents_of(run)
    if agents is None or agents.agent:
        return run, ()
    playing = [each for each in environments_of(run) if each.plays()]
    if not playing:
        return run, ()
    if len(playing) > 1:
        raise ConfigError(
            f"{len(playing)} environments of the run play their episodes themselves, and one can: leave the others to agents of"
            " your own (docs/external-episodes.md)"
        )
    (one,) = playing
    data = agents.model_dump(exclude_unset=True)
    data |= {
        "agent": one.environment,
        "args": one.args,
        "environment_processes": one.environment_processes.model_dump(),
    }
    note = f"agents.agent = {one.environment} (it plays its episodes itself)"
    return run.model_copy(update={"agents": type(agents).model_validate(data)}), (note,)


def decided(run: _Run, *, cuda: bool, memory: int | None = None) -> tuple[_Run, tuple[str, ...]]:
    """Replace every `auto` that concerns both the trainer and the engine, or depends on memory. Explicit settings stay as they are.

    Args:
        run: The settings, with the dimensions of the allocation.
        cuda: Whether there is a CUDA device. Services on other hosts are assumed to have the same kind of device.
        memory: Bytes of the smallest CUDA device of the trainer; None if unknown.

    Returns:
        The settings, and one line per decision: the setting, its value and the reason.
    """
    trainer, rollout = trainer_of(run), rollout_of(run)
    if trainer is None or rollout is None:
        return run, ()
    notes: list[str] = []
    precision = _precision(trainer, rollout, cuda=cuda)
    merge = _merge(trainer, rollout, cuda=cuda)
    trainer = _replaced(trainer, "trainer", precision["trainer"] | merge, notes)
    rollout = _replaced(rollout, "rollout", precision["rollout"], notes)
    run = run.model_copy(
        update={"trainer": trainer, "rollout": rollout}
    )  # the memory of the trainer depends on its precision
    fitting = _replaced(trainer, "trainer", trainer.fitted(run, cuda=cuda, memory=memory), notes)
    return run.model_copy(update={"trainer": fitting}), tuple(notes)


PROMPT_TOKENS = 1024
"""Length of a prompt, in tokens, for which there must be room besides a response."""


def least_sample(run: CommonConfig) -> int:
    """Return the length of a sample, in tokens, for which a run must have room.

    That is a prompt of `PROMPT_TOKENS` and the longest response of its environments, or the model's longest sequence if that is shorter.
    """
    least = PROMPT_TOKENS + max((each.sampling.max_tokens for each in environments_of(run)), default=0)
    sizes = sizes_on_disk(run.model)
    return min(least, (sizes and sizes.positions) or least)


def _precision(
    trainer: TrainerTable, rollout: RolloutTable, *, cuda: bool
) -> Mapping[str, dict[str, tuple[object, str]]]:
    """Return, with reasons, the precisions to use for the trainer, published weights and the engine if these are `auto`."""
    if not rollout.follow_weights:
        return {"trainer": {}, "rollout": {}}
    computes, sampled = trainer.dtype, rollout.dtype
    if sampled == "auto":  # vLLM's own argument overrides ours
        sampled = _VLLM_DTYPES.get(rollout.engine_args.get("dtype", "auto"), "auto")
    reason = f"rollout.dtype is {sampled}"
    if computes == "auto":
        if sampled in _TRAINED:
            computes = sampled
        else:
            on_cuda = cuda and trainer.device != "cpu"
            computes = "bfloat16" if on_cuda else "float32"
            reason = f"the trainer is on {'CUDA' if on_cuda else 'a CPU'}"
    engine = computes if sampled == "auto" else sampled
    same = f"the trainer computes in {computes}, and both sides must use the same weights"
    return {
        "trainer": {"dtype": (computes, reason), "publish_dtype": (engine, f"the engine holds {engine}")},
        "rollout": {"dtype": (engine, same)},
    }


def _merge(trainer: TrainerTable, rollout: RolloutTable, *, cuda: bool) -> dict[str, tuple[object, str]]:
    """Return whether to publish an adapter merged if that is `auto`, with the reason."""
    if not trainer.lora.rank:
        return {}
    if cuda and rollout.uses_devices():
        return {"lora.merge": (False, "the engine is on CUDA, where it serves adapters at full speed")}
    return {"lora.merge": (True, "the engine is on a CPU, where it samples with an adapter at a third of its speed")}


def _replaced(table: _Table, path: str, values: Mapping[str, tuple[object, str]], notes: list[str]) -> _Table:
    """Return the table with each value in place of an `auto`, and note each replacement."""
    updates: dict[str, object] = {}
    for name, (value, reason) in values.items():
        inner, _, rest = name.partition(".")
        held = dict(table)[inner]
        if rest:
            updates[inner] = _replaced(held, f"{path}.{inner}", {rest: (value, reason)}, notes)
        elif held == "auto":
            updates[inner] = value
            shown = str(value).lower() if isinstance(value, bool) else value
            notes.append(f"{path}.{inner} = {shown} (auto: {reason})")
    return table.model_copy(update=updates)


def check_tables_fit(run: CommonConfig) -> None:
    """Refuse settings with which the services would not work together.

    Raises:
        ConfigError: with the settings of both sides, and the remedy.
    """
    _check_adapters(run)
    _check_estimators(run)
    _check_columns(run)
    _check_deadlines(run)


def _check_adapters(run: CommonConfig) -> None:
    """Refuse a trainer that publishes adapters which the replicas do not serve."""
    trainer, rollout = trainer_of(run), rollout_of(run)
    if trainer is None or rollout is None or not trainer.lora.rank or trainer.lora.merge is True:
        return
    trained, served = trainer.lora, rollout.lora
    if not served.enabled or served.max_rank < trained.rank:
        raise ConfigError(
            f"trainer.lora.rank = {trained.rank} publishes adapters, which the replicas would refuse: set rollout.lora.enabled = true"
            f" and rollout.lora.max_rank = {trained.rank} or higher, or trainer.lora.merge = true to publish whole weights"
        )


def _check_estimators(run: CommonConfig) -> None:
    """Refuse settings that estimate advantages on both sides, or on neither."""
    trainer = trainer_of(run)
    if trainer is None:
        return
    objectives = trainer.all_objectives
    for each in environments_of(run):
        try:
            check_objective(each.name, each.objective, objectives)
            objective = objectives[each.objective]
            check_sides(each.advantage, objective.advantage if objective.runs_estimator else "")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if each.advantage == "none" and objective.advantage:
            raise ConfigError(
                f"orchestrator.advantage is none, but objective {objective.name} reads advantages: set it to {objective.advantage},"
                " or choose another trainer.objective"
            )


def _check_deadlines(run: CommonConfig) -> None:
    """Refuse an orchestrator that gives a trainer up before the trainer's own deadlines act."""
    trainer, orchestrator = trainer_of(run), orchestrator_of(run)
    if trainer is None or orchestrator is None:
        return
    own, of_trainer = orchestrator.deadlines, trainer.deadlines
    # The step, comparing the weights, the push, a checkpoint.
    longest = 2 * of_trainer.step_s + of_trainer.push_s + of_trainer.save_s
    if own.step_s < longest:
        raise ConfigError(
            f"orchestrator.deadlines.step_s = {own.step_s:g} would give the trainer up before its own deadlines act, which allow"
            f" {longest:g} s from one report to the next (twice trainer.deadlines.step_s, push_s and save_s): set it to"
            f" {longest:g} or more, or lower those"
        )


def check_objective(environment: str, objective: str, known: Iterable[str]) -> None:
    """Check that the trainer has the objective that an environment names; an empty name is the trainer's own.

    Raises:
        ValueError: with the remedy.
    """
    if objective and objective not in known:
        named = ", ".join(name for name in known if name) or "none"
        raise ValueError(
            f"environment {environment} names the objective {objective!r}, but trainer.objectives has {named}: add the table"
            f" trainer.objectives.{objective}, or correct the name"
        )


def check_sides(advantage: str, own: str) -> None:
    """Check that orchestrator and trainer agree on which of them estimates advantages.

    Args:
        advantage: `orchestrator.advantage`.
        own: The estimator that the trainer runs for its objective; empty for none.

    Raises:
        ValueError: with the remedy.
    """
    from sluice.advantages import TRAINER_ESTIMATORS  # noqa: PLC0415 - brings numpy, which `sluice --help` need not load

    if advantage != own and (own or advantage in TRAINER_ESTIMATORS):
        raise ValueError(
            f"orchestrator.advantage is {advantage}, but the trainer's objective computes {own or 'no advantages by itself'}: "
            f"set orchestrator.advantage to {own or 'an estimator that needs only rewards'}, or choose another trainer.objective"
        )


def _check_columns(run: CommonConfig) -> None:
    """Refuse a trainer that expects log-probabilities which the orchestrator's workflows do not provide."""
    trainer = trainer_of(run)
    if trainer is None or all(each.workflow not in OWN_WORKFLOWS for each in environments_of(run)):
        return
    for name, frozen in (("reference", trainer.reference), ("teacher", trainer.teacher)):
        if frozen.model == IN_BATCH:
            raise ConfigError(
                f"trainer.{name}.model is {IN_BATCH}, but trajectories of this run's workflow bring no log-probabilities of a {name}: set"
                f" it to a model, or orchestrator.workflow to one of your own that brings them"
            )


class _MemoryInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def visible_devices(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the devices that a process with this environment may use, as in `CUDA_VISIBLE_DEVICES`."""
    given = environment.get(VISIBLE)
    if given is None:
        return tuple(str(number) for number, _ in enumerate(_memories()))
    names = [name.strip() for name in given.split(",")]
    # CUDA ignores everything after the first invalid name.
    end = next((place for place, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
    return tuple(names[:end])


_assumed: list[int | None] = []
"""Bytes of memory per device, as the last call of `assume_devices` gave it."""


def assume_devices(number: int, memory: int | None) -> None:
    """Let this process check and decide from now on for machines with `number` devices, whatever devices this machine has.

    Args:
        number: Devices of each machine.
        memory: Bytes of the smallest device; None if unknown.
    """
    os.environ[VISIBLE] = ",".join(map(str, range(number)))
    _assumed[:] = [memory]


def smallest_memory() -> int | None:
    """Return the bytes of the smallest device that the driver knows, or that `assume_devices` gave; None if unknown."""
    if _assumed:
        return _assumed[0]
    return min(filter(None, _memories()), default=None)


def _memories() -> list[int]:
    """Return the bytes of memory of each device that the driver knows, 0 if it does not say; an empty list without a driver."""
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return []
    count, memories = ctypes.c_uint(), []
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    for number in range(count.value):
        device, info = ctypes.c_void_p(), _MemoryInfo()
        found = nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) == 0
        known = found and nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(info)) == 0
        memories.append(int(info.total) if known else 0)
    nvml.nvmlShutdown()
    return memories
