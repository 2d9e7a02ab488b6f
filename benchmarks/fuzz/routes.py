"""Every HTTP route of a gateway and of a replica: schemathesis on their bodies, and requests that are not valid HTTP."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
from pydantic import BaseModel
from starlette.routing import Route

from benchmarks.fuzz.findings import Findings
from benchmarks.fuzz.stack import RUN, Stack, Watched
from sluice.config import ConfigError, SecurityConfig
from sluice.rpc.access import Access
from sluice.rpc.server import LOOPBACK

VENV = Path(__file__).parents[2] / ".venv-ecosystem-fuzz"
"""Where `make install-ecosystem` puts schemathesis and atheris."""

HOST_HEADER = f"Host: {LOOPBACK}"

ANSWER_S = 10.0
"""Seconds within which a complete request must be answered, or its connection closed."""

ROLES = {"gateway": "agent", "rollout": "admin"}
"""The role whose token gives access to all routes of a service."""

SLOW_S = 90.0
"""Seconds after which a client that does not complete its request must be disconnected."""

WITH_BOUNDS = 10
"""With at least so many drawn requests per route, the bounds of its schema are tested, too, with hundreds of requests."""

START_S = 300.0

_FORMS = "#/components/schemas/{model}"
_FAULTS = {500, 501, 502}
"""Statuses of defects. 503 and 504 are answers of a service that is not ready, or of a deadline."""


# The bodies of the routes, in OpenAPI.


def gateway_document() -> dict[str, Any]:
    """Return the routes of a gateway, each with the body that it reads; a route without a body of its own takes any JSON."""
    from gateway_svc import http  # noqa: PLC0415 - each loads a service
    from gateway_svc.config import CaptureConfig  # noqa: PLC0415
    from sluice.openai import chat, completions, messages, responses  # noqa: PLC0415

    bodies: Mapping[str, type[BaseModel]] = {
        "/v1/chat/completions": chat.ChatBody,
        "/v1/completions": completions.CompletionBody,
        "/v1/responses": responses.ResponsesBody,
        "/v1/messages": messages.MessagesBody,
        "/v1/messages/count_tokens": messages.CountBody,
        "/inference/v1/generate": completions.TokensBody,
        "/rl/sessions": http.OpenBody,
        "/rl/sessions/{name}/renew": http.RenewBody,
        "/rl/sessions/{name}/reward": http.RewardBody,
        "/rl/sessions/{name}/end": http.EndBody,
    }
    served = http.create_app(cast("Any", None), CaptureConfig(), Access(SecurityConfig()), LOOPBACK)
    paths: dict[str, Any] = {}
    components: dict[str, Any] = {}
    for route in cast("list[Route]", served.app.routes):
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation: dict[str, Any] = {"responses": {"default": {"description": "any"}}}
            if "{name}" in path:
                operation["parameters"] = [_parameter("name")]
            if method == "POST":
                operation["requestBody"] = {
                    "content": {"application/json": {"schema": _schema(bodies.get(path), components)}}
                }
            paths.setdefault(path, {})[method.lower()] = operation
    return _document(paths, components)


def replica_document() -> dict[str, Any]:
    """Return the routes of a replica, as FastAPI describes them."""
    from rollout_svc.http import create_app  # noqa: PLC0415

    servicer: Any = SimpleNamespace(tokenizer=SimpleNamespace(token_text=None))
    app = create_app(servicer, cast("Any", None), RUN, Access(SecurityConfig()), LOOPBACK)
    document = app.openapi()
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"] = {"default": {"description": "any"}}
    return document


def _document(paths: Mapping[str, Any], components: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": "fuzz", "version": "1"},
        "paths": paths,
        "components": {"schemas": components},
    }


def _schema(body: type[BaseModel] | None, components: dict[str, Any]) -> dict[str, Any]:
    if body is None:
        return {}
    schema = body.model_json_schema(ref_template=_FORMS)
    components.update(schema.pop("$defs", {}))
    components[body.__name__] = schema
    return {"$ref": _FORMS.format(model=body.__name__)}


def _parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


# Requests that a schema describes.


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of schemathesis sent.

    Attributes:
        inputs: Requests by route.
        statuses: Their statuses, by route.
    """

    inputs: Mapping[str, int]
    statuses: Mapping[str, Counter[str]]


