"""The images of the services hold what the services import, and compose starts each with settings that it takes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml

from sluice.config import load_run
from sluice.plan import Machines, make_plan
from sluice.plan.compose import document
from sluice.rpc.access import is_local

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy/docker"
FILE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
COMPOSE = FILE["services"]
SERVICES = sorted(COMPOSE.keys() - {"prepare"})

IMPORT_WITH_CONTROL_ALONE = """
import importlib, importlib.metadata, pkgutil, re, sys

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

listed = {plain(line) for line in open("requirements/control.txt").read().splitlines() if not line.startswith("#")}
installed = importlib.metadata.packages_distributions()
others = {top for top, names in installed.items() if not {plain(name) for name in names} & (listed | {"sluice"})}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in others:
            raise ModuleNotFoundError(f"{name} is not in requirements/control.txt", name=name)

sys.meta_path.insert(0, Missing())
for package in sys.argv[1:]:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        importlib.import_module(module.name)
"""
"""Imports packages of ours in an interpreter that has what the images of the control plane have."""


def test_the_wheel_in_the_images_has_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {each.rstrip("*") for each in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = set(re.findall(r"^COPY (\w+) \1$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE))
    sent = {line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert packages <= copied & sent


@pytest.mark.slow
def test_a_gateway_imports_only_what_its_image_has() -> None:
    command = [sys.executable, "-c", IMPORT_WITH_CONTROL_ALONE, "gateway_svc", "sluice.openai", "sluice.sampling"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(COMPOSE))
def test_a_container_has_a_read_only_image_and_no_capability(name: str) -> None:
    service = COMPOSE[name]
    confined = {key: service[key] for key in ("read_only", "cap_drop", "security_opt", "pids_limit")}
    rules = {"read_only": True, "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"], "pids_limit": 4096}
    assert confined == rules
    assert "mem_limit" in service
    assert not {"privileged", "cap_add", "user", "network_mode", "pid", "devices"} & service.keys()


def test_every_image_runs_as_a_user_that_kubernetes_sees_is_not_root() -> None:
    stages = re.split(r"^FROM ", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    roles = [stage for stage in stages if stage.startswith("runtime AS ")]
    assert len(roles) >= len({"weightsync", "orchestrator", "gateway", "trainer", "rollout"})
    assert {re.findall(r"^USER (.+)$", stage, re.MULTILINE)[-1] for stage in roles} == {"10001:10001"}


@pytest.mark.parametrize("name", SERVICES)
def test_compose_starts_a_service_with_settings_that_it_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command = [_interpolated(word) for word in COMPOSE[name]["command"]]
    server = load_run(command[1:], service=command[0]).section(command[0]).server
    assert not is_local(server.host), "other containers reach it"
    assert COMPOSE[name]["healthcheck"]["test"][-3] == f"localhost:{server.port}"
    for published in map(_interpolated, COMPOSE[name].get("ports", [])):
        address, _outside, inside = published.split(":")
        assert address == "127.0.0.1"
        assert int(inside) in {server.port, server.http_port}


def test_the_compose_file_is_the_plan_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ["@", "examples/reverse_text/rl.toml"]
    plan = make_plan(load_run(words), Machines(), extra={"gateway": 1, "relay": 1})
    written = {name: block for name, block in FILE.items() if not name.startswith("x-")}
    assert document(plan, words) == written


READ_AT_EACH_STEP = """#!{python} -IS
import os, ssl, sys
def run(*words): return os.waitstatus_to_exitcode(os.waitpid(os.posix_spawnp(words[0], words, os.environ), 0)[1])
name = os.path.basename(sys.argv[0])
os.environ["PATH"] = os.environ["PATH"].partition(":")[2]

if name == "mountpoint":
    sys.exit(0)
if name == "sluice":
    words = [sys.executable, "-m", "sluice.cli.main", *sys.argv[1:]]
    if sys.argv[1:3] == ["certs", "renew"] and {renewed!r}:
        words.append("--all")
    sys.exit(run(*words))
