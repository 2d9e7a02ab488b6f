"""What the parts of the service raise, translated into what the contract says. The one place that does so."""

from __future__ import annotations

import errno

import grpc

from sluice.host_files import PeerFileError
from sluice.rpc import SluiceError
from weightsync.format.chunks import ChunkError, ChunkSizeError
from weightsync.format.manifest import ManifestError
from weightsync.format.safetensors import LayoutError
from weightsync.service.ledger import RefusedError
from weightsync.service.store import StoreLockedError
from weightsync.service.upload import OffsetError, SupersededError
from weightsync.service.verify import DigestMismatchError, IncompleteError, NonFiniteError

__all__ = ["FAILURES", "RETRY_AFTER_S", "translated"]

RETRY_AFTER_S = 5.0
"""Seconds after which a trainer may repeat what a full disk refused: about the time in which a lease or a pull ends."""

_FIELDS: dict[type[Exception], str] = {
    ManifestError: "manifest",
    ChunkSizeError: "chunk",
    LayoutError: "chunk",
    OffsetError: "chunk",
}
"""Failures that are INVALID_ARGUMENT, with the field at fault."""

_STATUSES: dict[type[Exception], tuple[grpc.StatusCode, str, str]] = {
    ChunkError: (grpc.StatusCode.DATA_LOSS, "CHUNK_CRC", "; the shard was discarded, push it from its beginning"),
    DigestMismatchError: (grpc.StatusCode.DATA_LOSS, "DIGEST", ""),
    SupersededError: (grpc.StatusCode.ABORTED, "SUPERSEDED", ""),
    PeerFileError: (grpc.StatusCode.FAILED_PRECONDITION, "NO_LOCAL_FILE", ": push the shard in chunks"),
    IncompleteError: (grpc.StatusCode.FAILED_PRECONDITION, "SHARDS_MISSING", ""),
    NonFiniteError: (grpc.StatusCode.FAILED_PRECONDITION, "NON_FINITE", ""),
    StoreLockedError: (grpc.StatusCode.FAILED_PRECONDITION, "DIRECTORY_IN_USE", ""),
}
"""Code, reason, and what the message adds to the failure's own."""

_REFUSALS = {"OTHER_DIGEST": grpc.StatusCode.ALREADY_EXISTS, "NO_SUCH_VERSION": grpc.StatusCode.NOT_FOUND}
"""Codes of the ledger's refusals, where they are not FAILED_PRECONDITION."""

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

FAILURES: tuple[type[Exception], ...] = (*_FIELDS, *_STATUSES, RefusedError, OSError, SluiceError)
"""Everything that `translated` takes."""


def translated(error: Exception) -> SluiceError:
    """Return a failure as the contract words it.

    Args:
        error: One of `FAILURES`; another one is raised again.
    """
    if isinstance(error, SluiceError):
        return error
    if isinstance(error, RefusedError):
        return SluiceError(_REFUSALS.get(error.reason, grpc.StatusCode.FAILED_PRECONDITION), error.reason, str(error))
    if isinstance(error, OSError):
        return _disk_error(error)
    if (field := _FIELDS.get(type(error))) is not None:
        return SluiceError.invalid_argument(field, str(error))
    if (status := _STATUSES.get(type(error))) is not None:
        code, reason, remedy = status
        return SluiceError(code, reason, f"{error}{remedy}")
    raise error


def _disk_error(error: OSError) -> SluiceError:
    if error.errno in _DISK_FULL:
        message = f"the disk is full ({error}); the versions so far stay: make room"
        return SluiceError.resource_exhausted("DISK_FULL", message, RETRY_AFTER_S)
    message = f"the disk failed ({error}); the versions so far stay: look at the service's log"
    return SluiceError(grpc.StatusCode.INTERNAL, "DISK_ERROR", message)
