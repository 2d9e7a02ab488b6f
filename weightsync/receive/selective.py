"""Makes a version's file from only those ranges of its dense form that this host's processes read.

The file has the layout of the whole one and holes where nothing was pulled; its header says what it holds
(`weightsync.engine.coverage`). Ranges that lie near each other come in one stream: asking costs as much as some hundred kilobytes.
So matrices that are cut by rows are pulled in part, and those cut by columns, whose rows are short, mostly whole.

Every chunk has its checksum; digests are of whole tensors, and are verified for those that came whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from sluice.v1 import weightsync_pb2 as pb
from weightsync.engine.coverage import Coverage
from weightsync.engine.selection import Ranges, Selection, intersection, normal, scaled, shifted
from weightsync.format.dtypes import DTYPES, all_finite
from weightsync.format.layout import (
    HEADER_LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Entry,
    LayoutError,
    parse_header,
    render_header,
)
from weightsync.format.manifest import entry_name, manifest_digest
from weightsync.format.raw_chunks import RawChunk
from weightsync.receive.form_pull import BuildCost, FormPull, run_to_end
from weightsync.receive.route import Step
from weightsync.receive.staged_file import write_all
from weightsync.receive.staging import StagingError, check_dense

__all__ = ["take_selected"]

_PAGE = 4096
_FIRST_BYTES = 4 << 10
"""Read of a shard at first, to learn how long its header is."""

_READ_BYTES = 8 << 20


class _Head:
    """Takes the first bytes of a shard, which hold its header."""

    def __init__(self) -> None:
        self.data = bytearray()

    @property
    def position(self) -> int:
        """See `ChunkSink`, as for the next one."""
        return len(self.data)

    def feed(self, chunk: RawChunk) -> None:
        """Keep the bytes."""
        _check_order(chunk, self.position)
        self.data += chunk.check()

    @property
    def end(self) -> int:
        """Where the header ends."""
        length = int.from_bytes(self.data[:HEADER_LENGTH_BYTES], "little")
        if length > MAX_HEADER_BYTES:
            raise StagingError(f"a header of {length} bytes: not a safetensors file")
        return HEADER_LENGTH_BYTES + length


class _Part:
    """Writes one range of a shard to its place in the file."""

    def __init__(self, descriptor: int, begin: int, shift: int) -> None:
        self.position = begin
        self._descriptor = descriptor
        self._shift = shift

    def feed(self, chunk: RawChunk) -> None:
        """Write the bytes; see `ChunkSink`."""
        _check_order(chunk, self.position)
        data = chunk.check()
        write_all(self._descriptor, data, self.position + self._shift)
        self.position += len(data)


@dataclass(frozen=True, slots=True)
class _Source:
    """A shard whose header is known: its entries, and where they begin in it."""

    shard: pb.Shard
    entries: list[Entry]
    data_begin: int


async def take_selected(
    pull: FormPull,
    step: Step,
    selection: Selection,
    descriptor: int,
    cost: BuildCost,
    *,
    local: bool,
) -> None:
    """Fill a file with the selected parts of a dense form.

    Args:
        pull: Where it comes from.
        step: The form; an anchor of whole tensors.
        selection: What is read of each tensor.
        descriptor: An open file; it is emptied.
        cost: Grows by what it took.
        local: Read files of this host where they are named.

    Raises:
        PullError, StagingError, OSError: as for a whole version.
    """
    check_dense(step.manifest)
    if manifest_digest(step.manifest) != step.manifest.digest:
        raise StagingError("the version's digest is not that of its tensors: pull it again")
    os.ftruncate(descriptor, 0)
    sources = [await _source(pull, step, shard, cost, local=local) for shard in step.manifest.shards]
    wanted = [_ranges(source, selection, pull.gap_bytes) for source in sources]
    entries, header = _layout(sources, wanted)
    size = len(header) + max((entry.end for entry in entries), default=0)
    os.ftruncate(descriptor, size)
    moved = 0
    work = []
    for source, ranges in zip(sources, wanted, strict=True):
        shift = len(header) + moved - source.data_begin
        moved += source.shard.size_bytes - source.data_begin
        work += [(source.shard, _Part(descriptor, begin, shift), end) for begin, end in ranges]
    await pull.pull_parts(step, work, cost, local=local)
    digests = {each.name: each.digest for source in sources for each in source.shard.tensors}
    coverage = _coverage(sources, wanted)
    await run_to_end(pull.threads, lambda: _verify(descriptor, entries, len(header), coverage, digests))
    await run_to_end(pull.threads, lambda: write_all(descriptor, header, 0))


async def _source(pull: FormPull, step: Step, shard: pb.Shard, cost: BuildCost, *, local: bool) -> _Source:
    """Read a shard's header."""
    head = _Head()
    await pull.pull_parts(step, [(shard, head, min(_FIRST_BYTES, shard.size_bytes))], cost, local=local)
    if head.end > shard.size_bytes:
        raise StagingError(f"shard {shard.name} is shorter than its header")
    if head.end > head.position:
        await pull.pull_parts(step, [(shard, head, head.end)], cost, local=local)
    try:
        entries = parse_header(memoryview(head.data)[HEADER_LENGTH_BYTES : head.end])
    except LayoutError as error:
        raise StagingError(f"shard {shard.name}: {error}") from error
    announced = {entry_name(each): (each.dtype, tuple(each.global_shape)) for each in shard.tensors}
    if {entry.name: (entry.dtype, entry.shape) for entry in entries} != announced:
        raise StagingError(f"shard {shard.name} does not hold the announced tensors")
    if head.end + max((entry.end for entry in entries), default=0) != shard.size_bytes:
        raise StagingError(f"shard {shard.name} has not the announced size")
    return _Source(shard, entries, head.end)


