"""The bytes of a version that is not committed yet: shards come in, are compared with the manifest, and are put together.

Blocking; called in threads. Each tensor is hashed and scanned once, while its bytes come in.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import google_crc32c
import grpc
import numpy as np
import xxhash

from sluice.host_files import PeerFileError
from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from weightsync.codec.slices import slice_region
from weightsync.format.chunks import MAX_CHUNK_BYTES, ChunkError, ChunkSizeError, check_chunk
from weightsync.format.manifest import (
    ManifestError,
    box,
    check_adapter_config,
    check_manifest,
    entry_name,
    manifest_digest,
)
from weightsync.format.safetensors import DTYPES, Entry, LayoutError, Scan, ScannedTensor, place, render_header

RETRY_AFTER_S = 5.0
"""Seconds after which a trainer may retry a push that a full disk refused: about the time until a lease or a pull ends."""

FAILURES = (ManifestError, ChunkSizeError, LayoutError, ChunkError, PeerFileError, OSError, SluiceError)
"""All errors that `translated` accepts."""

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_ENCODED = {pb.TENSOR_ENCODING_DENSE_ZSTD, pb.TENSOR_ENCODING_DELTA}
_DIGEST = re.compile(r"[0-9a-f]{32}")

_NAMED_IN_MESSAGE = 5
"""Most tensors or shards that a message names; of the others it gives the number."""


def translated(error: Exception) -> SluiceError:
    """Convert one of `FAILURES` to the error of the contract."""
    if isinstance(error, SluiceError):
        return error
    if isinstance(error, ChunkError):
        remedy = "the shard was discarded, push it from its beginning"
        return SluiceError.data_loss("CHUNK_CRC", f"{error}; {remedy}")
    if isinstance(error, PeerFileError):
        return SluiceError.failed_precondition("NO_LOCAL_FILE", f"{error}: push the shard in chunks")
    if isinstance(error, OSError):
        if error.errno in _DISK_FULL:
            message = f"the disk is full ({error}); the versions so far stay: make room"
            return SluiceError.resource_exhausted("DISK_FULL", message, RETRY_AFTER_S)
        message = f"the disk failed ({error}); the versions so far stay: look at the service's log"
        return SluiceError(grpc.StatusCode.INTERNAL, "DISK_ERROR", message)
    return SluiceError.invalid_argument("manifest" if isinstance(error, ManifestError) else "chunk", str(error))


class ChunkSums:
    """Checksums of a file's chunks, so that each is computed once, however often the chunk travels.

    Only chunks of the largest size and the last chunk of the file are remembered: one number per MiB of the file, whatever
    ranges clients request. Therefore the receiver, not the sender, finds damage to the file on disk.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._sums: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of checksums that are remembered."""
        return len(self._sums)

    def note(self, offset: int, length: int, crc32c: int) -> None:
        """Remember a checksum if the chunk is one of those into which `next_cut` divides the whole file."""
        if self._is_usual(offset, length):
            self._sums[offset] = crc32c

    def of(self, offset: int, data: bytes) -> int:
        """Return the checksum of a chunk of the file."""
        known = self._sums.get(offset) if self._is_usual(offset, len(data)) else None
        if known is None:
            known = int(google_crc32c.value(data))
            self.note(offset, len(data), known)
        return known

    def _is_usual(self, offset: int, length: int) -> bool:
        return offset % MAX_CHUNK_BYTES == 0 and offset + length == next_cut(offset, self._size)


def next_cut(begin: int, end: int) -> int:
    """Return where the chunk that begins at a byte ends: at the next multiple of the largest chunk."""
    return min((begin // MAX_CHUNK_BYTES + 1) * MAX_CHUNK_BYTES, end)


class OffsetError(SluiceError):
    """The chunk does not follow the bytes that are stored."""


class SupersededError(SluiceError):
    """A newer stream writes to the shard."""


class Upload:
    """One shard of a version that is not committed yet.

    When a client reconnects with a new stream, its broken stream may still be alive here. Each stream therefore takes a
    ticket, and only the newest ticket may write or discard; older ones raise SupersededError. If the disk fails, the methods
    raise OSError.

    Attributes:
        announced: The shard in the client's header: its name, its size and perhaps its digest.
        size: Bytes of the whole file.
        digest: xxh3-128 of the file, hexadecimal; empty until the file is whole and on disk.
        sums: Checksums of the chunks in which it came.
        active_at: When the last chunk came, in seconds on the service's clock.
    """

    def __init__(self, path: Path, announced: pb.Shard, now: float) -> None:
        self.path = path
        self.announced = announced
        self.size: int = announced.size_bytes
        self.digest = ""
        self.sums = ChunkSums(self.size)
        self.active_at = now
        self._scan = Scan(self.size)
        self._hash = xxhash.xxh3_128()
        self._disk_failure: OSError | None = None
        self._lock = threading.Lock()
        self._ticket: object | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    @property
    def stored(self) -> int:
        """Return how many bytes came in and were written; their crc32c was correct."""
        return self._scan.position

    @property
    def complete(self) -> bool:
        """Return whether the file is whole and on disk."""
        return bool(self.digest)

    @property
    def tensors(self) -> Mapping[str, ScannedTensor]:
        """Return the tensors of the file that are whole, by name."""
        return self._scan.tensors

    @property
    def data_begin(self) -> int:
        """Return where the first tensor begins in the file; known once the header is in."""
        return self._scan.data_begin

    def take_over(self) -> tuple[object, int]:
        """Make the calling stream the only one that may write; return its ticket and how many bytes are stored."""
        with self._lock:
            self._ticket = object()
            return self._ticket, self.stored

    def write(self, ticket: object, chunk: pb.Chunk) -> None:
        """Check and store one chunk; raise as `check_chunk` and `append`."""
        data = check_chunk(chunk)
        self.append(ticket, chunk.offset, data)
        self.sums.note(chunk.offset, len(data), chunk.crc32c)

    def copy(self, ticket: object, source: int, end: int) -> None:
        """Store bytes of an open file of the same host, from where the upload stands to before `end`; raise as `append`.

        Raises:
            PeerFileError: if the file ends before `end`.
        """
        while (begin := self.stored) < end:
            data = os.pread(source, min(MAX_CHUNK_BYTES, end - begin), begin)
            if not data:
                raise PeerFileError(f"the file ends at byte {begin}, before byte {end}")
            self.append(ticket, begin, data)

    def append(self, ticket: object, offset: int, data: bytes | memoryview) -> None:
        """Store bytes whose checksum is verified.

        Raises:
            OffsetError: if they leave a gap or overlap.
            LayoutError: if the bytes are not those of a safetensors file of the announced size.
        """
        with self._lock:
            self._check(ticket)
            if offset != self.stored:
                raise OffsetError.invalid_argument(
                    "chunk", f"the chunk begins at byte {offset}, expected {self.stored}: send chunks in order"
                )
            self._scan.feed(data)
            rest, position = memoryview(data), offset
            while rest:
                written = os.pwrite(self._descriptor, rest, position)
                rest, position = rest[written:], position + written
            self._hash.update(data)

    def flush(self) -> None:
        """Flush the bytes so far to the disk while more come in, so that `finish` has little left to do.

        No effect if the file is closed already. `finish` raises a failure again, because the kernel reports it only once.
        """
        with self._lock:  # nobody closes the file between the look at its descriptor and the copy
            descriptor = os.dup(self._descriptor) if self._descriptor >= 0 else -1
        if descriptor < 0:
            return
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            self._disk_failure = error
            raise
        finally:
            os.close(descriptor)

    def finish(self, ticket: object) -> None:
        """Flush the whole file to the disk, close it and set its digest. Idempotent."""
        with self._lock:
            self._check(ticket)
            if self.complete:
                return
            if self._disk_failure is not None:
                raise self._disk_failure
            os.fsync(self._descriptor)
            self._close_file()
            self.digest = self._hash.hexdigest()

    def discard(self, ticket: object | None = None) -> bool:
        """Remove the file and end every stream's right to write. The service itself has no ticket and may always discard.

        Returns:
            False if a newer stream took over. The file then belongs to the newer stream and stays.
        """
        with self._lock:
            if ticket is not None and ticket is not self._ticket:
                return False
            self._ticket = None
            self._close_file()
            self.path.unlink(missing_ok=True)
            return True

    def close(self) -> None:
        """End every stream's right to write; the file stays."""
        with self._lock:
            self._ticket = None
            self._close_file()

    def _close_file(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _check(self, ticket: object) -> None:
        if ticket is not self._ticket:
            raise SupersededError.aborted("SUPERSEDED", "a newer stream pushes this shard; end this one")


def complete_manifest(
    announced: pb.Manifest, uploads: Mapping[str, Upload], base: pb.Manifest | None = None
) -> pb.Manifest:
    """Check the announced version against the uploaded files, by shard name; fill in every digest and size.

    Args:
        announced: The manifest of the commit. Dense slices may lack their digests.
        uploads: Its files.
        base: Manifest of the version that a delta is based on; None for other kinds.

    Raises:
        ManifestError: if the announcement contradicts itself or the entries of its files, or a delta's base has other tensors.
        SluiceError: SHARDS_MISSING, DIGEST, or NON_FINITE.
    """
    check_manifest(announced)
    check_adapter_config(announced)
    manifest = pb.Manifest()
    manifest.CopyFrom(announced)
    missing = [shard.name for shard in manifest.shards if shard.name not in uploads or not uploads[shard.name].complete]
    if missing:
        raise SluiceError.failed_precondition(
            "SHARDS_MISSING", f"shards missing: {_some(missing)}; push them, then commit again"
        )
    if base is not None:
        _check_same_model(manifest, base)
    for shard in manifest.shards:
        _complete_shard(shard, uploads[shard.name])
    _check_finite([uploads[shard.name] for shard in manifest.shards])
    manifest.size_bytes = sum(shard.size_bytes for shard in manifest.shards)
    manifest.dense_bytes = sum(
        box(tensor).volume * DTYPES[tensor.dtype].size for shard in manifest.shards for tensor in shard.tensors
    )
    manifest.digest = _same("version", manifest.digest, manifest_digest(manifest))
    return manifest


def _check_same_model(manifest: pb.Manifest, base: pb.Manifest) -> None:
    """Check that a delta has the tensors of its base, and that its unchanged slices have the base's digests if these are known."""
    model, base_model = _model(manifest), _model(base)
    if model != base_model:
        different = sorted({name for name, _ in model.items() ^ base_model.items()})
        raise ManifestError(f"the delta and its base differ in names, types or shapes of {_some(different)}")
    digests = {(tensor.name, box(tensor)): tensor.digest for shard in base.shards for tensor in shard.tensors}
    for shard in manifest.shards:
        for tensor in shard.tensors:
            if tensor.encoding == pb.TENSOR_ENCODING_UNCHANGED:
                known = digests.get((tensor.name, box(tensor)), tensor.digest)
                tensor.digest = _same(f"unchanged {tensor.name}", tensor.digest, known)


def _model(manifest: pb.Manifest) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        tensor.name: (tensor.dtype, tuple(tensor.global_shape)) for shard in manifest.shards for tensor in shard.tensors
    }