def run_schemas(
    stack: Stack, watched: Watched, document: Mapping[str, Any], findings: Findings, *, examples: int, seed: int
) -> Run:
    """Run schemathesis against a service.

    Args:
        stack: Everything that runs.
        watched: The service.
        document: Its routes.
        findings: Takes what is wrong.
        examples: Drawn requests of each route, in addition to those that test the bounds of its schema.
        seed: Seed of the draws.

    Raises:
        ConfigError: if schemathesis is not installed.
        RuntimeError: if it did not run.
    """
    program = VENV / "bin" / "schemathesis"
    if not program.exists():
        raise ConfigError(f"there is no {program}: run `make install-ecosystem` first")
    file, report = stack.directory / f"{watched.name}.json", stack.directory / f"{watched.name}.ndjson"
    file.write_text(json.dumps(document))
    url = f"http://{LOOPBACK}:{watched.http_port}"
    command = [str(program), "run", str(file), f"--url={url}", "--no-color", "--workers=1"]
    command.append(f"--phases={'coverage,' if examples >= WITH_BOUNDS else ''}fuzzing")
    command += ["--checks=not_a_server_error", f"--max-examples={examples}", f"--seed={seed}", "--no-shrink"]
    command += ["--generation-database=none", "--generation-codec=utf-8", "--suppress-health-check=all"]
    command += ["--request-timeout=20", "--continue-on-failure", "--output-sanitize=false", "--warnings=off"]
    command += [f"--report-ndjson-path={report}", f"--header=Authorization: Bearer {stack.tokens[ROLES[watched.name]]}"]
    if watched.name == "gateway":
        command.append(f"--header=X-Session-ID: {open_session(stack, watched)}")
    ended = subprocess.run(  # noqa: S603 - a program of ours
        command, capture_output=True, text=True, timeout=START_S + 60 * examples, check=False, cwd=stack.directory
    )
    if not report.exists():
        raise RuntimeError(f"schemathesis did not run: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return _judge_report(watched, report, findings)


def _judge_report(watched: Watched, report: Path, findings: Findings) -> Run:
    inputs, statuses = Counter[str](), defaultdict[str, Counter[str]](Counter)
    for line in report.read_text().splitlines():
        event = json.loads(line)
        for recorded in _interactions(event):
            route, status = recorded["route"], recorded["status"]
            inputs[route] += 1
            statuses[route][str(status)] += 1
            if status in _FAULTS or status == 0:
                findings.add(
                    f"{watched.name} {route}", f"status {status}: {recorded['answer'][:300]}", recorded["sent"]
                )
    for what, excerpt in watched.exceptions():
        findings.add(f"{watched.name} http", what, excerpt[-2000:])
    return Run(inputs, statuses)


def _interactions(event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    scenario = event.get("ScenarioFinished")
    if scenario is None:
        return
    for each in scenario["recorder"]["interactions"].values():
        request, response = each["request"], each["response"] or {}
        yield {
            "route": scenario["recorder"]["label"],
            "status": response.get("status_code", 0),
            "answer": _text(response.get("content")),
            "sent": f"{request['method']} {request['uri']} {_text(request.get('body'))[:1000]}",
        }


def _text(value: Any) -> str:  # noqa: ANN401 - any JSON value
    payload = value.get("payload", value) if isinstance(value, dict) else value
    if isinstance(payload, str):
        try:
            return base64.b64decode(payload, validate=True).decode(errors="replace")
        except ValueError:
            return payload
    return json.dumps(payload)


def open_session(stack: Stack, watched: Watched) -> str:
    """Open an episode at the gateway; return its name.

    Raises:
        RuntimeError: if the gateway refuses it.
    """
    url = f"http://{LOOPBACK}:{watched.http_port}/rl/sessions"
    end, answer = time.monotonic() + ANSWER_S, None
    while time.monotonic() < end:
        headers = {"authorization": f"Bearer {stack.tokens['agent']}"}
        answer = httpx.post(
            url, headers=headers, json={"wait_s": 5, "request_id": os.urandom(8).hex()}, timeout=ANSWER_S
        )
        if answer.status_code == 200:
            return str(answer.json()["id"])
        time.sleep(0.2)
    raise RuntimeError(f"no session can be opened: {'' if answer is None else answer.text}")


# Requests that no schema describes.


def raw_requests(path: str, token: str) -> Mapping[str, bytes]:
    """Return complete or broken requests to a route, by what is wrong with them. Each must be answered or its connection closed."""
    head = f"POST {path} HTTP/1.1\r\n{HOST_HEADER}\r\nAuthorization: Bearer {token}\r\n".encode()
    kind = b"Content-Type: application/json\r\n"
    close = b"Connection: close\r\n"

    def post(body: bytes, *more: bytes) -> bytes:
        return head + kind + close + b"".join(more) + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def chunked(body: bytes) -> bytes:
        return head + kind + close + b"Transfer-Encoding: chunked\r\n\r\n" + body

    deep = 100_000
    return {
        "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
        "HTTP/2 without TLS": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 32,
        "a method of 64 KiB": b"A" * 65_536 + b" / HTTP/1.1\r\n\r\n",
        "a path of 1 MiB": b"GET /" + b"a" * 1_048_576 + b" HTTP/1.1\r\n\r\n",
        "a header of 1 MiB": head + b"X: " + b"a" * 1_048_576 + b"\r\n\r\n",
        "100,000 headers": head + b"".join(b"X-%d: a\r\n" % number for number in range(100_000)) + b"\r\n",
        "a header without a name": head + b": a\r\n\r\n",
        "a header with a zero": head + b"X: a\x00b\r\n\r\n",
        "no host": f"POST {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode(),
        "a content length of letters": head + kind + close + b"Content-Length: abc\r\n\r\n{}",
        "a content length below zero": head + kind + close + b"Content-Length: -5\r\n\r\n{}",
        "a content length of 4,300 digits": head + kind + close + b"Content-Length: " + b"9" * 4301 + b"\r\n\r\n{}",
        "two content lengths": head + kind + close + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}}",
        "length and chunks": head + kind + close + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "a chunk of letters": chunked(b"zz\r\n{}\r\n0\r\n\r\n"),
        "a chunk below zero": chunked(b"-2\r\n{}\r\n0\r\n\r\n"),
        "a chunk of 2^70 bytes": chunked(b"4" + b"0" * 17 + b"\r\n{}\r\n"),
        "a chunk that is longer": chunked(b"2\r\n{}}}}}}\r\n0\r\n\r\n"),
        "chunks of one byte": chunked(b"".join(b"1\r\n \r\n" for _ in range(20_000)) + b"0\r\n\r\n"),
        "an unknown encoding": head + kind + close + b"Transfer-Encoding: gzip\r\n\r\n",
        "a body that is zipped": post(b"\x1f\x8b\x08\x00\x00\x00\x00\x00", b"Content-Encoding: gzip\r\n"),
        "no UTF-8": post(b'{"model": "\xff\xfe\xc0\x80"}'),
        "UTF-16": post('{"model": "m"}'.encode("utf-16")),
        "half a surrogate": post(
            b'{"model": "\\ud800", "prompt": "\\udfff", "messages": [{"role": "user", "content": "\\ud800"}]}'
        ),
        "a zero in a text": post(
            b'{"model": "\\u0000", "prompt": "\\u0000", "messages": [{"role": "user", "content": "\\u0000"}]}'
        ),
        "NaN": post(b'{"temperature": NaN, "top_p": Infinity, "reward": -Infinity}'),
        "1e999": post(b'{"temperature": 1e999, "max_tokens": 1e999, "reward": 1e999}'),
        "a number of 5,000 digits": post(b'{"max_tokens": ' + b"9" * 5000 + b', "seed": -' + b"9" * 5000 + b"}"),
        "keys twice": post(
            b'{"messages": [], "messages": [{"role": "user", "content": "a"}], "model": 1, "model": "m"}'
        ),
        "lists inside of lists": post(b'{"messages": ' + b"[" * deep + b"]" * deep + b"}"),
        "objects inside of objects": post(b'{"metadata": ' + b'{"a":' * deep + b"1" + b"}" * deep + b"}"),
        "deep JSON that does not end": post(b"[" * deep),
        "a million keys": post(b"{" + b",".join(b'"%d":1' % number for number in range(200_000)) + b"}"),
        "a body of 5 MiB": post(b'{"prompt": "' + b"a" * (5 << 20) + b'"}'),
        "a query of percent signs": b"GET "
        + path.encode()
        + b"?%%%ff%00=%u0000 HTTP/1.1\r\n"
        + close
        + head[head.index(b"Host") :]
        + b"\r\n",
        "a path out of the root": b"GET /../../etc/passwd HTTP/1.1\r\n" + close + head[head.index(b"Host") :] + b"\r\n",
        "a path of bytes": b"GET /\xff\xfe%2e%2e%2f HTTP/1.1\r\n" + close + head[head.index(b"Host") :] + b"\r\n",
        "a session of 64 KiB": f"POST /sessions/{'s' * 60_000}{path} HTTP/1.1\r\n".encode()
        + head[head.index(b"Host") :]
        + kind
        + close
        + b"Content-Length: 2\r\n\r\n{}",
        "two requests at once": (post(b"{}").replace(close, b"") * 20)[:-1] + b"}",
    }


