"""The agents of examples/tool_use train a run: unmodified libraries in an environment of their own, every service real."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.rpc.server import free_ports

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/tool_use"
PYTHON = Path(os.environ.get("SLUICE_ECOSYSTEM_PYTHON", ROOT / ".venv-ecosystem-agents/bin/python"))
SLUICE = (sys.executable, "-m", "sluice.cli.main")

STEPS, TASKS, ATTEMPTS = 3, 4, 4

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="the agents are not installed: run `make install-ecosystem`"),
]


def ran(*argv: str) -> str:
    """Run a command to its end; return what it prints."""
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned to call, and little else."""
    directory = tmp_path_factory.mktemp("tool_use")
    model, data, warm = (str(directory / name) for name in ("base", "demonstrations.jsonl", "warm"))
    ran(*SLUICE, "init-model", model)
    ran(sys.executable, str(EXAMPLE / "demonstrations.py"), data, "--count", "6400")
    ran(
        *SLUICE,
        "sft",
        "@",
        str(EXAMPLE / "sft.toml"),
        "--max-steps",
        "120",
        *("--model", model, "--data", data, "--output", warm),
    )
    return directory / "warm"


@pytest.mark.parametrize("agent", ["agent_openai_agents", pytest.param("agent_anthropic", marks=pytest.mark.soak)])
def test_an_agent_with_a_tool_trains_a_run_and_ends_with_it(warm: Path, tmp_path: Path, agent: str) -> None:
    grpc, http = free_ports(2)
    small = [
        "--orchestrator.batch-size",
        TASKS,
        "--orchestrator.group-size",
        ATTEMPTS,
        "--orchestrator.max-steps",
        STEPS,
    ]
    ports = ["--gateway.server.port", grpc, "--gateway.server.http-port", http]
    rl = [
        *SLUICE,
        "rl",
        "@",
        str(EXAMPLE / "rl.toml"),
        "--model",
        str(warm),
        "--output-dir",
        str(tmp_path),
        *map(str, small + ports),
    ]
    with subprocess.Popen(rl, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            said = ran(
                str(PYTHON), str(EXAMPLE / f"{agent}.py"), "--gateway", f"http://127.0.0.1:{http}", "--at-a-time", "16"
            )
            shown, _ = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == 0, shown
    assert "the run has ended" in said
    episodes, share = re.findall(r"^(\d+) episodes.*with a call (\d+)%", said, re.MULTILINE)[-1]
    assert int(episodes) >= STEPS * TASKS * ATTEMPTS
    # A briefly warmed model calls in three quarters of 48 episodes or more; one whose calls are not parsed, in none.
    assert int(share) >= 50, said
    report = json.loads((tmp_path / "tool_use/report.json").read_text())
    assert report["steps"] == STEPS
    assert ran(*SLUICE, "audit", str(tmp_path / "tool_use"))