def _complete_shard(shard: pb.Shard, received: Upload) -> None:
    shard.digest = _same(f"shard {shard.name}", shard.digest, received.digest)
    if shard.size_bytes and shard.size_bytes != received.size:
        raise _other_bytes(f"shard {shard.name} has {received.size} bytes, announced were {shard.size_bytes}")
    shard.size_bytes = received.size
    stored = [tensor for tensor in shard.tensors if tensor.encoding != pb.TENSOR_ENCODING_UNCHANGED]
    entries = {entry_name(tensor) for tensor in stored}
    if entries != received.tensors.keys():
        different = sorted(entries ^ received.tensors.keys())
        raise ManifestError(f"shard {shard.name}: file and manifest disagree on the entries {_some(different)}")
    for tensor in stored:
        found = received.tensors[entry_name(tensor)]
        if tensor.encoding in _ENCODED:
            if found.entry.dtype != "U8" or len(found.entry.shape) != 1:
                raise ManifestError(
                    f"{tensor.name} in shard {shard.name} is encoded; its entry must be U8 of one dimension"
                )
            continue
        if (found.entry.dtype, found.entry.shape) != (tensor.dtype, box(tensor).sizes):
            raise _other_bytes(
                f"{tensor.name} in shard {shard.name} is {found.entry.dtype} {list(found.entry.shape)},"
                f" announced was {tensor.dtype} {list(box(tensor).sizes)}"
            )
        tensor.digest = _same(f"{tensor.name} in shard {shard.name}", tensor.digest, found.digest)
        tensor.encoding = pb.TENSOR_ENCODING_DENSE
    for tensor in shard.tensors:
        if not _DIGEST.fullmatch(tensor.digest):
            raise ManifestError(f"{tensor.name} in shard {shard.name} needs the xxh3-128 of its dense bytes")


