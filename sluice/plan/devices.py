"""Decide how replicas and trainer use the GPUs of a run if the settings leave that open. Pure.

Several GPUs are divided between both sides: the result is an allocation, as in `allocation_mode`. If both sides use the same GPU, its
memory is divided: the trainer gets what a step is estimated to need, and the engine takes the rest when it starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sluice.config import ConfigError, RunConfig, allocated, allocation_of
from sluice.config.allocation import Allocation, Dimensions, Side
from sluice.config.decide import decided, least_sample
from sluice.config.footprint import GIB, USABLE, Footprint, most_that_fit
from sluice.config.tables import rollout_of, trainer_of
from sluice.engines import ENGINES
from sluice.models import sizes_on_disk
from sluice.plan.machines import GB, Machines
from sluice.plan.placement import DoesNotFitError, Sizes, on_devices

SHARE = "gpu_memory_utilization"
"""vLLM's name for the fraction of a device's memory that an engine takes."""

SIDES = ("trainer", "rollout")
"""The services that compute on GPUs."""

ENOUGH_TOKENS = 65_536
"""Size of a KV cache, in tokens, with which an engine samples at full speed: room for a few dozen samples at a time."""

MOST_TRIED = 64
"""Up to this many devices in all, the trainer may get any number of them. With more devices it gets whole machines."""

ROUNDING = 1e-3
"""An engine's fraction of a device's memory is rounded down to a multiple of this."""

CACHE_BYTES = GIB
"""Bytes of the KV cache of the transformers engine, unless `rollout.kv_cache_bytes` is set."""


@dataclass(frozen=True, slots=True)
class Arranged:
    """The settings of a run with what was decided about its devices.

    Attributes:
        notes: One line per decision: the setting, its value and the reason.
        flags: The same decisions as flags, for services that read the settings again elsewhere.
    """

    run: RunConfig
    notes: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


def arrange(run: RunConfig, machines: Machines, *, replicas: int | None = None, divide: bool = True) -> Arranged:
    """Decide how a run that trains uses the GPUs of the machines.

    Divide the GPUs between both sides, or the memory of GPUs that both sides use, and bound the length of samples. Values in the settings
    stay as they are. Nothing is decided for machines without GPUs.

    Args:
        run: The settings as they were read.
        machines: Where the run starts.
        replicas: The value of `--replicas`. None: the number in the settings.
        divide: Whether the run may take all GPUs of the machines, and whether both sides may use the same GPU.

    Raises:
        ConfigError: if no division fits; with the numbers and what to change.
    """
    on_devices = all(each is not None and each.uses_devices() for each in (trainer_of(run), rollout_of(run)))
    if not any(machines.devices) or not on_devices:
        return Arranged(run)
    allocation, count = allocation_of(run), sum(machines.devices)
    if divide and (allocation.shared if allocation is not None else count == 1):
        done = _shared(run, machines, 1 if allocation is not None else replicas or len(run.peers.rollout) or 1)
        return _with_longest(done, dict.fromkeys(SIDES, machines.device_bytes))
    done = Arranged(run)
    if divide and allocation is None and count > 1 and not run.deterministic:
        done = _divided(run, machines, replicas)
        allocation = allocation_of(done.run)
    if allocation is None or allocation.rollout is None or allocation.trainer is None or allocation.shared:
        return done
    return _with_longest(done, _memories(machines, allocation))


def _divided(run: RunConfig, machines: Machines, replicas: int | None) -> Arranged:
    """Choose an allocation that uses every GPU: half for each side if a training step fits then, otherwise more for the trainer."""
    count, refused = sum(machines.devices), ""
    lesser: tuple[int, Allocation] | None = None
    for allocation in _allocations(run, machines, replicas):
        try:
            held, compromises = _needs(run, machines, allocation)
        except ConfigError as error:
            refused = refused or f"{allocation}: {error}"
            continue
        if not compromises:
            return _with_allocation(run, allocation, count, held)
        if lesser is None or compromises < lesser[0]:
            lesser = compromises, allocation
    if lesser is not None:
        return _with_allocation(run, lesser[1], count, _needs(run, machines, lesser[1])[0])
    if refused:
        raise ConfigError(
            f"{count} GPUs cannot be divided between replicas and trainer so that both fit. With allocation_mode = {refused}"
        )
    _check_room(run, machines, replicas)
    return Arranged(run)  # the settings fix all sizes and leave some devices unused, which the plan reports


def _check_room(run: RunConfig, machines: Machines, replicas: int | None) -> None:
    """Refuse sizes that need more GPUs than there are.

    Raises:
        ConfigError: with the numbers.
    """
    rollout, trainer, count = _table(run, "rollout"), _table(run, "trainer"), sum(machines.devices)
    engines, ranks = replicas or len(run.peers.rollout) or 1, trainer.processes()
    needed = engines * rollout.processes() + ranks
    if needed > count:
        each = "" if rollout.processes() == 1 else f" of {rollout.processes()} GPUs each"
        raise ConfigError(
            f"{engines} replica{'s' * (engines > 1)}{each} and a trainer of {ranks} process{'es' * (ranks > 1)} need {needed} GPUs, and there"
            f" are {count}: start fewer replicas, lower the axes of trainer.parallel, or let both sides use each GPU, as in"
            f" allocation_mode = d{count}"
        )


def _with_allocation(run: RunConfig, allocation: Allocation, count: int, held: dict[str, Footprint]) -> Arranged:
    needs = "".join(f"; {each.what} needs {each.device / GIB:.1f} GiB on each" for each in held.values())
    note = f"allocation_mode = {allocation} (auto: {count} GPUs, and no setting divides them{needs})"
    return Arranged(
        run.model_copy(update={"allocation_mode": str(allocation)}), (note,), ("--allocation-mode", str(allocation))
    )


def _allocations(run: RunConfig, machines: Machines, replicas: int | None) -> Iterator[Allocation]:
    """Yield the allocations that use every GPU and agree with the settings, the best first."""
    rollout, parallel = _table(run, "rollout"), _table(run, "trainer").parallel
    arguments, engine = rollout.engine_args, ENGINES[rollout.engine]
    if any(arguments.get(name, 1) != 1 for name in ("pipeline_parallel_size", "data_parallel_size")):
        return
    named = replicas or (len(run.peers.rollout) if "rollout" in run.peers.model_fields_set else None)
    count, node = sum(machines.devices), max(machines.devices)
    fixed = parallel.tp * parallel.cp * parallel.pp
    ranks = fixed * parallel.dp_replicate * parallel.dp_shard if parallel.dp_shard > 0 else None
    given = arguments.get("tensor_parallel_size")
    tensors = (
        [given] if given else [1 << power for power in range(node.bit_length())] if engine.several_devices else [1]
    )
    step = math.lcm(fixed * parallel.dp_replicate, 1 if count <= MOST_TRIED else node)
    for tensor in tensors:
        trained = (
            [ranks] if ranks else sorted(range(step, count, step), key=lambda each: (abs(2 * each - count), -each))
        )
        for each in trained:
            groups, over = divmod(count - each, tensor)
            if over or groups < 1 or named not in (None, groups):
                continue
            sizes = Sizes(groups, tensor, each, parallel.tp)
            try:
                on_devices(sizes, machines.devices)
            except DoesNotFitError:
                continue
            yield Allocation(
                Side(Dimensions(data=groups, tensor=tensor), rollout.engine),
                Side(Dimensions(each // fixed, parallel.tp, parallel.cp, parallel.pp), "fsdp"),
            )


def _memories(machines: Machines, allocation: Allocation) -> dict[str, int | None]:
    """Return, by service, the memory in bytes of the smallest GPU that it gets; None if unknown."""
    rollout, trainer = allocation.rollout, allocation.trainer
    if rollout is None or trainer is None:
        raise AssertionError("both sides have GPUs of their own")
    own = trainer.dimensions
    ranks = own.data * own.tensor * own.context * own.pipeline
    sizes = Sizes(rollout.dimensions.data, rollout.dimensions.tensor, ranks, own.tensor)
    spots = dict(zip(("rollout", "trainer"), on_devices(sizes, machines.devices), strict=True))
    return {
        name: Machines(tuple(machines.each[spot.node] for spot in each)).device_bytes for name, each in spots.items()
    }


def _needs(run: RunConfig, machines: Machines, allocation: Allocation) -> tuple[dict[str, Footprint], int]:
    """Return the memory that each side needs with an allocation, and the number of compromises.

    A compromise is to keep optimizer moments on the host, or an engine with a KV cache smaller than `ENOUGH_TOKENS`.

    Raises:
        ConfigError: if a side does not fit on a device, the model cannot be trained in that number of processes, or the settings
            contradict the allocation.
    """
    memories = _memories(machines, allocation)
    sized = allocated(run.model_copy(update={"allocation_mode": str(allocation)}))
    tried, _ = decided(sized, cuda=True, memory=memories["trainer"])
    tried.section("trainer").check_trainable(tried)
    longest = _longest(tried, memories) if _is_open(tried) else None
    bounded = _with_length(tried, longest[0]) if longest is not None and longest[0] >= least_sample(tried) else tried
    held = {}
    for name, each in (("trainer", tried), ("rollout", bounded)):
        footprint = each.section(name).footprint(each, cuda=True)
        if footprint is not None:
            footprint.check(memories[name])
            held[name] = footprint
    before = _table(run, "trainer").optimizer_offload
    offloads = _table(tried, "trainer").optimizer_offload is True and before == "auto"
    room = _table(tried, "rollout").cache_tokens(tried, cuda=True, memory=memories["rollout"])
    return held, offloads + (room is not None and room < ENOUGH_TOKENS)


def _longest(run: RunConfig, memories: Mapping[str, int | None]) -> tuple[int, str] | None:
    """Return the longest sample, in tokens, that memory allows, and the side that limits it; None if memory allows what the model allows."""
    found = {name: _table(run, name).longest_sample(run, cuda=True, memory=memories[name]) for name in SIDES}
    return min(((most, name) for name, most in found.items() if most is not None), default=None)


def _with_longest(done: Arranged, memories: Mapping[str, int | None]) -> Arranged:
    """Bound the samples of a run by the memory of both sides, unless the settings bound them, or not even `least_sample` would fit."""
    if not _is_open(done.run):
        return done
    # Keep only the length from these settings: each service makes the other decisions again, on its own machine.
    sized, _ = decided(allocated(done.run), cuda=True, memory=memories["trainer"])
    found = _longest(sized, memories)
    if found is None or found[0] < least_sample(sized):
        return done  # a later check refuses what does not fit at all, with the numbers
    longest, side = found
    why = "the engine" if side == "rollout" else "a training step"
    note = (
        f"rollout.max_model_len = {longest} (auto: {why} has no memory for longer samples, which the model would allow)"
    )
    return Arranged(
        _with_length(done.run, longest), (*done.notes, note), (*done.flags, "--rollout.max-model-len", str(longest))
    )


def _shared(run: RunConfig, machines: Machines, replicas: int) -> Arranged:
    """Divide the memory of each GPU between the trainer and the engines of `replicas` replicas on it.

    An engine gets room for one sample of the model's longest length, or of `least_sample` tokens if that does not fit.

    Raises:
        ConfigError: if a training step does not fit next to an engine with its weights and one sample.
    """
    try:
        whole = _by_memory(run, machines, replicas, run)
    except ConfigError:
        if not _is_open(run):
            raise
        whole = None
    if whole is not None and not (_is_open(run) and _offloads(whole.run, machines)):
        return whole
    short = _by_memory(run, machines, replicas, _with_length(run, least_sample(run)))
    return short if whole is None or not _offloads(short.run, machines) else whole


def _offloads(run: RunConfig, machines: Machines) -> bool:
    """Return whether the trainer keeps optimizer moments on the host because its share of the device's memory is too small."""
    sized, _ = decided(allocated(run), cuda=True, memory=machines.device_bytes)
    return _table(run, "trainer").optimizer_offload == "auto" and _table(sized, "trainer").optimizer_offload is True