def unfinished(path: str, token: str) -> Mapping[str, bytes]:
    """Return the beginnings of requests whose rest never comes, by what is missing. The server must close each connection."""
    head = f"POST {path} HTTP/1.1\r\n{HOST_HEADER}\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n".encode()
    return {
        "everything": b"",
        "anything but ends of lines": b"\r\n" * 64,
        "the rest of the first line": b"POST ",
        "the end of the head": head,
        "the body": head + b"Content-Length: 100\r\n\r\n",
        "half of the body": head + b'Content-Length: 100\r\n\r\n{"model": ',
        "the last chunk": head + b'Transfer-Encoding: chunked\r\n\r\n2\r\n{"\r\n',
    }


def send_raw(watched: Watched, findings: Findings, paths: Sequence[str], token: str) -> int:
    """Send each raw request to each route; return how many were sent."""
    sent = 0
    for path in paths:
        for what, data in raw_requests(path, token).items():
            sent += 1
            answer = _exchange(watched, data, ANSWER_S)
            if answer is None:
                findings.add(f"{watched.name} {path}", f"no answer to {what} within {ANSWER_S:g} s", repr(data[:300]))
            elif answer and answer.split(b" ", 2)[1:2] in ([b"500"], [b"502"]):
                findings.add(f"{watched.name} {path}", f"{what}: {answer[:400]!r}", repr(data[:300]))
        for what, excerpt in watched.exceptions():
            findings.add(f"{watched.name} {path}", what, excerpt[-2000:])
    return sent