def _check_finite(shards: Sequence[Upload]) -> None:
    broken = sorted(name for shard in shards for name, tensor in shard.tensors.items() if not tensor.finite)
    if broken:
        raise SluiceError.failed_precondition(
            "NON_FINITE",
            f"NaN or infinite values in {_some(broken)}: the version would poison the engines' caches;"
            " the trainer must skip the step that made it",
        )


def _same(what: str, announced: str, found: str) -> str:
    if announced and announced != found:
        raise _other_bytes(f"{what} has digest {found}, announced was {announced}; push it again")
    return found


def _other_bytes(message: str) -> SluiceError:
    return SluiceError.data_loss("DIGEST", message)


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED_IN_MESSAGE
    return ", ".join(names[:_NAMED_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")


def assemble(pushed: pb.Manifest, uploads: Mapping[str, Upload], target: Path) -> pb.Manifest:
    """Assemble slices from many shards into one safetensors file of whole tensors. It is on disk when this returns.

    Args:
        pushed: A manifest that passed `complete_manifest`.
        uploads: Its shards by name.
        target: The file to write.

    Returns:
        The manifest of the assembled version, digests filled in.
    """
    shapes = {each.name: (each.dtype, tuple(each.global_shape)) for shard in pushed.shards for each in shard.tensors}
    entries = place([(name, *shapes[name]) for name in sorted(shapes)])
    header = render_header(entries, {"format": "pt"})
    shard = pb.Shard(name="model", size_bytes=len(header) + sum(entry.size for entry in entries))
    allocate(target, shard.size_bytes)
    with target.open("r+b") as file:
        with mmap.mmap(file.fileno(), shard.size_bytes) as mapped:
            mapped[: len(header)] = header
            _copy_slices(pushed, uploads, mapped, len(header), entries)
            with memoryview(mapped) as view:
                for entry in entries:
                    with view[len(header) + entry.begin : len(header) + entry.end] as part:
                        describe_dense(shard, entry, xxhash.xxh3_128(part).hexdigest())
                shard.digest = xxhash.xxh3_128(view).hexdigest()
            mapped.flush()
        os.fsync(file.fileno())
    manifest = with_shards(pushed, [shard])
    manifest.dense_bytes = sum(entry.size for entry in entries)
    return manifest


def _copy_slices(
    pushed: pb.Manifest, uploads: Mapping[str, Upload], mapped: mmap.mmap, data_begin: int, entries: Sequence[Entry]
) -> None:
    targets = {entry.name: entry for entry in entries}
    for shard in pushed.shards:
        upload = uploads[shard.name]
        source = np.memmap(upload.path, dtype=np.uint8, mode="r")
        for tensor in shard.tensors:
            found, target = upload.tensors[entry_name(tensor)].entry, targets[tensor.name]
            if not found.size:
                continue
            begin = upload.data_begin + found.begin
            part = source[begin : begin + found.size].reshape(*box(tensor).sizes, DTYPES[tensor.dtype].size)
            whole = np.frombuffer(mapped, dtype=np.uint8, count=target.size, offset=data_begin + target.begin)
            slice_region(whole, tensor)[...] = part
            del whole  # the map cannot be closed while an array refers to it


def allocate(path: Path, size: int) -> None:
    """Make a file of a size. A full disk fails here with an error; later, a write to a map of the file would kill the process."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def describe_dense(shard: pb.Shard, entry: Entry, digest: str) -> None:
    """Add a whole tensor to a shard's description."""
    shard.tensors.add(
        name=entry.name, dtype=entry.dtype, global_shape=entry.shape, encoding=pb.TENSOR_ENCODING_DENSE, digest=digest
    )


def with_shards(described: pb.Manifest, shards: Sequence[pb.Shard]) -> pb.Manifest:
    """Return the manifest with its shards replaced by `shards`, which hold whole dense tensors."""
    manifest = pb.Manifest()
    manifest.CopyFrom(described)
    manifest.ClearField("shards")
    manifest.shards.extend(shards)
    manifest.size_bytes = sum(shard.size_bytes for shard in shards)
    manifest.digest = manifest_digest(manifest)
    return manifest