def _by_memory(run: RunConfig, machines: Machines, replicas: int, least_run: RunConfig) -> Arranged:
    """Divide the memory as `_shared` describes. An engine's smallest share is estimated from the settings `least_run`.

    Raises:
        ConfigError: if the two sides do not fit together.
    """
    rollout, trainer = _table(run, "rollout"), _table(run, "trainer")
    memory, vllm = machines.device_bytes, rollout.engine == "vllm"
    share = rollout.engine_args.get(SHARE) if vllm else None
    sized, _ = decided(allocated(run), cuda=True)
    least_sized, _ = decided(allocated(least_run), cuda=True)
    engine = least_sized.section("rollout").footprint(least_sized, cuda=True)
    if memory is None or engine is None or sized.section("trainer").footprint(sized, cuda=True) is None:
        if share is not None or not vllm:
            return Arranged(run)
        share = math.floor(USABLE / 2 / replicas / ROUNDING) * ROUNDING
        reason = (
            "the trainer uses the same GPU, and its memory or the sizes of the model are not known here: half for each"
        )
        return _with_share(run, share, reason)
    least = replicas * (engine.device + (0 if vllm else rollout.kv_cache_bytes or CACHE_BYTES))
    taken = replicas * share * memory if share is not None else least
    room = USABLE * memory - taken - (0 if share is not None else memory * ROUNDING)
    limit = min(room, (trainer.device_memory_gb or math.inf) * GB)
    given = trainer.model_copy(update={"device_memory_gb": max(1.0, limit) / GB})
    sized, _ = decided(allocated(run.model_copy(update={"trainer": given})), cuda=True, memory=memory)
    step = _step(sized, min(limit, USABLE * memory / 2))
    if step is None:
        raise AssertionError("it was estimated before")
    if step.device > limit or taken < least:
        engines = "the engine" if replicas == 1 else f"{replicas} engines"
        engine_needs = f"{least / GIB:.1f} GiB ({engine.parts})"
        if share is not None:
            engine_needs += f" and rollout.engine_args.{SHARE} = {share:g} gives it {taken / GIB:.1f} GiB"
        raise ConfigError(
            f"the trainer and {engines} share each GPU of {memory / GIB:.1f} GiB, of which {USABLE:.0%} may be used: a training step is estimated"
            f" to need {step.device / GIB:.1f} GiB ({step.parts}), {engines} at least {engine_needs}: {step.remedy};"
            f" or give each side GPUs of its own, as in allocation_mode = {rollout.engine}:d1+fsdp:d1"
        )
    if not vllm or share is not None:
        return _with_limit(Arranged(run), room, trainer)
    kept = step.device if trainer.device_memory_gb is None else limit
    share = math.floor((USABLE - kept / memory - ROUNDING / 10) / replicas / ROUNDING) * ROUNDING
    reason = (
        f"the trainer uses the same GPU and is estimated to need {step.device / GIB:.1f} of {memory / GIB:.1f} GiB; weights and one"
        f" sample need {engine.device / GIB:.1f}"
    )
    return _with_limit(_with_share(run, share, reason), USABLE * memory - replicas * share * memory, trainer)


