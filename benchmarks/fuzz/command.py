"""Hostile input for every RPC, every HTTP route and every parser of the services, and clients that are slow or hostile.

All services run as processes of their own, with principals, in a network of their own where the system allows it. A finding is: a code or
status that the contracts do not have, a traceback in a log, no answer to a sound call, a process that ended, a connection that is kept
for ever, an undocumented exception of a parser, or memory, files or calls in progress that grow with the inputs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fuzz.clients import MORE_FILES, answers, attack, grew
from benchmarks.fuzz.findings import Findings
from benchmarks.fuzz.stack import SERVICES, Load, Stack, Watched, prepare
from sluice.config import ConfigError, whole_number

PARTS = ("rpc", "http", "codecs", "clients")

ORDER = ("gateway", "orchestrator", "envserver", "rollout", "weightsync", "trainer")
"""Order in which the services' RPCs are fuzzed: each service comes before the services that it needs."""

ATTACKED = ("gateway", "orchestrator", "rollout")

WARM_UP = 4
"""`Row.before` is measured after one `WARM_UP`th of the inputs, when buffers and caches are filled."""

_INSIDE = "FUZZ_OWN_NETWORK"


@dataclass
class Row:
    """The results of one RPC, route, parser or kind of client.

    Attributes:
        inputs: Number of inputs.
        outcomes: Counts of codes or statuses.
        findings: Different defects.
        before: Memory of the service, or of the parser's process, before; as text.
        after: The same afterwards.
    """

    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: int = 0
    before: str = ""
    after: str = ""


def run(argv: list[str]) -> Mapping[str, Any]:
    """Fuzz, print the table, and return the content of the JSON line, whose `failures` must be empty.

    Raises:
        ConfigError: if something that is needed is not installed.
    """
    parser = argparse.ArgumentParser(prog="sluice bench fuzz", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--services", nargs="+", choices=ORDER, default=list(ORDER), help="services to call by RPC")
    parser.add_argument("--inputs", type=whole_number(WARM_UP), default=400, help="inputs of each RPC")
    parser.add_argument(
        "--examples",
        type=whole_number(1),
        default=60,
        help="drawn requests of each HTTP route; from 10 on, also each bound of its schema",
    )
    parser.add_argument("--seconds", type=whole_number(1), default=30, help="seconds of each parser")
    parser.add_argument("--codecs", nargs="+", help="parsers to fuzz; default: all")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="decides the inputs")
    options = parser.parse_args(argv)
    if not _INSIDE_NETWORK and (namespace := _own_network()):
        return _again(namespace, argv)
    with tempfile.TemporaryDirectory(prefix="sluice-fuzz-") as directory:
        return Job(options, Path(directory)).run()


_INSIDE_NETWORK = _INSIDE in os.environ


def _own_network() -> list[str]:
    """Return the words that run a program in a network of its own with only loopback; empty if that is not allowed.

    Services look up and connect to random addresses: none of that may leave this machine.
    """
    words = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if shutil.which("unshare") is None:
        return []
    trial = subprocess.run([*words, sys.executable, "-c", _UP], capture_output=True, check=False, timeout=30)  # noqa: S603 - constants
    return words if trial.returncode == 0 else []


_UP = """
import fcntl, socket, struct
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", 1 | 64))
"""
"""Sets loopback up: SIOCSIFFLAGS with IFF_UP and IFF_RUNNING."""


def _again(namespace: Sequence[str], argv: Sequence[str]) -> Mapping[str, Any]:
    """Run this benchmark again in a network of its own; it prints the same."""
    import json  # noqa: PLC0415

    start = f"{_UP}\nimport json, sys\nfrom benchmarks.fuzz.command import run\nresult = run(sys.argv[2:])\n"
    start += "open(sys.argv[1], 'w').write(json.dumps(result))"
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        command = [*namespace, sys.executable, "-c", start, result.name, *argv]
        ended = subprocess.run(command, check=False, env={**os.environ, _INSIDE: "1"})  # noqa: S603 - our own words
        text = Path(result.name).read_text()
    if not text:
        raise ConfigError(f"the benchmark ended with code {ended.returncode}: what it printed says why")
    found: Mapping[str, Any] = json.loads(text)
    return found