code = run(name, *sys.argv[1:])
for service in os.scandir({keys!r}):
    if os.path.exists(service.path + "/tls.pem"):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(service.path + "/tls.pem", service.path + "/tls.key")
        except OSError as error:
            open({log!r}, "a").write(f"{{service.name}} after {{sys.argv}}: {{error}}\\n")
sys.exit(code)
"""
"""In place of the programs of `prepare.sh`: runs them, and reads key and certificate of each service as one that starts right then."""


def prepared(tmp_path: Path, *, renewed: bool) -> str:
    """Run `prepare.sh` below a folder; return the states, after one of its steps, with which no service could start."""
    keys, programs, log = tmp_path / "keys", tmp_path / "bin", tmp_path / "log"
    for each in (tmp_path / "authority", keys / "trainer", keys / "gateway", programs):
        each.mkdir(parents=True, exist_ok=True)
    text = READ_AT_EACH_STEP.format(python=sys.executable, keys=str(keys), log=str(log), renewed=renewed)
    for name in ("mountpoint", "sluice", "cp", "mv", "ln", "rm", "find"):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    script = (DOCKER / "prepare.sh").read_text().replace("/run/sluice", str(tmp_path))
    variables = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PREPARE": "none", "PYTHONPATH": str(ROOT)}
    command = ["/bin/sh", "-c", script]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return log.read_text() if log.exists() else ""


@pytest.mark.slow
def test_a_service_of_compose_can_start_at_any_moment_of_a_renewal(tmp_path: Path) -> None:
    assert prepared(tmp_path, renewed=False) == ""
    trainer = tmp_path / "keys/trainer"
    first = (trainer / "tls.pem").read_bytes()
    for _ in range(2):
        assert prepared(tmp_path, renewed=True) == ""
    assert (trainer / "tls.pem").read_bytes() == (tmp_path / "authority/trainer.pem").read_bytes() != first
    assert sorted(each.name for each in trainer.glob("[!.]*")) == ["ca.pem", "principals.toml", "tls.key", "tls.pem"]
    assert len(list(trainer.glob(".state-*"))) == 2, "this one and the one before"
    assert "viewer" in (tmp_path / "keys/gateway/principals.toml").read_text(), "the gateway knows tokens"


@contextmanager
def served(tmp_path: Path, program: str) -> Iterator[subprocess.Popen[str]]:
    """Start what runs a service in a container, with a program in place of `sluice`; nothing of it is left."""
    (tmp_path / "sluice").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "sluice").chmod(0o755)
    command = ["/bin/sh", str(DOCKER / "serve.sh"), "gateway", "@", "rl.toml"]
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    process = subprocess.Popen(command, env=path, text=True, **pipes)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (1, 1), (2, 0), (3, 0), (4, 4), (5, 0), (143, 143)])
def test_what_another_start_would_not_cure_ends_with_0_in_compose(code: int, seen: int, tmp_path: Path) -> None:
    with served(tmp_path, f'echo "$@"; exit {code}') as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (seen, "gateway @ rl.toml\n")
    assert ("exit code" in err) == (code != seen)


@pytest.mark.parametrize(("code", "seen"), [(0, 0), (1, 1), (3, 0)])
def test_a_service_of_compose_drains_when_its_container_is_stopped(code: int, seen: int, tmp_path: Path) -> None:
    program = f"trap 'echo drained; exit {code}' TERM; echo serves; while :; do sleep 0.1; done"
    with served(tmp_path, program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serves\n"
        process.terminate()
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (seen, "drained\n")


def _interpolated(text: str) -> str:
    """The text with the default of each variable, as compose reads it where no variable is set."""
    while (shorter := re.sub(r"\$\{\w+:-([^${}]*)\}", r"\1", text)) != text:
        text = shorter
    return text