def _step(run: RunConfig, most: float) -> Footprint | None:
    """Return the memory of a training step with the longest rows that fit into `most` bytes, but at least with rows of `least_sample` tokens."""

    def needs(tokens: int) -> Footprint | None:
        longer = _with_length(run, tokens)
        found: Footprint | None = _table(longer, "trainer").footprint(longer, cuda=True)
        return found

    sizes, least = sizes_on_disk(run.model), least_sample(run)
    if not _is_open(run) or sizes is None or not sizes.positions:
        found: Footprint | None = _table(run, "trainer").footprint(run, cuda=True)
        return found
    whole = needs(sizes.positions)
    if whole is None or whole.device <= most:
        return whole
    return needs(
        max(least, most_that_fit(lambda tokens: held.device if (held := needs(tokens)) else 0, sizes.positions, most))
    )


def _is_open(run: RunConfig) -> bool:
    """Return whether the settings leave open how long samples may be."""
    rollout = _table(run, "rollout")
    return rollout.max_model_len is None and "max_model_len" not in rollout.engine_args


def _with_length(run: RunConfig, longest: int | None) -> RunConfig:
    """Return the settings with a value of `rollout.max_model_len`."""
    rollout = _table(run, "rollout").model_copy(update={"max_model_len": longest})
    return run.model_copy(update={"rollout": rollout})