def _ranges(source: _Source, selection: Selection, gap_bytes: int) -> Ranges:
    """What to pull of a shard."""
    pieces: list[tuple[int, int]] = []
    for entry in source.entries:
        wanted = selection.get(entry.name)
        octets = ((0, entry.size),) if wanted is None else scaled(wanted, DTYPES[entry.dtype].size)
        pieces += shifted(octets, source.data_begin + entry.begin)
    return intersection(normal(pieces, gap_bytes), ((source.data_begin, source.shard.size_bytes),))


def _coverage(sources: list[_Source], wanted: list[Ranges]) -> Coverage:
    """What the file will hold; what came along in a gap is there too."""
    partial: dict[str, Ranges] = {}
    for source, ranges in zip(sources, wanted, strict=True):
        for entry in source.entries:
            begin = source.data_begin + entry.begin
            held = shifted(intersection(ranges, ((begin, begin + entry.size),)), -begin)
            if entry.size and held != ((0, entry.size),):
                size = DTYPES[entry.dtype].size
                partial[entry.name] = tuple((first // size, last // size) for first, last in held)
    return Coverage(partial)


def _layout(sources: list[_Source], wanted: list[Ranges]) -> tuple[list[Entry], bytes]:
    """The entries one shard behind the other, and the header, which ends with a page."""
    entries: list[Entry] = []
    moved = 0
    for source in sources:
        entries += [
            Entry(each.name, each.dtype, each.shape, each.begin + moved, each.end + moved) for each in source.entries
        ]
        moved += source.shard.size_bytes - source.data_begin
    metadata = {"format": "pt"} | _coverage(sources, wanted).metadata()
    length = -(-len(render_header(entries, metadata)) // _PAGE) * _PAGE
    return entries, render_header(entries, metadata, length)


def _verify(
    descriptor: int, entries: list[Entry], data_begin: int, coverage: Coverage, digests: Mapping[str, str]
) -> None:
    """Look at all that came: the digests of whole tensors, and whether every value is finite."""
    for entry in entries:
        size = DTYPES[entry.dtype].size
        held = scaled(coverage.partial.get(entry.name, ((0, entry.size // size),)), size)
        digest = xxhash.xxh3_128()
        for begin, end in shifted(held, data_begin + entry.begin):
            for position in range(begin, end, _READ_BYTES):
                data = os.pread(descriptor, min(_READ_BYTES, end - position), position)
                digest.update(data)
                if not all_finite(data, DTYPES[entry.dtype]):
                    raise StagingError(f"tensor {entry.name} holds NaN or infinite values")
        if entry.name not in coverage.partial and digest.hexdigest() != digests[entry.name]:
            raise StagingError(
                f"tensor {entry.name} has digest {digest.hexdigest()}, announced was {digests[entry.name]}"
            )


def _check_order(chunk: RawChunk, position: int) -> None:
    if chunk.offset != position:
        raise StagingError(f"a chunk at byte {chunk.offset} came instead of {position}")