@dataclass
class Job:
    """One run of this benchmark."""

    options: argparse.Namespace
    directory: Path
    rows: dict[str, Row] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)

    def run(self) -> Mapping[str, Any]:
        """Run the parts, print the table and return the figures."""
        if "codecs" in self.options.only:
            self._codecs()
        if {*self.options.only} - {"codecs"}:
            asyncio.run(self._services())
        self._print()
        return {
            "seed": self.options.seed,
            "inputs": {name: row.inputs for name, row in self.rows.items()},
            "memory": {name: [row.before, row.after] for name, row in self.rows.items()},
            "own_network": _INSIDE_NETWORK,
            "failures": self.findings.lines(),
        }

    def _row(self, name: str) -> Row:
        return self.rows.setdefault(name, Row())

    def _codecs(self) -> None:
        from benchmarks.fuzz import codecs  # noqa: PLC0415 - loads the contracts

        for name in self.options.codecs or codecs.TARGETS:
            fuzzed = codecs.fuzz(
                name, self.directory, self.findings, seconds=self.options.seconds, seed=self.options.seed + 1
            )
            row = self._row(f"codec {name}")
            row.inputs, row.before, row.after = fuzzed.inputs, f"{fuzzed.before} MiB", f"{fuzzed.after} MiB"
            row.findings = self.findings.at(f"codec {name}")

    async def _services(self) -> None:
        stack = prepare(self.directory)
        async with stack.started(*SERVICES):
            try:
                await asyncio.to_thread(self._fuzz, stack)
            except RuntimeError as error:  # a service has ended: the rest would fail, too
                self.findings.add("services", str(error)[:1000], "")

    def _fuzz(self, stack: Stack) -> None:
        if "http" in self.options.only:
            self._http_services(stack)
        if "clients" in self.options.only:
            for name in ATTACKED:
                watched = stack.services[name]
                self._clients(stack, watched)
                self._measured(stack, watched, f"clients {name}", lambda watched=watched: self._clients(stack, watched))
        if "rpc" in self.options.only:
            for name in self.options.services:
                self._rpcs(stack, stack.services[name])

    def _http_services(self, stack: Stack) -> None:
        from benchmarks.fuzz import routes  # noqa: PLC0415 - needs what tests alone need

        begun = {
            name: routes.begin_unfinished(stack.services[name], "/v1/completions", stack.tokens[role])
            for name, role in routes.ROLES.items()
        }
        for name in begun:
            self._http(stack, stack.services[name])
        for name, each in begun.items():
            ended = routes.end_unfinished(stack.services[name], self.findings, each)
            self._row(f"raw {name} unfinished").inputs += ended

    def _http(self, stack: Stack, watched: Watched) -> None:
        from benchmarks.fuzz import routes  # noqa: PLC0415 - needs what tests alone need

        document = routes.gateway_document() if watched.name == "gateway" else routes.replica_document()
        posts = [path.replace("{name}", "x") for path, each in document["paths"].items() if "post" in each]
        token = stack.tokens[routes.ROLES[watched.name]]

        def bodies(examples: int) -> None:
            seed = self.options.seed + 1
            ran = routes.run_schemas(stack, watched, document, self.findings, examples=examples, seed=seed)
            for route, count in ran.inputs.items():
                row = self._row(f"http {watched.name} {route}")
                row.inputs += count
                row.outcomes.update(ran.statuses[route])

        def raw() -> None:
            for path in posts:
                row = self._row(f"raw {watched.name} {path}")
                row.inputs += routes.send_raw(watched, self.findings, [path], token)

        raw()
        bodies(1)
        self._measured(stack, watched, f"http {watched.name}", lambda: bodies(self.options.examples))
        self._measured(stack, watched, f"raw {watched.name}", raw)

    def _clients(self, stack: Stack, watched: Watched) -> None:
        for kind, count in attack(stack, watched, self.findings).items():
            row = self._row(f"clients {watched.name} {kind}")
            row.inputs += count

    def _rpcs(self, stack: Stack, watched: Watched) -> None:
        from benchmarks.fuzz.rpcs import Fuzzer, path_of  # noqa: PLC0415 - loads Hypothesis, which tests alone need

        fuzzer = Fuzzer(stack, watched, self.findings)
        methods = fuzzer.methods()

        def every(count: int, seed: int) -> None:
            for method in methods:
                path = path_of(method)
                row = self._row(f"rpc {watched.name} {path[1:]}")
                row.inputs += fuzzer.fuzz(method, count, seed)
                row.outcomes = fuzzer.codes[path]
                if not answers(watched, stack.tokens):
                    self.findings.add(path, "no answer to a sound call afterwards", "")

        first = max(1, self.options.inputs // WARM_UP)
        every(first, 2 * self.options.seed)
        self._measured(
            stack, watched, f"rpc {watched.name}", lambda: every(self.options.inputs - first, 2 * self.options.seed + 1)
        )
        fuzzer.channel.close()

    def _measured(self, stack: Stack, watched: Watched, rows: str, work: Any) -> None:  # noqa: ANN401 - a function
        """Do `work` to a service, and compare its resources before and after."""
        before = watched.load()
        work()
        after = watched.settled(before.calls, before.files + MORE_FILES)
        for what, grown in grew(before, after).items():
            self.findings.add(f"{rows} as a whole", f"{what} grew", f"{grown}: {before} -> {after}")
        if not answers(watched, stack.tokens):
            self.findings.add(f"{rows} as a whole", "no answer to a sound call afterwards", "")
        for name, row in self.rows.items():
            if name.startswith(f"{rows} "):
                row.before, row.after = row.before or _short(before), _short(after)

    def _print(self) -> None:
        for name, row in self.rows.items():
            place = name.split(" ", 2)[-1]
            row.findings = max(
                row.findings, self.findings.at(place), self.findings.at(f"/{place}"), self.findings.at(name)
            )
        width = max(map(len, self.rows), default=0)
        print(f"{'':<{width}}  {'inputs':>7}  {'findings':>8}  {'before':>22}  {'after':>22}  outcomes")
        for name, row in self.rows.items():
            outcomes = ", ".join(f"{code} {count}" for code, count in row.outcomes.most_common(4))
            print(f"{name:<{width}}  {row.inputs:>7}  {row.findings:>8}  {row.before:>22}  {row.after:>22}  {outcomes}")
        print(
            "\n".join(["findings:", *self.findings.lines()] if self.findings.lines() else ["no findings"]), flush=True
        )


def _short(load: Load) -> str:
    return f"{load.rss >> 20} MiB, {load.files} files"
