"""`sluice weights ls|show|verify|diff`: look into the versions of a run, and fetch them as an engine would."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import Field

from sluice.config import Command, ConfigError, Section, SecurityConfig, load_command
from sluice.telemetry import configure_logging
from sluice.versions import Version

__all__ = ["COMMAND"]


class WeightsConfig(Section):
    """Settings of `sluice weights`; flat: its keys stand at the top level."""

    address: str = Field("127.0.0.1:7101", description="Address of the weight service or of a relay, as host:port.")
    run: str = Field("default", description="The run.")
    replica: str | None = Field(
        None,
        min_length=1,
        description="Address of a replica, as host:port: `verify` then compares the weights in its memory. Unset: `verify` fetches a version.",
    )
    top: int = Field(10, ge=1, description="Rows of `diff`, tensors that changed most first.")
    deadline_s: float = Field(600.0, gt=0, description="Seconds for the whole command.")
    security: SecurityConfig = Field(default_factory=SecurityConfig, description="Tokens and TLS of the service.")


USAGE = """\
usage: sluice weights ls                     versions of a run, and the replicas that follow it
       sluice weights show [VERSION]         one version: digest, shards, encodings; the newest without VERSION
       sluice weights verify [VERSION]       fetch it as an engine does, and compare every byte with its digests
       sluice weights verify --replica HOST:PORT
                                             compare the weights in a replica's memory with the files of their version
       sluice weights diff VERSION VERSION   what changed from one to the other, tensor by tensor

A version is written epoch.number, such as 1.42. Settings, for all of them:

"""


_ATTEMPTS = 2
"""Streams that may fail before a version counts as damaged."""


def run(argv: list[str]) -> int:
    """Run one verb; 1 if a version turned out to be damaged."""
    words = list(takewhile(lambda word: not word.startswith(("-", "@")), argv))
    settings = argv[len(words) :]
    if {"--help", "-h"} & set(settings):
        print(USAGE, end="")  # noqa: T201 - help goes where it was asked for
        load_command(WeightsConfig, ["--help"], "weights")
    if not words or words[0] not in _VERBS:
        raise ConfigError(f"say what to do first: sluice weights {'|'.join(_VERBS)}; see sluice weights --help")
    verb, least, most = _VERBS[words[0]]
    versions = [_version(word) for word in words[1:]]
    if not least <= len(versions) <= most:
        usual = most if least == most else f"{least} or {most}"
        raise ConfigError(
            f"sluice weights {words[0]} takes {usual} versions, not {len(versions)}; they come before the settings:"
            f" sluice weights {' '.join([words[0], *['1.42'] * most])} --run my-run"
        )
    config = load_command(WeightsConfig, settings, "weights")
    configure_logging("weights", "error")  # what goes wrong is printed
    return asyncio.run(_run(verb, versions, config))


async def _run(verb: Verb, versions: Sequence[Version], config: WeightsConfig) -> int:
    import grpc  # noqa: PLC0415 - `--help` is quick without it

    from sluice.rpc import SluiceError  # noqa: PLC0415

    asked = config.replica or config.address
    try:
        async with asyncio.timeout(config.deadline_s):
            return await verb(config, versions)
    except TimeoutError as error:
        raise ConfigError(f"{asked} did not answer within {config.deadline_s:g} s (--deadline-s)") from error
    except SluiceError as error:
        raise ConfigError(f"{asked}: {error}") from error
    except grpc.aio.AioRpcError as error:
        raise ConfigError(f"{asked}: {SluiceError.from_rpc(error)}") from error
    except OSError as error:
        raise ConfigError(f"{error}; room for whole versions is needed in {tempfile.gettempdir()} (TMPDIR)") from error


async def _list(config: WeightsConfig, _: Sequence[Version]) -> int:
    from rich.console import Console  # noqa: PLC0415

    from sluice.client import WeightSyncClient  # noqa: PLC0415
    from weightsync.inspect.weights_tables import replica_table, version_table  # noqa: PLC0415

    async with WeightSyncClient(config.address, config.security) as client:
        response = await client.versions(config.run)
    console = Console()
    if not response.versions:
        console.print(f"run {config.run} has no versions at {config.address}")
        return 0
    console.print(version_table(response.versions))
    if response.replicas:
        console.print()
        console.print(replica_table(response.replicas))
    return 0


async def _show(config: WeightsConfig, versions: Sequence[Version]) -> int:
    from sluice.client import WeightSyncClient  # noqa: PLC0415
    from weightsync.inspect.weights_tables import describe_version  # noqa: PLC0415

    async with WeightSyncClient(config.address, config.security) as client:
        manifest = await client.manifest(config.run, *versions)
    print("\n".join(describe_version(manifest)))  # noqa: T201
    return 0


async def _verify(config: WeightsConfig, versions: Sequence[Version]) -> int:
    if config.replica is not None:
        return await _verify_replica(config, config.replica, versions)
    from weightsync.receive.pull import PullError  # noqa: PLC0415
    from weightsync.receive.version_file import StagingError  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="sluice-weights-") as scratch:
        try:
            version, digest, size = await _fetch(config, versions[0] if versions else None, Path(scratch, "version"))
        except (PullError, StagingError) as error:
            print(f"DAMAGED: {error}")  # noqa: T201
            return 1
    print(f"version {version} is whole: {size:,} bytes, every digest as announced, version digest {digest}")  # noqa: T201
    return 0


async def _verify_replica(config: WeightsConfig, replica: str, versions: Sequence[Version]) -> int:
    """Have a replica compare its live weights with the files that they came from."""
    from sluice.client import RolloutClient  # noqa: PLC0415

    if versions:
        raise ConfigError("a replica verifies the version that it holds: leave the version out beside --replica")
    async with RolloutClient(replica, config.security) as client:
        answer = await client.verify_weights(timeout_s=config.deadline_s)
    version = Version.from_proto(answer.policy_version)
    if answer.different:
        names = ", ".join(answer.different[:5])
        print(  # noqa: T201
            f"DIFFERENT: {len(answer.different)} tensors of replica {replica} are not those of version {version}: {names}."
            " The next update loads them again; if it happens again, test the host's memory"
        )
        return 1
    print(f"replica {replica} computes with version {version}: every live tensor equals its file")  # noqa: T201
    return 0


async def _diff(config: WeightsConfig, versions: Sequence[Version]) -> int:
    from rich.console import Console  # noqa: PLC0415

    from weightsync.inspect.weights_tables import compare, difference_table  # noqa: PLC0415
    from weightsync.receive.pull import PullError  # noqa: PLC0415
    from weightsync.receive.version_file import StagingError  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="sluice-weights-") as scratch:
        paths = [Path(scratch, str(version)) for version in versions]
        for version, path in zip(versions, paths, strict=True):
            try:
                await _fetch(config, version, path)
            except (PullError, StagingError) as error:
                print(f"DAMAGED: version {version}: {error}")  # noqa: T201
                return 1
        differences = await asyncio.to_thread(compare, *paths)
    Console().print(difference_table(differences, config.top))
    return 0


async def _fetch(config: WeightsConfig, version: Version | None, path: Path) -> tuple[Version, str, int]:
    """Fetch a version into a safetensors file, checked as an engine checks it; returns version, digest and bytes.

    Raises:
        PullError: if it is damaged or cannot be had.
    """
    from sluice.client import WeightSyncClient  # noqa: PLC0415
    from sluice.rpc import connect  # noqa: PLC0415
    from weightsync.format.manifest import run_resource  # noqa: PLC0415
    from weightsync.receive.pull import PullLimits, VersionBuilder  # noqa: PLC0415
    from weightsync.receive.sources import Sources  # noqa: PLC0415

    async with WeightSyncClient(config.address, config.security) as client:
        manifest = await client.manifest(config.run, version)
    limits = PullLimits(deadline_s=config.deadline_s, attempts=_ATTEMPTS)
    with ThreadPoolExecutor(4) as threads, path.open("w+b") as file:
        async with connect(config.address, config.security) as channel:
            run = run_resource(config.run)
            builder = VersionBuilder(Sources(channel, run, "weights"), run, threads, limits, local_files=False)
            await builder.build(manifest, None, file.fileno())
        size = os.fstat(file.fileno()).st_size
    return Version.from_proto(manifest.version), manifest.digest, size


def _version(word: str) -> Version:
    try:
        return Version.parse(word)
    except ValueError as error:
        raise ConfigError(str(error)) from error


Verb = Callable[[WeightsConfig, Sequence[Version]], Coroutine[Any, Any, int]]

_VERBS: dict[str, tuple[Verb, int, int]] = {
    "ls": (_list, 0, 0),
    "show": (_show, 0, 1),
    "verify": (_verify, 0, 1),
    "diff": (_diff, 2, 2),
}
"""What each verb does, and how many versions it takes at least and at most."""

COMMAND = Command("weights", "list, show, verify and compare the weight versions of a run", run)
