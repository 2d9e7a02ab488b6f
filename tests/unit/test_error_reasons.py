"""Every reason of an error is in the contracts, so that a client in any language knows it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from sluice.v1 import errors_pb2

ROOT = Path(__file__).parents[2]
PACKAGES = ("sluice", "rollout_svc", "trainer_svc", "orchestrator_svc", "weightsync", "gateway_svc", "envserver_svc")
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
