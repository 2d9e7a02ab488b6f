"""`sluice training-api` as users start it: three services in one command, and the loop of examples/own_loop against them."""

import asyncio
import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.cli.init_model import ModelShape, init_model
from sluice.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENDS_S = 300
"""Seconds for three processes to save and end."""

OWN_LOOP = Path(__file__).parents[2] / "examples/own_loop"


def test_a_loop_trains_against_the_services_that_one_command_starts(tmp_path: Path, monkeypatch, capsys) -> None:
    init_model(tmp_path / "model", ModelShape(layers=1))
    spec = importlib.util.spec_from_file_location("rl_loop", OWN_LOOP / "rl_loop.py")
    assert spec is not None
    assert spec.loader is not None
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    for name, value in {"STEPS": 2, "TASKS": 2, "SAMPLES": 2}.items():
        monkeypatch.setattr(loop, name, value)
    flags = ("--model", str(tmp_path / "model"), "--output-dir", str(tmp_path / "out"), "--tuner.server.port", "0")
    argv = [sys.executable, "-m", "sluice.cli.main", "training-api", "@", str(OWN_LOOP / "tuner.toml"), *flags]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        seen: list[str] = []
        try:
            for line in process.stdout:
                seen.append(line)
                if sum("serves" in each for each in seen) == 3:  # in any order
                    break
            address = re.search(r"training API at (\S+)", "".join(seen))
            assert address, seen
            asyncio.run(loop.main(address[1]))
        finally:
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=ENDS_S)[0]
    assert process.returncode == 130, rest
    assert re.search(r"stopped after .* trainings are saved in ", rest)
    assert re.search(r"held out, after: \d\.\d+", capsys.readouterr().out)
    assert list((tmp_path / "out/own_loop/trainings").rglob("*.safetensors"))


def test_replicas_that_could_not_hold_the_adapters_are_refused(tmp_path: Path, capsys) -> None:
    words = ["training-api", "@", str(OWN_LOOP / "tuner.toml"), "--model", str(tmp_path)]
    assert main([*words, "--tuner.lora.rank", "32", "--dry-run"]) == 2
    assert "rollout.lora.max_rank to 32" in capsys.readouterr().err
