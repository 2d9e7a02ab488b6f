"""What can never be trained is set aside, and nothing that arrives ends a run: a real orchestrator, and the trainer's real admission."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from orchestrator_doubles import RolloutDouble
from simulated_clock import SimulatedClock
from structlog.testing import capture_logs
from test_orchestrator_run import DEADLINE_S, LIMIT_S, TICK_S, Scene, make_scene, trained

from orchestrator_svc.commands.audit_compare import audit
from orchestrator_svc.journal.store import read_facts
from orchestrator_svc.run import setting_aside
from sluice import limits
from sluice.config import FailedForGoodError, TooMuchSetAsideError
from sluice.rpc import SluiceError
from sluice.v1 import orchestrator_pb2, tokens_pb2
from sluice.versions import Lineage
from trainer_svc.config import TrainerConfig

pytestmark = pytest.mark.slow

ENVIRONMENT = """
from sluice.environments.base import Task

class Odd:
    name = "odd"

    def __init__(self, rewards=(0.0, 1.0), odd=("train-1",), longest=0, count=4):
        self.rewards, self.odd, self.longest, self.count = rewards, odd, longest, count
        self.turn = 0

    def tasks(self, split, seed):
        return [Task(f"{split}-{index}", {"odd": f"{split}-{index}" in self.odd}) for index in range(self.count)]

    def messages(self, task):
        return [{"role": "user", "content": "x" * (self.longest if self.longest and task.data["odd"] else 3)}]

    def score(self, task, completion):
        first = len(completion) < 3
        if task.data["odd"]:
            return self.rewards[not first]
        return 0.25 if first else 0.75
