"""Typed errors: raised in a servicer, carried as google.rpc.Status, rebuilt at the caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from sluice.limits import MAX_MESSAGE_BYTES

DOMAIN = "sluice"
"""The domain of every ErrorInfo."""

DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata in which gRPC carries a serialised google.rpc.Status."""

_MESSAGE_BYTES = 4096
"""Longest message on the wire, in bytes. One header block holds it twice, once with up to three characters per byte, and the details."""

_DETAIL_BYTES = 512
"""Longest description of a field, and longest metadata value, for the same reason. They may repeat what a client sent."""

_VIOLATIONS = 32
"""Most field violations on the wire."""

_TOO_LARGE = "essage larger than max"
"""Part of gRPC's own error for a message that is too large, here or at the peer. gRPC sends it as RESOURCE_EXHAUSTED, which otherwise means
"retry later"."""

CODES = {code.value[0]: code for code in grpc.StatusCode}
"""Status codes by their number on the wire."""


class SluiceError(Exception):
    """A failure that the caller can act upon.

    Attributes:
        code: Status code, with the meanings of ``proto/sluice/v1/common.proto``.
        reason: UPPER_SNAKE_CASE name for programs; stable.
        message: Sentence for people, with the remedy.
        retry_after_s: Seconds after which a retry may succeed.
        violations: What is wrong, per field of the request.
        metadata: Further facts for programs.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        violations: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.violations = dict(violations or {})
        self.metadata = dict(metadata or {})

    def __str__(self) -> str:
        return f"{self.code.name} {self.reason}: {self.message}"

    def to_status(self) -> Status:
        """Return the wire form: google.rpc.Status with ErrorInfo, and with RetryInfo and BadRequest if they apply."""
        status = Status(code=self.code.value[0], message=_cut(self.message, _MESSAGE_BYTES))
        facts = {name: _cut(fact, _DETAIL_BYTES) for name, fact in self.metadata.items()}
        status.details.add().Pack(ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=facts))
        if self.retry_after_s is not None:
            delay = Duration()
            delay.FromNanoseconds(int(self.retry_after_s * 1e9))
            status.details.add().Pack(RetryInfo(retry_delay=delay))
        if self.violations:
            fields = [
                BadRequest.FieldViolation(field=_cut(name, _DETAIL_BYTES), description=_cut(description, _DETAIL_BYTES))
                for name, description in list(self.violations.items())[:_VIOLATIONS]
            ]
            status.details.add().Pack(BadRequest(field_violations=fields))
        return status

    @classmethod
    def from_rpc(cls, error: grpc.aio.AioRpcError) -> Self:
        """Rebuild the error that the server raised. Without details, as for a lost connection, the reason is the code's name.

        A call that we cancel raises asyncio.CancelledError. So CANCELLED comes from a server that has stopped, and becomes UNAVAILABLE.
        """
        status = Status()
        try:
            status.ParseFromString(_details(error))
        except DecodeError:
            status.Clear()
        if not status.details and _TOO_LARGE in (error.details() or ""):
            return cls(
                grpc.StatusCode.INVALID_ARGUMENT,
                "MESSAGE_TOO_LARGE",
                f"message_bytes: {error.details()}; the contracts allow {MAX_MESSAGE_BYTES} bytes: send less at a time",
                violations={"message_bytes": f"exceeds {MAX_MESSAGE_BYTES}"},
            )
        code, missing = error.code(), error.details() or "no details; is the address right and the service up?"
        if code is grpc.StatusCode.CANCELLED:
            code, missing = grpc.StatusCode.UNAVAILABLE, "the server stopped before it answered; make the call again"
        return cls.from_status(status, code, missing)

    @classmethod
    def from_status(
        cls, status: Status, code: grpc.StatusCode = grpc.StatusCode.UNKNOWN, message: str = "no details"
    ) -> Self:
        """Rebuild an error from its wire form. `code` and `message` are used if the wire form has none."""
        if status.details:
            code = CODES.get(status.code, code)
        info, retry, request = ErrorInfo(), RetryInfo(), BadRequest()
        found_retry = False
        for detail in status.details:
            found_retry |= detail.Unpack(retry)
            detail.Unpack(info)
            detail.Unpack(request)
        return cls(
            code,
            info.reason or code.name,
            status.message or message,
            retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if found_retry else None,
            violations={each.field: each.description for each in request.field_violations},
            metadata=dict(info.metadata),
        )

    @classmethod
    def invalid_argument(cls, field: str, message: str) -> Self:
        """The request can never succeed: `field` is at fault."""
        text = f"{field}: {message}"
        return cls(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", text, violations={field: message})

    @classmethod
    def failed_precondition(cls, reason: str, message: str) -> Self:
        """Wrong run, base version or state; the message says which is expected."""
        return cls(grpc.StatusCode.FAILED_PRECONDITION, reason, message)

    @classmethod
    def not_found(cls, reason: str, message: str) -> Self:
        """The named resource does not exist."""
        return cls(grpc.StatusCode.NOT_FOUND, reason, message)

    @classmethod
    def resource_exhausted(cls, reason: str, message: str, retry_after_s: float) -> Self:
        """A queue, a disk or a limit is full; try again after the delay."""
        return cls(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, message, retry_after_s=retry_after_s)

    @classmethod
    def unavailable(cls, reason: str, message: str, retry_after_s: float | None = None) -> Self:
        """Starting or draining; safe to retry."""
        return cls(grpc.StatusCode.UNAVAILABLE, reason, message, retry_after_s=retry_after_s)

    @classmethod
    def unimplemented(cls, rpc: str) -> Self:
        """This server does not have the RPC yet."""
        message = f"{rpc} is not implemented by this server; GetServerInfo lists what is missing"
        return cls(grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED", message, metadata={"rpc": rpc})

    @classmethod
    def data_loss(cls, reason: str, message: str) -> Self:
        """A digest did not match; nothing of the transfer was kept."""
        return cls(grpc.StatusCode.DATA_LOSS, reason, message)

    @classmethod
    def already_exists(cls, reason: str, message: str) -> Self:
        """The name is taken by other content."""
        return cls(grpc.StatusCode.ALREADY_EXISTS, reason, message)

    @classmethod
    def aborted(cls, reason: str, message: str) -> Self:
        """Lost a race; read the state again and retry."""
        return cls(grpc.StatusCode.ABORTED, reason, message)


def _cut(text: str, most_bytes: int) -> str:
    """Return the beginning of a text, at most `most_bytes` bytes in UTF-8."""
    return text if 4 * len(text) <= most_bytes else text.encode(errors="replace")[:most_bytes].decode(errors="ignore")


def _details(error: grpc.aio.AioRpcError) -> bytes:
    for key, value in error.trailing_metadata():
        if key == DETAILS_KEY and isinstance(value, bytes):
            return value
    return b""
