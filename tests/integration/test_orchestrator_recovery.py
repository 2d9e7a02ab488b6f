"""The four real services, of which some are killed: the run goes on, nothing is lost, nothing is trained twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from forked_run import ForkedRun
from rank_programs import RankPrograms

from sluice.cli.init_model import ModelShape, init_model
from sluice.client import OrchestratorClient, TrainerClient
from sluice.rpc import SluiceError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEADLINE_S = 800
"""Real seconds for the whole run; only a broken one takes them."""

STEPS = 24

ENVIRONMENT = """
from sluice.environments.base import Task

class Vowels:
    name = "vowels"

    def tasks(self, split, seed):
        return [Task(f"{split}-{index}", {"text": "abcdefgh"[: 1 + index % 8]}) for index in range(64)]

    def messages(self, task):
        return [{"role": "user", "content": task.data["text"]}]

    def score(self, task, completion):
        return sum(letter in "aeiou" for letter in completion) / max(1, len(completion))
"""


SETTINGS = """
run = "recovery"
model = "{directory}/model"
output_dir = "{directory}/out"
max_staleness = 2
[orchestrator]
environment = "{directory}/vowels_env.py:Vowels"
batch_size = 4
group_size = 4
max_steps = {steps}
sampling = {{ max_tokens = 16 }}
checkpoint = {{ every_steps = 5 }}
[trainer]
lr = 1e-3
[rollout]
engine = "transformers"
stage_dir = "{directory}"
"""


class Services(ForkedRun):
    """One run's processes."""

    def __init__(self, programs: RankPrograms, directory: Path) -> None:
        super().__init__(programs, directory, ["@", str(directory / "run.toml")])
        self.run_dir = directory / "out" / "recovery"
        (directory / "vowels_env.py").write_text(ENVIRONMENT)
        shape = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=128)
        init_model(directory / "model", shape, seed=0)
        (directory / "run.toml").write_text(SETTINGS.format(directory=directory, steps=STEPS))

    async def reaches(self, step: int) -> None:
        """Wait until a step is applied."""
        while True:
            with contextlib.suppress(SluiceError):
                async with OrchestratorClient(self.addresses["orchestrator"]) as client:
                    async for answer in client.watch("recovery"):
                        if answer.event.step_finished.step >= step:
                            return
            assert self.processes["orchestrator"].returncode is None, self.log("orchestrator")
            await asyncio.sleep(0.05)


@pytest.fixture
async def services(tmp_path: Path, rank_programs: RankPrograms) -> AsyncIterator[Services]:
    found = Services(rank_programs, tmp_path)
    try:
        yield found
    finally:
        await found.stop()


async def saved_without_an_orchestrator(services) -> int:
    """Let the trainer apply what it has and write a checkpoint; return the number of its version."""
    async with TrainerClient(services.addresses["trainer"]) as client:
        while (await client.state("recovery")).queued_batches:  # noqa: ASYNC110 - the state is polled on purpose
            await asyncio.sleep(0.05)
        return (await client.save_checkpoint("recovery", 0, timeout_s=DEADLINE_S)).checkpoint.policy_version.number


async def test_a_run_survives_the_deaths_of_its_orchestrator_and_of_its_trainer(services) -> None:
    """Each alone; then both, after the trainer applied batches that only its checkpoint knows."""
    async with asyncio.timeout(DEADLINE_S):
        for name in services.addresses:
            await services.start(name)
        await services.reaches(4)
        await services.kill("orchestrator")
        await services.start("orchestrator")
        await services.reaches(9)
        await services.kill("trainer")
        await services.start("trainer")
        await services.reaches(14)
        await services.kill("orchestrator")
        saved = await saved_without_an_orchestrator(services)
        await services.kill("trainer")
        for name in ("trainer", "orchestrator"):
            await services.start(name)
        code = await services.processes["orchestrator"].wait()
    assert code == 0, services.log("orchestrator")
    assert saved >= 14
    report = json.loads((services.run_dir / "report.json").read_text())
    assert (report["state"], report["steps"]) == ("succeeded", STEPS)
    assert report["epochs"] == 3, "only the trainer's deaths open epochs"
    assert report["max_staleness_seen"] <= 2
    assert "REPORT_LOST" not in report["trajectories_dropped"]
    dropped = sum(report["trajectories_dropped"].values())
    assert report["trajectories_accepted"] == report["trajectories_trained"] + dropped
    assert sorted(step for step, _ in report["reward_curve"]) == list(range(1, STEPS + 1)), "none is left out"
    trained = [
        row for step in range(1, STEPS + 1) for row in rows(services.run_dir, step) if row["outcome"] == "trained"
    ]
    assert len(trained) == len({row["trajectory_id"] for row in trained}) == report["trajectories_trained"]
    assert all(row["staleness"] <= 2 for row in trained)


def rows(run_dir: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "trajectories" / f"step_{step:06d}.jsonl").read_text().splitlines()]