def _with_share(run: RunConfig, share: float, reason: str) -> Arranged:
    rollout = _table(run, "rollout")
    arguments = {**rollout.engine_args, SHARE: share}
    name = f"rollout.engine_args.{SHARE}"
    return Arranged(
        run.model_copy(update={"rollout": rollout.model_copy(update={"engine_args": arguments})}),
        (f"{name} = {share:g} (auto: {reason})",),
        (f"--rollout.engine-args.{SHARE}", f"{share:g}"),
    )


def _with_limit(done: Arranged, room: float, trainer: Any) -> Arranged:  # noqa: ANN401 - a table of a package that this one does not import
    """Set the memory that the trainer may use on each GPU to what is left, unless the settings say how much it may use."""
    if trainer.device_memory_gb is not None:
        return done
    left = math.floor(room / GB * 1000) / 1000
    run = done.run.model_copy(update={"trainer": trainer.model_copy(update={"device_memory_gb": left})})
    note = f"trainer.device_memory_gb = {left:g} (auto: what the engine leaves of the GPU)"
    return Arranged(run, (*done.notes, note), (*done.flags, "--trainer.device-memory-gb", f"{left:g}"))


def _table(run: RunConfig, service: str) -> Any:  # noqa: ANN401 - as above
    return run.section(service)
