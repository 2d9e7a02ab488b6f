"""Versions and replicas as tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from google.protobuf.duration_pb2 import Duration
from rich.table import Table

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version

__all__ = ["describe_version", "replica_table", "version_table"]

KINDS = {pb.VERSION_KIND_ANCHOR: "anchor", pb.VERSION_KIND_DELTA: "delta", pb.VERSION_KIND_ADAPTER: "adapter"}
ENCODINGS = {
    pb.TENSOR_ENCODING_UNSPECIFIED: "dense",
    pb.TENSOR_ENCODING_DENSE: "dense",
    pb.TENSOR_ENCODING_DENSE_ZSTD: "dense, zstd",
    pb.TENSOR_ENCODING_DELTA: "delta",
    pb.TENSOR_ENCODING_UNCHANGED: "unchanged",
}


def version_table(manifests: Iterable[pb.Manifest]) -> Table:
    """A row per version: what it is, its bytes against a dense copy, and what it cost."""
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


def replica_table(replicas: Iterable[pb.ReplicaVersion]) -> Table:
    """A row per live replica: what it serves, how far that is behind, what its last update cost, its last failure."""
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


def describe_version(manifest: pb.Manifest) -> Iterable[str]:
    """Lines about one version: digest, base, shards, encodings, labels."""
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
