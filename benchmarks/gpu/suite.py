"""Separate programs on the device: a whole run, and tests/gpu with pytest."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree as ET

from benchmarks.gpu.case import Case
from benchmarks.gpu.parts import Figures, Measurements, NotRunError

ROOT = Path(__file__).parents[2]

SUITE_S = 420.0
"""Seconds for all tests."""

RUN_S = 220.0
"""Seconds for a whole run."""

REPORTED = (
    *("state", "steps", "wall_s", "step_s_mean", "reward_curve", "mismatch_kl_mean", "tokens_generated"),
    *("requests_spanning_versions", "trainer_idle_share", "rollout_idle_share", "findings"),
)
"""Fields of a run's report.json that are kept."""


def whole_run(case: Case) -> Measurements:
    """Train a small model on an example with trainer and engine on the device, by `sluice rl`: with the transformers engine, and with vLLM."""
    for engine in ("transformers", "vllm"):
        yield engine, partial(_whole_run, case, engine)


def _whole_run(case: Case, engine: str) -> Figures:
    if importlib.util.find_spec(engine) is None:
        raise NotRunError(f"{engine} is not installed")
    if not entry_points(group="sluice.services"):
        raise NotRunError("the services are not known: pip install --no-deps --no-build-isolation -e .")
    directory = case.directory / f"run-{engine}"
    small, program = directory / "model", [sys.executable, "-m", "sluice.cli.main"]
    device = case.device.type
    subprocess.run(  # noqa: S603 - our own program
        [*program, "init-model", str(small)], cwd=ROOT, stdout=sys.stderr, check=True, timeout=RUN_S
    )
    words = [
        f"--model={small}",
        f"--output-dir={directory}",
        "--run=whole",
        f"--orchestrator.max-steps={case.shape.steps}",
    ]
    placed = [f"--rollout.engine={engine}", f"--trainer.device={device}"]
    if engine == "transformers":  # vLLM uses the device by itself
        placed.append(f"--rollout.device={device}")
    begun = time.perf_counter()
    subprocess.run(  # noqa: S603 - our own program
        [*program, "rl", "@", "examples/reverse_text/rl.toml", *words, *placed],
        cwd=ROOT,
        stdout=sys.stderr,
        check=True,
        timeout=RUN_S,
    )
    seconds = time.perf_counter() - begun
    report = json.loads((directory / "whole" / "report.json").read_text())
    return {"whole_s": round(seconds, 1)} | {name: report[name] for name in REPORTED}


def tests(case: Case) -> Measurements:
    """Run the tests that need CUDA."""
    yield "tests/gpu", lambda: _run(case)


def _run(case: Case) -> Figures:
    if case.device.type != "cuda":
        raise NotRunError("tests/gpu needs CUDA")
    report = case.directory / "tests.xml"
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", "tests/gpu"]
    subprocess.run([sys.executable, *words], cwd=ROOT, stdout=sys.stderr, check=False, timeout=SUITE_S)  # noqa: S603 - ours
    return outcomes(report)


def outcomes(report: Path) -> Figures:
    """Return the outcomes from a JUnit report of pytest.

    Raises:
        AssertionError: if a test failed, or none was run.
    """
    cases = list(ET.parse(report).getroot().iter("testcase"))  # noqa: S314 - pytest has just written it
    failed = {each.get("name", ""): _first_line(each) for each in cases if _first_line(each)}
    skipped = [each.get("name", "") for each in cases if each.find("skipped") is not None]
    if failed or len(skipped) == len(cases):
        raise AssertionError(f"{len(cases)} tests, {len(skipped)} skipped, failed: {failed}")
    return {"passed": len(cases) - len(skipped), "skipped": skipped}


def _first_line(case: ET.Element) -> str:
    found = next((each for each in (case.find("failure"), case.find("error")) if each is not None), None)
    return "" if found is None else (found.get("message") or "failed").splitlines()[0]
