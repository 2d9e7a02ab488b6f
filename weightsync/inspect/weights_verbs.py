"""What `sluice weights` does: list, show, verify and compare versions, in tables for people."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import torch
from google.protobuf.duration_pb2 import Duration
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from sluice.client import RolloutClient, WeightSyncClient
from sluice.config import ConfigError
from sluice.progress import doing
from sluice.rpc import SluiceError, connect
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.config import WeightsConfig
from weightsync.format.manifest import run_resource
from weightsync.receive.pull import PullError, PullLimits, VersionBuilder
from weightsync.receive.sources import Sources
from weightsync.receive.version_file import StagingError

_ATTEMPTS = 2
"""Streams that may fail before a version counts as damaged."""

KINDS = {pb.VERSION_KIND_ANCHOR: "anchor", pb.VERSION_KIND_DELTA: "delta", pb.VERSION_KIND_ADAPTER: "adapter"}
ENCODINGS = {
    pb.TENSOR_ENCODING_UNSPECIFIED: "dense",
    pb.TENSOR_ENCODING_DENSE: "dense",
    pb.TENSOR_ENCODING_DENSE_ZSTD: "dense, zstd",
    pb.TENSOR_ENCODING_DELTA: "delta",
    pb.TENSOR_ENCODING_UNCHANGED: "unchanged",
}


async def run_verb(verb: str, config: WeightsConfig, versions: Sequence[Version]) -> int:
    """Run one verb; return 1 if a version is damaged or different."""
    asked = config.replica or config.address
    try:
        async with asyncio.timeout(config.deadline_s):
            return await _VERBS[verb](config, versions)
    except TimeoutError as error:
        raise ConfigError(f"{asked} did not answer within {config.deadline_s:g} s (--deadline-s)") from error
    except SluiceError as error:
        raise ConfigError(f"{asked}: {error}") from error
    except grpc.aio.AioRpcError as error:
        raise ConfigError(f"{asked}: {SluiceError.from_rpc(error)}") from error
    except OSError as error:
        raise ConfigError(f"{error}; room for whole versions is needed in {tempfile.gettempdir()} (TMPDIR)") from error


async def _list(config: WeightsConfig, _: Sequence[Version]) -> int:
    async with WeightSyncClient(config.address, config.security) as client:
        response = await client.versions(config.run)
    console = Console()
    if response.versions:
        console.print(_version_table(response.versions))
    else:
        console.print(f"run {config.run} has no versions at {config.address}")
    if response.replicas:
        console.print()
        console.print(_replica_table(response.replicas))
    if response.mirrors:
        console.print()
        console.print(_mirror_table(response.mirrors))
    return 0


async def _show(config: WeightsConfig, versions: Sequence[Version]) -> int:
    async with WeightSyncClient(config.address, config.security) as client:
        manifest = await client.manifest(config.run, *versions)
    print("\n".join(_describe_version(manifest)))  # noqa: T201
    return 0


async def _verify(config: WeightsConfig, versions: Sequence[Version]) -> int:
    if config.replica is not None:
        return await _verify_replica(config, config.replica, versions)
    with tempfile.TemporaryDirectory(prefix="sluice-weights-") as scratch:
        try:
            with doing("fetch the version"):
                version, digest, size = await _fetch(
                    config, versions[0] if versions else None, Path(scratch, "version")
                )
        except (PullError, StagingError) as error:
            print(f"DAMAGED: {error}")  # noqa: T201
            return 1
    print(f"version {version} is whole: {size:,} bytes, every digest as announced, version digest {digest}")  # noqa: T201
    return 0


async def _verify_replica(config: WeightsConfig, replica: str, versions: Sequence[Version]) -> int:
    """Make a replica compare its live weights with the files that they came from."""
    if versions:
        raise ConfigError("a replica verifies the version that it holds: leave the version out beside --replica")
    async with RolloutClient(replica, config.security) as client:
        with doing(f"wait for replica {replica}"):
            answer = await client.verify_weights(timeout_s=config.deadline_s)
    version = Version.from_proto(answer.policy_version)
    for each in answer.unchecked:
        print(  # noqa: T201
            f"NOT COMPARED: {each.tensors} tensors in layers of kind {each.layers}, such as {each.example}:"
            " the engine keeps them in a form that is not known here"
        )
    if answer.different:
        names = ", ".join(answer.different[:5])
        print(  # noqa: T201
            f"DIFFERENT: {len(answer.different)} tensors of replica {replica} are not those of version {version}: {names}."
            " The next update loads them again; if it happens again, test the host's memory"
        )
        return 1
    which = "every other live tensor" if answer.unchecked else "every live tensor"
    print(f"replica {replica} computes with version {version}: {which} equals its file")  # noqa: T201
    return 0


async def _diff(config: WeightsConfig, versions: Sequence[Version]) -> int:
    with tempfile.TemporaryDirectory(prefix="sluice-weights-") as scratch:
        paths = [Path(scratch, str(version)) for version in versions]
        for version, path in zip(versions, paths, strict=True):
            try:
                with doing(f"fetch version {version}"):
                    await _fetch(config, version, path)
            except (PullError, StagingError) as error:
                print(f"DAMAGED: version {version}: {error}")  # noqa: T201
                return 1
        with doing("compare"):
            differences = await asyncio.to_thread(_compare_files, *paths)
    Console().print(_difference_table(differences, config.top))
    return 0


async def _fetch(config: WeightsConfig, version: Version | None, path: Path) -> tuple[Version, str, int]:
    """Fetch a version into a safetensors file and check it as an engine does. Return version, digest and size in bytes.

    Raises:
        PullError: if it is damaged or cannot be fetched.
    """
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


def _version_table(manifests: Iterable[pb.Manifest]) -> Table:
    """Return a table with a row per version: its kind, its bytes compared with a dense copy, and its cost."""
    table = Table(box=None, header_style="bold")
    for name in ("version", "kind", "sent", "dense", "dense/sent", "changed", "diff", "push", "commit", "committed"):
        table.add_column(name, justify="left" if name in {"version", "kind"} else "right")
    for manifest in manifests:
        timings = manifest.push_timings
        ratio = manifest.dense_bytes / manifest.size_bytes if manifest.size_bytes else 0.0
        table.add_row(
            str(Version.from_proto(manifest.version)),
            KINDS.get(manifest.kind, "?"),
            _size(manifest.size_bytes),
            _size(manifest.dense_bytes),
            f"{ratio:.1f}",
            f"{timings.changed_fraction:.2%}",
            _seconds(timings.diff),
            _seconds(timings.push),
            _seconds(manifest.commit_time_taken),
            f"{manifest.commit_time.ToDatetime():%Y-%m-%d %H:%M:%S}",
        )
    return table


def _replica_table(replicas: Iterable[pb.ReplicaVersion]) -> Table:
    """Return a table with a row per live replica: its version, how far that is behind, the cost of its last update, its last failure."""
    table = Table(box=None, header_style="bold")
    for name in ("replica", "version", "behind", "pulled", "pull", "stage", "pause", "apply", "total", "age", "error"):
        table.add_column(name, justify="left" if name in {"replica", "version", "error"} else "right")
    for replica in replicas:
        timings = replica.timings
        table.add_row(
            replica.replica,
            str(Version.from_proto(replica.version)),
            str(replica.versions_behind),
            _size(timings.pulled_bytes),
            *(
                _seconds(each)
                for each in (timings.pull, timings.stage, timings.pause, timings.apply, timings.total, replica.age)
            ),
            replica.error,
        )
    return table


def _mirror_table(mirrors: Iterable[pb.MirrorState]) -> Table:
    """Return a table with a row per object store: its progress, the bytes moved since the service started, its last failure."""
    table = Table(box=None, header_style="bold")
    for name in ("object store", "", "newest", "behind", "dense moved", "deltas moved", "error"):
        table.add_column(name, justify="left" if name in {"object store", "", "newest", "error"} else "right")
    for mirror in mirrors:
        table.add_row(
            mirror.url,
            "read" if mirror.use == pb.MIRROR_USE_READ else "written",
            str(Version.from_proto(mirror.newest)) if mirror.HasField("newest") else "-",
            str(mirror.versions_behind),
            _size(mirror.dense_bytes),
            _size(mirror.delta_bytes),
            mirror.error,
        )
    return table


def _describe_version(manifest: pb.Manifest) -> Iterable[str]:
    """Return lines about one version: digest, base, shards, encodings, labels."""
    yield f"version {Version.from_proto(manifest.version)} of {manifest.run}: {KINDS.get(manifest.kind, '?')}"
    if manifest.HasField("base"):
        yield f"  base    {Version.from_proto(manifest.base)}"
    yield f"  digest  {manifest.digest}"
    yield f"  bytes   {manifest.size_bytes:,} of {manifest.dense_bytes:,} dense"
    for shard in manifest.shards:
        encodings = Counter(ENCODINGS.get(tensor.encoding, "?") for tensor in shard.tensors)
        held = ", ".join(f"{count} {name}" for name, count in sorted(encodings.items()))
        yield f"  shard   {shard.name}: {shard.size_bytes:,} bytes, {held}"
    for name, value in sorted(manifest.labels.items()):
        yield f"  {name} = {value}"


def _size(count: int) -> str:
    size, units = float(count), iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    while size >= 1000:
        size, unit = size / 1000, next(units, "TB")
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _seconds(duration: Duration) -> str:
    seconds = duration.ToTimedelta().total_seconds()
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class Difference:
    """How one tensor differs.

    Attributes:
        changed: Number of values whose bits differ. If data type or shape differ, all values count.
        largest: Largest absolute difference; NaN if there is nothing to compare with.
        relative: Norm of the difference divided by the norm of the first tensor; NaN if there is nothing to compare with.
        replaced: Whether the other version has no tensor of this name, type and shape.
    """

    name: str
    elements: int
    changed: int
    largest: float
    relative: float
    replaced: bool = False


def _compare_files(first: Path, second: Path) -> list[Difference]:
    """Compare two safetensors files. If only one of them has a tensor, all of its values count as changed."""
    with safe_open(first, framework="pt") as one, safe_open(second, framework="pt") as other:
        names = sorted({*one.keys(), *other.keys()})
        held = set(one.keys()) & set(other.keys())
        return [
            _compare(name, one.get_tensor(name), other.get_tensor(name))
            if name in held
            else _replaced(name, (one if name in one.keys() else other).get_tensor(name))  # noqa: SIM118 - no mapping
            for name in names
        ]


def _compare(name: str, one: torch.Tensor, other: torch.Tensor) -> Difference:
    if one.dtype != other.dtype or one.shape != other.shape:
        return _replaced(name, other)
    width = one.element_size()
    flat = (each.reshape(-1).view(torch.uint8).reshape(-1, width) for each in (one, other))
    before, after = flat
    changed = int((before != after).any(dim=1).sum())
    if not changed:
        return Difference(name, one.numel(), 0, 0.0, 0.0)
    step = other.double() - one.double()
    scale = float(one.double().norm())
    return Difference(name, one.numel(), changed, float(step.abs().max()), float(step.norm()) / scale if scale else 0.0)


def _replaced(name: str, tensor: torch.Tensor) -> Difference:
    return Difference(name, tensor.numel(), tensor.numel(), float("nan"), float("nan"), replaced=True)


def _difference_table(differences: Sequence[Difference], top: int) -> Table:
    """Return a table with a row for each of the `top` tensors that changed most, and a row for all tensors."""
    elements = sum(each.elements for each in differences)
    changed = sum(each.changed for each in differences)
    touched = sum(each.changed > 0 for each in differences)
    table = Table(box=None, header_style="bold", show_footer=True)
    table.add_column("tensor", f"{touched} of {len(differences)} tensors")
    table.add_column("values", f"{elements:,}", justify="right")
    table.add_column("changed", f"{changed / elements:.3%}" if elements else "", justify="right")
    table.add_column("largest step", justify="right")
    table.add_column("relative norm", justify="right")
    for each in sorted(differences, key=lambda row: -row.changed / max(1, row.elements))[:top]:
        share = each.changed / max(1, each.elements)
        steps = ("other type, shape or name", "") if each.replaced else (f"{each.largest:.2e}", f"{each.relative:.2e}")
        table.add_row(each.name, f"{each.elements:,}", f"{share:.3%}", *steps)
    return table


_VERBS = {"ls": _list, "show": _show, "verify": _verify, "diff": _diff}
