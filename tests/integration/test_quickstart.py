"""The main job, small: every stage with the real services, sampled by transformers so that it takes a minute."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from supervised import LIMIT_S
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

from sluice.metric_names import OWN_LOSS, find

ROOT = Path(__file__).parents[2]
SLUICE = (sys.executable, "-m", "sluice.cli.main")
SMALL = ("--engine", "transformers", "--steps", "3", "--sft-steps", "2", "--prompts", "8", "--plain")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def quickstart(output_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    argv = [*SLUICE, "quickstart", "--output-dir", str(output_dir), *SMALL, *flags]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=4 * LIMIT_S, check=False)


def test_the_quickstart_writes_a_model_a_report_and_every_file_that_it_names(tmp_path: Path) -> None:
    done = quickstart(tmp_path, "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    directory = tmp_path / "quickstart"
    report = json.loads((directory / "report.json").read_text())
    assert (report["steps"], report["seed"]) == (3, 3)
    assert report["tokens_generated"] >= report["tokens_trained"] > 0
    assert 0 <= report["reward_before"] <= 1
    assert 0 <= report["reward_after"] <= 1
    assert report["max_staleness_seen"] <= 2
    assert (directory / "weights" / "v1.3" / "model.safetensors").exists()
    for name in ("reward.png", "tensorboard", "trajectories", "config.toml", "logs/trainer.log"):
        assert (directory / name).exists(), name
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    names = {name for values in metrics for name in values} - {"step", "time"}
    assert {name for name in names if find(name) in (None, OWN_LOSS)} == set(), "each has a row in metric_names.py"
    shown = EventAccumulator(str(directory / "tensorboard" / "quickstart"))
    shown.Reload()
    assert set(shown.Tags()["scalars"]) == names
    session = shown.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    assert parse_session_start_info_plugin_data(session).hparams["trainer.lr"].number_value > 0
    for expected in ("before RL", "after RL", "tensorboard --logdir", "reward.png", "v1.3"):
        assert expected in done.stdout


@pytest.mark.soak
def test_ctrl_c_ends_the_quickstart_and_all_of_its_services(tmp_path: Path) -> None:
    argv = [*SLUICE, "quickstart", "--output-dir", str(tmp_path), *SMALL]
    argv += ["--sft-steps", "2", "--prompts", "2", "--steps", "100000"]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 2/"):
                break
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(timeout=LIMIT_S) == 130, rest
    assert "stopped after" in rest
    assert len(children) >= 4
    _, alive = psutil.wait_procs(children, timeout=LIMIT_S)
    assert not alive
