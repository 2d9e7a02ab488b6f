"""Seconds until every receiver has a version, by their number, straight from the service and through two relays."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.weights.models import random_weights
from benchmarks.weights.stack import StagedOnly, WeightStack, receiving, serves, weight_service
from sluice.versions import Version

__all__ = ["measure_fanout"]

RELAYS = 2


@dataclass(frozen=True)
class _Trial:
    """Receivers and what they are sent.

    Attributes:
        root: Takes the versions in.
        targets: Whom the receivers ask, in turn.
        stage_dirs: One per receiver.
        epoch: Of the first version.
        elements: bf16 weights of a version.
        rounds: Versions pushed.
    """

    root: WeightStack
    targets: Sequence[str]
    stage_dirs: Sequence[Path]
    epoch: int
    elements: int
    rounds: int


async def measure_fanout(
    directory: Path, shared: Path, *, elements: int, counts: Sequence[int], rounds: int
) -> Mapping[str, float]:
    """Median seconds from push to the last receiver, by way and number of receivers.

    Every receiver has a staging directory of its own, as on a host of its own, except in "one_host".

    Args:
        directory: On disk, for the services.
        shared: In shared memory, for what is staged.
        elements: bf16 weights of a version.
        counts: Numbers of receivers.
        rounds: Versions pushed for each.
    """
    seconds: dict[str, float] = {}
    async with contextlib.AsyncExitStack() as stack:
        root = await stack.enter_async_context(weight_service(directory, "--keep=1"))
        relays = [
            await stack.enter_async_context(
                weight_service(directory, "--keep=1", f"--upstream={root.target}", name=f"relay-{index}")
            )
            for index in range(RELAYS)
        ]
        ways = {"direct": [root.target], "relays": [relay.target for relay in relays]}
        epoch = 1
        for way, targets in (*ways.items(), ("one_host", ways["direct"])):
            for count in counts:
                hosts = [shared / (f"host-{index}" if way != "one_host" else "host") for index in range(count)]
                trial = _Trial(root, targets, hosts, epoch, elements, rounds)
                epoch += rounds
                seconds[f"{way}_{count}"] = round(await _until_all(trial), 3)
                print(f"{count} receivers, {way}: {seconds[f'{way}_{count}']:.2f} s", flush=True)
    return seconds


async def _until_all(trial: _Trial) -> float:
    taken = []
    async with contextlib.AsyncExitStack() as stack:
        receivers = [
            await stack.enter_async_context(
                receiving(trial.targets[index % len(trial.targets)], host, StagedOnly(), replica=f"replica-{index}")
            )
            for index, host in enumerate(trial.stage_dirs)
        ]
        for number in range(trial.rounds):
            version = Version(trial.epoch + number, 0)  # each epoch begins with an anchor
            begun = await trial.root.push(version, random_weights(trial.elements, seed=number))
            await serves(receivers, version)
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)
