"""A short pass of `sluice bench fuzz`: every RPC, route and parser gets inputs, and none of them finds a defect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzz import command
from benchmarks.fuzz.codecs import TARGETS
from benchmarks.fuzz.routes import VENV, gateway_document, replica_document

pytestmark = [pytest.mark.fuzz, pytest.mark.slow, pytest.mark.timeout(900)]

PROTO = Path(__file__).parents[2] / "proto/sluice/v1"


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    if not (VENV / "bin/schemathesis").exists():
        pytest.skip(f"{VENV} is not there: `make install-ecosystem` makes it")


def fuzzed(*words: str) -> Mapping[str, Any]:
    result = command.run(list(words))
    assert result["failures"] == []
    return result["inputs"]


def test_no_rpc_of_any_service_has_a_defect() -> None:
    inputs = fuzzed("--only", "rpc", "--inputs", "12")
    contracts = {
        f"{line.split()[1]}/{rpc.split()[1].partition('(')[0]}"
        for file in PROTO.glob("*.proto")
        for line, *rpcs in services(file.read_text())
        for rpc in rpcs
    }
    got = {place.rpartition("sluice.v1.")[2] for place, count in inputs.items() if "sluice.v1." in place and count}
    assert got == contracts


def services(text: str) -> list[list[str]]:
    """The line of each service in a file of contracts, and those of its RPCs."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("service "):
            found.append([line])
        elif line.startswith("  rpc "):
            found[-1].append(line)
    return found


def test_no_http_route_has_a_defect() -> None:
    inputs = fuzzed("--only", "http", "--examples", "2")
    for name, document in (("gateway", gateway_document()), ("rollout", replica_document())):
        for path, operations in document["paths"].items():
            for method in operations:
                assert inputs.get(f"http {name} {method.upper()} {path}"), path


def test_no_parser_has_a_defect() -> None:
    inputs = fuzzed("--only", "codecs", "--seconds", "2")
    assert {name for name, count in inputs.items() if count} == {f"codec {name}" for name in TARGETS}


def test_clients_that_are_slow_or_hostile_harm_nobody() -> None:
    inputs = fuzzed("--only", "clients")
    assert inputs["clients gateway idle connections"] == 4000  # those of the warm-up too
