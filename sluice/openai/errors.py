"""Errors as OpenAI's clients expect them: the JSON object, the HTTP status and when to retry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sluice.rpc import SluiceError

BAD_REQUEST = "invalid_request_error"

STATUSES: Mapping[grpc.StatusCode, tuple[int, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, BAD_REQUEST),
    grpc.StatusCode.FAILED_PRECONDITION: (400, BAD_REQUEST),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error"),
    grpc.StatusCode.NOT_FOUND: (404, "not_found_error"),
    grpc.StatusCode.ABORTED: (409, "conflict_error"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "conflict_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.UNIMPLEMENTED: (501, "not_implemented_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "service_unavailable_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error"),
}
"""HTTP status and error type for each gRPC code of the contracts; any other code is 500."""

HTTP_REASONS: Mapping[int, str] = {
    404: "UNKNOWN_PATH",
    405: "METHOD_NOT_ALLOWED",
    408: "REQUEST_DEADLINE",
    413: "BODY_TOO_LARGE",
    429: "TOO_MANY_REQUESTS",
}
"""Reasons for errors that HTTP itself defines, by status. Any other status is INVALID_REQUEST."""

PARAMETERS = {
    "conversation": "messages",
    "conversation.template_arguments": "chat_template_kwargs",
    "conversation.tools": "tools",
    "text": "prompt",
    "token_ids": "prompt",
    "sampling": "",
}
"""Names in this dialect for fields that have another name in the contract."""


def error_body(error: SluiceError) -> dict[str, Any]:
    """Return the JSON object for an error."""
    _, kind = STATUSES.get(error.code, (500, "server_error"))
    return _body(error.message, kind, _parameter(error), error.reason)


def error_status(error: SluiceError) -> int:
    """Return the HTTP status for an error."""
    return 415 if error.reason == "JSON_REQUIRED" else STATUSES.get(error.code, (500, ""))[0]


def error_response(
    error: SluiceError, *, status: int | None = None, body: Mapping[str, Any] | None = None
) -> JSONResponse:
    """Return the HTTP response for an error. The time to retry is in `retry-after-ms`, which OpenAI's client prefers, and in `retry-after`.

    Args:
        error: The error.
        status: HTTP status; by default from `error_status`.
        body: JSON object; by default from `error_body`.
    """
    status = error_status(error) if status is None else status
    headers = {}
    if error.retry_after_s is not None:
        headers = {
            "retry-after": str(max(1, math.ceil(error.retry_after_s))),
            "retry-after-ms": str(math.ceil(error.retry_after_s * 1000)),
        }
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error) if body is None else body, status, headers)


def too_large(most: int) -> HTTPException:
    """Return the error for a body of more than `most` bytes."""
    return HTTPException(413, f"the body is larger than {most} bytes: send fewer prompts at a time")


def too_many_bytes(retry_after_s: float) -> HTTPException:
    """Return the error for a body for which there is no room because of the bodies of requests in progress."""
    message = "the requests in progress are as large as this server holds at a time; retry after the delay"
    return HTTPException(429, message, {"retry-after": str(math.ceil(retry_after_s))})


def too_slow(seconds: float) -> HTTPException:
    """Return the error for a body that took more than `seconds`."""
    message = f"the body did not arrive within {seconds:g} s: send it with the request"
    return HTTPException(408, message, {"connection": "close"})


def answer_errors(app: FastAPI) -> None:
    """Make an app return every error in OpenAI's form."""

    @app.exception_handler(SluiceError)
    async def ours(_request: Request, error: SluiceError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        # FastAPI puts "body" before each location.
        parameter, message = describe_faults([{**fault, "loc": fault["loc"][1:]} for fault in error.errors()])
        return JSONResponse(_body(message, BAD_REQUEST, parameter, "INVALID_REQUEST"), 400)

    @app.exception_handler(UnicodeEncodeError)
    async def not_text(_request: Request, error: UnicodeEncodeError) -> JSONResponse:
        lone = error.object[error.start : error.end]
        message = f"{lone!a} is half of a surrogate pair, which UTF-8 cannot encode: send whole characters"
        return JSONResponse(_body(message, BAD_REQUEST, None, "INVALID_REQUEST"), 400)

    @app.exception_handler(HTTPException)
    async def http(_request: Request, error: HTTPException) -> JSONResponse:
        code = HTTP_REASONS.get(error.status_code, "INVALID_REQUEST")
        return JSONResponse(_body(str(error.detail), BAD_REQUEST, None, code), error.status_code, error.headers)


def describe_faults(faults: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """Return the first parameter at fault and a message with the first eight faults. `faults` come from pydantic."""
    parameters = [fault.get("ctx", {}).get("parameter") or _path(fault["loc"]) for fault in faults]
    texts = [f"{parameter or 'body'}: {_sentence(fault)}" for parameter, fault in zip(parameters, faults, strict=True)]
    return parameters[0] or None, "; ".join(dict.fromkeys(texts[:8]))


def _body(message: str, kind: str, parameter: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code}}


def _parameter(error: SluiceError) -> str | None:
    """Return the first field at fault, by its name in this dialect."""
    for field in error.violations:
        name = field.removeprefix("sampling.")
        if field.startswith("conversation") and field not in PARAMETERS:
            name = "conversation"
        return PARAMETERS.get(name, name) or None
    return None


def _path(location: tuple[int | str, ...]) -> str:
    """Return the path of a field, without pydantic's names of union members."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in {"str", "int"}:
            path += f".{part}" if path else part
    return path


def _sentence(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "extra_forbidden":
        return "this server does not support it; leave it out"
    if fault["type"] == "json_invalid":
        return f"not JSON: {fault['ctx']['error']}"
    return str(fault["msg"])