def _exchange(watched: Watched, data: bytes, limit_s: float) -> bytes | None:
    """Send bytes; return what comes back until the server has answered or closed the connection. None if nothing comes in time."""
    with socket.create_connection((LOOPBACK, watched.http_port), timeout=limit_s) as connection:
        try:
            connection.sendall(data)
        except OSError:  # the server has closed the connection already
            return b""
        received = b""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            try:
                part = connection.recv(65_536)
            except TimeoutError:
                break
            except OSError:
                return received
            if not part:
                return received
            received += part
            if b"\r\n\r\n" in received and b"onnection: close" not in data:
                return received
        return received or None


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Connections whose requests are never completed, by what is missing, and when they must be closed, by the monotonic clock."""

    connections: Mapping[str, socket.socket]
    due: float


def begin_unfinished(watched: Watched, path: str, token: str) -> Unfinished:
    """Send the beginning of each unfinished request."""
    connections = {}
    for what, data in unfinished(path, token).items():
        connections[what] = socket.create_connection((LOOPBACK, watched.http_port), timeout=ANSWER_S)
        connections[what].sendall(data)
    return Unfinished(connections, time.monotonic() + SLOW_S)


def end_unfinished(watched: Watched, findings: Findings, begun: Unfinished) -> int:
    """Wait until the server has closed each connection; return how many there were."""
    for what, connection in begun.connections.items():
        connection.settimeout(max(0.01, begun.due - time.monotonic()))
        try:
            while connection.recv(65_536):
                pass
        except TimeoutError:
            findings.add(f"{watched.name} unfinished", f"a client that never sends {what} keeps its connection", "")
        except OSError:
            pass
        connection.close()
    return len(begun.connections)
