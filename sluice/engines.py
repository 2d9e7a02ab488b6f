"""The engines that a replica can sample with.

To add an engine, add a line to `ENGINES` and the package that the line names. The settings and their reference, allocations,
`sluice eval`, the quickstart, the dry run and the placement of processes then know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Engine:
    """What the rest of Sluice must know about an engine before the engine starts.

    Attributes:
        package: Its package, a `rollout_svc.engines.base.EnginePackage`.
        library: The Python module that must be installed.
        several_devices: Whether one replica can use several devices, by `rollout.engine_args`. Otherwise it has one.
        reads_device: Whether `rollout.device` chooses its device. Otherwise it uses CUDA if there is a device.
        parsers: Its module with further parsers of tool calls and reasoning; see `rollout_svc.replies`.
        repeatable: Values of `rollout.engine_args` with which a repeated request gives the same result.
    """

    package: str
    library: str
    several_devices: bool = False
    reads_device: bool = True
    parsers: str | None = None
    repeatable: Mapping[str, object] = field(default_factory=dict)


ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(
        "rollout_svc.engines.vllm",
        "vllm",
        several_devices=True,
        reads_device=False,
        parsers="rollout_svc.engines.vllm.parsers",
        repeatable={"enable_prefix_caching": False, "enable_chunked_prefill": False, "scheduling_policy": "priority"},
    ),
    "transformers": Engine("rollout_svc.engines.slots", "transformers"),
}

if TYPE_CHECKING:
    EngineName: TypeAlias = str
else:
    EngineName = Literal[tuple(ENGINES)]
"""The type of a setting that names an engine."""
