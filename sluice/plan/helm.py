"""The plan as values of the chart `deploy/helm/sluice`: all values that follow from the settings and the machines.

Values that depend on the cluster (images, storage classes, certificates, node selectors) come from another file of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from sluice.config import ConfigError, RunConfig
from sluice.plan.plan import COMPUTES, Part, Plan

FILES = "/etc/sluice/run"
"""Where the chart mounts `run.files`."""


def helm(plan: Plan, run: RunConfig, settings: Sequence[str]) -> str:
    """Return a file of values: `helm install NAME deploy/helm/sluice -f` reads it.

    Args:
        plan: The plan.
        run: The settings that it was made of.
        settings: Words of the settings. The first file becomes `run.settings`; every part gets the further files and flags.

    Raises:
        ConfigError: if there is no file, a file cannot be read, or parts share GPUs, which pods cannot do.
    """
    return yaml.safe_dump(values(plan, run, settings), sort_keys=False, width=120)


def values(plan: Plan, run: RunConfig, settings: Sequence[str]) -> dict[str, Any]:
    """Return what `helm` returns, as data."""
    if plan.shares_devices and any(part.devices for part in plan.parts):
        raise ConfigError(
            "the replicas and the trainer of this plan share GPUs, and a GPU belongs to one pod: give more with --machines, or an"
            " allocation_mode with both sides, such as `vllm:d4t1+fsdp:d4`"
        )
    files, flags = _read(settings)
    if not files:
        raise ConfigError("a chart needs a file of settings, as in `sluice plan @ rl.toml --as helm`")
    (_, text), *more = files
    words = [word for name, _ in more for word in ("@", f"{FILES}/{name}")] + flags
    found: dict[str, Any] = {"run": {"name": plan.run, "settings": text, "files": dict(more)}}
    for part in plan.parts:
        if part.name == "envserver":
            found["environments"] = [_environment(part, run, words)]
        else:
            found[part.name] = _values(part, words)
    return found


def _values(part: Part, words: Sequence[str]) -> dict[str, Any]:
    given = _common(part, words) | {"port": part.port()}
    if part.name in ("rollout", "gateway"):
        given["httpPort"] = part.port("http")
    if part.scales:
        given["replicas"] = part.count
    if part.name in ("gateway", "relay"):
        given["enabled"] = True
    if part.name in COMPUTES:
        given["gpus"] = part.devices
        given["resources"] |= {"requests": {"cpu": str(part.processes * part.threads)}}
    if part.name == "trainer":
        given |= {"nodes": part.nodes, "processes": part.processes}
        if part.nodes > 1:
            given |= {"rendezvousPort": part.port("rendezvous"), "storage": {"accessModes": ["ReadWriteMany"]}}
    return given


def _environment(part: Part, run: RunConfig, words: Sequence[str]) -> dict[str, Any]:
    table: Any = run.section("envserver")
    return {"name": "served", "source": table.source, "args": table.args, "replicas": part.count} | _common(part, words)


def _common(part: Part, words: Sequence[str]) -> dict[str, Any]:
    """Return the values that every part has. The time to start is in whole seconds, and at least that of one probe."""
    return {
        "drainSeconds": math.ceil(part.drain_s),
        "startSeconds": max(5, math.ceil(part.start_s)),
        "env": {"OMP_NUM_THREADS": part.threads},
        "resources": {"limits": {"memory": f"{part.memory_gib}Gi"}},
    } | ({"flags": list(words)} if words else {})


def _read(settings: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return name and text of each file, and the words after them."""
    files: list[tuple[str, str]] = []
    words = list(settings)
    while words and words[0].startswith("@"):
        path = Path(words.pop(0).removeprefix("@") or (words.pop(0) if words else ""))
        if not files and path.suffix in {".json", ".yaml", ".yml"}:
            raise ConfigError(
                f"{path} is no TOML, and the chart mounts the first file of settings as TOML: write it so"
            )
        try:
            files.append((f"{len(files)}-{path.name}", path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror}; the values hold the text of the settings"
            ) from error
    if any(word.startswith("@") for word in words):
        raise ConfigError("give the files of settings before the flags, so that the values can hold their text")
    return files, words
