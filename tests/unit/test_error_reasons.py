"""Every reason of an error is in the contracts, so that a client in any language knows it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.v1 import errors_pb2

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "sluice",
    "rollout_svc",
    "trainer_svc",
    "orchestrator_svc",
    "weightsync",
    "gateway_svc",
    "envserver_svc",
    "agents_svc",
    "sluice_convert",
)
PREFIX = "ERROR_REASON_"
SHORTHANDS = {
    "aborted",
    "already_exists",
    "data_loss",
    "failed_precondition",
    "not_found",
    "resource_exhausted",
    "unavailable",
}
"""Methods of SluiceError whose first argument is the reason; the classes have it as their first or second one."""

LISTED = {each.name.removeprefix(PREFIX) for each in errors_pb2.ErrorReason.DESCRIPTOR.values} - {"UNSPECIFIED"}


def sources() -> Iterator[tuple[Path, str]]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if path.parent.name != "v1":
                yield path, path.read_text()


def raised(tree: ast.AST) -> Iterator[str]:
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name not in SHORTHANDS | {"SluiceError", "RefusedError", "cls"}:
            continue
        for argument in call.args[: 1 if name in SHORTHANDS else 2]:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and argument.value.isupper():
                yield argument.value


def untimed(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that make an error which may be RESOURCE_EXHAUSTED, and do not say after which time to call again."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        delays = [each.value for each in call.keywords if each.arg == "retry_after_s"]
        if name == "resource_exhausted":
            delays += call.args[2:3]
        elif name == "abort":
            if not ast.unparse(call.args[0]).endswith("RESOURCE_EXHAUSTED"):
                continue
        elif name != "SluiceError" or another_code(call.args[0]):
            continue
        if not delays or (isinstance(delays[0], ast.Constant) and not delays[0].value):
            yield call


def another_code(code: ast.expr) -> bool:
    """Return whether an expression is a status code other than RESOURCE_EXHAUSTED."""
    is_literal = isinstance(code, ast.Attribute) and ast.unparse(code.value).endswith("StatusCode")
    return is_literal and code.attr != "RESOURCE_EXHAUSTED"


def test_what_is_exhausted_says_when_to_call_again() -> None:
    found = {f"{path.relative_to(ROOT)}:{call.lineno}" for path, text in sources() for call in untimed(ast.parse(text))}
    assert not found, "give retry_after_s; where waiting cannot help, raise FAILED_PRECONDITION or INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("code", "is_untimed"),
    [
        ("SluiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, 'FULL', 'full')", True),
        ("SluiceError(error.code, error.reason, 'again')", True),
        ("SluiceError.resource_exhausted('FULL', 'full', 0.0)", True),
        ("context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, 'full')", True),
        ("SluiceError(error.code, error.reason, 'again', retry_after_s=error.retry_after_s)", False),
        ("SluiceError.resource_exhausted('FULL', 'full', 1.0)", False),
        ("SluiceError(grpc.StatusCode.ABORTED, 'LOST', 'lost')", False),
        ("context.abort(error.code, status.message, details)", False),
    ],
)
def test_an_error_without_a_time_to_call_again_is_found(code, is_untimed) -> None:
    assert bool(list(untimed(ast.parse(code)))) == is_untimed


def test_every_reason_that_is_raised_is_in_errors_proto() -> None:
    unknown = {
        (str(path.relative_to(ROOT)), reason)
        for path, text in sources()
        for reason in raised(ast.parse(text))
        if reason not in LISTED
    }
    assert not unknown, "add them to proto/sluice/v1/errors.proto"


def test_every_reason_in_errors_proto_is_raised() -> None:
    code = "".join(text for _, text in sources())
    assert not [reason for reason in LISTED if f'"{reason}"' not in code], (
        "remove them from proto/sluice/v1/errors.proto"
    )