"""


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """Doubles around a real orchestrator; at the end both sides agree on what became of every trajectory."""
    async with contextlib.AsyncExitStack() as stack:
        built = await make_scene(tmp_path, stack, [RolloutDouble()])
        built.trainer.admission = TrainerConfig()
        built.replicas[0].prompt = lambda request: [1] * len(request.conversation.messages[0].content)
        (tmp_path / "odd.py").write_text(ENVIRONMENT)
        yield built
        assert not audit(read_facts(built.run_dir), built.trainer.record, Lineage()).differences


def odd(scene: Scene, **args: object) -> dict:
    """Settings of a run in which the groups of one task of four are odd."""
    return {"environment": f"{scene.directory}/odd.py:Odd", "environment_args": args, "max_set_aside": 1.0}


def check(scene: Scene, report: dict, reason: str) -> None:
    """The run trained all its batches, and counts what it could not train under one reason."""
    assert (report["state"], report["steps"]) == ("succeeded", 4)
    assert report["trajectories_dropped"].keys() - {"RUN_ENDED"} == {reason}
    assert len(trained(scene)) == len(set(trained(scene))) == report["trajectories_trained"]


async def test_a_reward_beyond_the_bound_counts_as_missing(scene) -> None:
    report = await scene.run(**odd(scene, rewards=[0.0, 1e39]))
    check(scene, report, "REWARD_TOO_LARGE")
    assert report["set_aside"] == {}  # it never passed the door


async def test_first_rewards_that_are_all_equal_are_said_and_the_run_goes_on(scene) -> None:
    tasks = [f"train-{index}" for index in range(4)]
    with capture_logs() as logs:
        report = await scene.run(**odd(scene, rewards=[0.5, 0.5], odd=tasks))
    assert (report["state"], report["steps"]) == ("succeeded", 4)
    (said,) = [each["problem"] for each in logs if each["event"] == "the first rewards look wrong"]
    assert "are 0.5, and most objectives learn nothing" in said


@pytest.mark.parametrize(
    ("advantage", "rewards", "remedy"),
    [
        ("rloo", [-3.3e38, 3.3e38], "max_reward"),
        ("centered", [-3.3e38, 3.3e38], ""),
        ("reinforce_pp_baseline", [-3.3e38, 3.3e38], ""),
        ("opo", [-3.3e38, 3.3e38], "max_reward"),
        ("maxrl", [-1.0, 1.0], "another estimator"),
    ],
)
async def test_a_group_whose_rewards_the_estimator_cannot_take_is_set_aside(scene, advantage, rewards, remedy) -> None:
    report = await scene.run(advantage=advantage, max_reward=limits.FLOAT32_MAX, **odd(scene, rewards=rewards))
    if remedy:
        check(scene, report, "REWARDS_UNFIT")
        assert remedy in report["set_aside"]["REWARDS_UNFIT"]["problem"]
        assert report["set_aside"]["REWARDS_UNFIT"]["trajectories"] == report["trajectories_dropped"]["REWARDS_UNFIT"]
    else:
        assert (report["state"], report["steps"], report["set_aside"]) == ("succeeded", 4, {})


async def test_a_trajectory_of_more_tokens_than_the_contract_allows_is_not_trained(scene) -> None:
    report = await scene.run(**odd(scene, longest=limits.MAX_TRAJECTORY_TOKENS))
    check(scene, report, "TOO_LONG")


async def test_the_largest_group_is_set_aside_where_a_batch_would_be_too_large(scene, monkeypatch) -> None:
    monkeypatch.setattr(setting_aside, "MAX_BATCH_BYTES", 1500)
    report = await scene.run(**odd(scene, longest=3000))
    check(scene, report, "BATCH_TOO_LARGE")
    assert "docs/limits.md" in report["set_aside"]["BATCH_TOO_LARGE"]["problem"]


async def test_only_the_rows_go_that_the_trainer_refuses(scene) -> None:
    def refuses(trajectory: tokens_pb2.Trajectory) -> str:
        return "has a token that the model lacks" if trajectory.trajectory_id in {"g2-1", "g5-0"} else ""

    scene.trainer.refuses = refuses
    report = await scene.run(**odd(scene, odd=[]))
    check(scene, report, "TRAINER_REFUSES")
    assert not {"g2-1", "g5-0"} & set(trained(scene))
    assert {"g2-0", "g5-1"} <= set(trained(scene))
    alone = [each for batch in scene.trainer.history.values() for each in batch if each.trajectory_id == "g2-0"]
    assert list(alone[0].advantages) == [0.0]  # the statistics are those of the rest


async def test_a_group_goes_whole_if_all_of_it_is_refused(scene) -> None:
    scene.trainer.refuses = lambda each: "no" if each.group_id in {"g1", "g4"} else ""
    report = await scene.run(**odd(scene, odd=[]))
    check(scene, report, "TRAINER_REFUSES")


async def test_a_batch_goes_whole_where_nobody_can_say_which_row(scene) -> None:
    scene.trainer.refusals = [SluiceError.invalid_argument("header.trajectory_count", "is 4; give 1 to 3")]
    report = await scene.run(**odd(scene, odd=[]))
    check(scene, report, "TRAINER_REFUSES")
    assert report["set_aside"]["TRAINER_REFUSES"]["trajectories"] == 4
    assert "give 1 to 3" in report["set_aside"]["TRAINER_REFUSES"]["problem"]


async def test_what_no_data_can_cause_still_ends_the_run(scene) -> None:
    scene.trainer.refusals = [SluiceError.invalid_argument("header.advantage_estimator", "there is none of this name")]
    with pytest.raises(FailedForGoodError, match="there is none of this name"):
        await scene.run(**odd(scene, odd=[]))


async def test_a_batch_that_does_not_fit_in_memory_ends_the_run_with_the_remedy(scene) -> None:
    scene.trainer.refusals = [SluiceError.failed_precondition("OUT_OF_MEMORY", "memory ran out: lower token_budget")]
    with pytest.raises(FailedForGoodError, match="lower token_budget"):
        await scene.run(**odd(scene, odd=[]))
    report = await scene.run(**odd(scene, odd=[]))
    assert (report["state"], report["steps"]) == ("succeeded", 4), "with other settings the run goes on"


async def test_a_journal_of_an_earlier_release_that_holds_such_a_batch_is_healed(scene, monkeypatch) -> None:
    """There the batch was made and refused, and each start sent it again."""
    unchecked = lambda name, episodes, advantages: None  # noqa: E731
    with monkeypatch.context() as earlier:
        earlier.setattr("sluice.advantages._check_size", unchecked)
        earlier.setattr("orchestrator_svc.run.setting_aside.BatchRefusedError.of", lambda error: None)
        with pytest.raises(Exception, match="not finite"):
            await scene.run(max_reward=limits.FLOAT32_MAX, advantage="rloo", **odd(scene, rewards=[-3.3e38, 3.3e38]))
    assert any(fact.HasField("batch_made") for _, fact in read_facts(scene.run_dir))
    report = await scene.run(max_reward=limits.FLOAT32_MAX, advantage="rloo", **odd(scene, rewards=[-3.3e38, 3.3e38]))
    check(scene, report, "REWARDS_UNFIT")


@pytest.mark.parametrize("loses_its_epoch", [False, True])
async def test_a_trainer_that_restarts_at_the_last_checkpoint_is_awaited(scene, loses_its_epoch) -> None:
    saves: list[None] = []

    def on_save() -> None:
        saves.append(None)
        if len(saves) == 1 and loses_its_epoch:
            scene.trainer.crash()
        if len(saves) < 4:
            raise SluiceError.unavailable("STARTING", "the trainer is being restarted", 0.01)

    scene.trainer.on_save = on_save
    report = await scene.run(**odd(scene, odd=[]))
    assert (report["state"], report["steps"]) == ("succeeded", 4)
    assert scene.trainer.epochs == ([1, 2] if loses_its_epoch else [1])
    assert scene.trainer.checkpoints == [4]


async def test_too_much_set_aside_pauses_the_run_until_somebody_lets_it_go_on(scene) -> None:
    settings = odd(scene, rewards=[-1.0, 1.0], odd=["train-0", "train-2"])
    running = scene.start(**{**settings, "advantage": "maxrl", "max_set_aside": 0.05, "max_steps": 1000})
    async with scene.client() as client:
        run = await scene.until_run(client, lambda run: run.state == orchestrator_pb2.RUN_STATE_PAUSED)
        assert [each.reason for each in run.set_aside] == ["REWARDS_UNFIT"]
        wanted = run.step + 8  # more than the groups under way give
        async with asyncio.timeout(DEADLINE_S):
            while (run := await client.run("test")).step < wanted:
                if run.state == orchestrator_pb2.RUN_STATE_PAUSED:
                    await client.resume("test")
                await asyncio.sleep(0.02)
        await client.stop("test", "enough")
    await running
    assert scene.report()["steps"] >= wanted
    assert any(fact.HasField("run_resumed") for _, fact in read_facts(scene.run_dir))


async def test_a_pause_that_nobody_ends_ends_the_run_with_a_checkpoint(scene) -> None:
    clock = SimulatedClock()
    settings = odd(scene, rewards=[-1.0, 1.0], odd=["train-0", "train-2"])
    running = scene.start(
        **{**settings, "advantage": "maxrl", "max_set_aside": 0.05, "max_steps": 30},
        deadlines={"watchers_s": LIMIT_S, "set_aside_s": LIMIT_S},
        clock=clock,
    )
    async with asyncio.timeout(DEADLINE_S):
        async with scene.client() as client:
            paused = asyncio.create_task(
                scene.until_run(client, lambda run: run.state == orchestrator_pb2.RUN_STATE_PAUSED)
            )
            await clock.until(paused.done, step_s=TICK_S)
            assert paused.result().set_aside[0].trajectories > 0
        await clock.until(running.done, step_s=0.5)
    with pytest.raises(TooMuchSetAsideError, match=r"set aside .*orchestrator.max_set_aside.*REWARDS_UNFIT"):
        await running
    assert scene.trainer.checkpoints
    assert scene.report()["state"] == "stopped"
    assert "nobody let the paused run go on" in scene.report()["stop_reason"]


async def test_what_all_trajectories_lack_by_the_settings_ends_the_run_at_once(scene) -> None:
    scene.trainer.admission = TrainerConfig.model_validate(
        {"objective": {"kl_coef": 0.1}, "reference": {"model": "batch"}}
    )
    with pytest.raises(FailedForGoodError, match=r"no batch of this run would fit: .*ref_logprobs are absent.*kl_coef"):
        await scene.run(**odd(scene, odd=[]))
