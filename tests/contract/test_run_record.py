"""What a run between doubles writes of its trajectories, of those that it dropped, and of its events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from orchestrator_doubles import RolloutDouble
from test_orchestrator_run import DEADLINE_S, Scene, make_scene, restarted

from orchestrator_svc.commands import rescore as rescore_command
from orchestrator_svc.run.metrics import read_metrics
from orchestrator_svc.run.recorder import event_row
from sluice.v1 import orchestrator_pb2

pytestmark = pytest.mark.slow

DIALOGUE = f"{Path(__file__).parent / 'dialogue_environment.py'}:Dialogue"

MEASURED = '''
from sluice.environments.base import Score, Task

class Measured:
    """A reward of two parts."""
    name = "measured"
    def tasks(self, split, seed):
        return [Task(f"t{index}", {}) for index in range(40)]
    def messages(self, task):
        return [{"role": "user", "content": "Say."}]
    def score(self, task, completion):
        parts = {"letters": float(completion.count("a")), "shape": 0.5}
        return Score(sum(parts.values()), parts)
'''


@pytest.fixture
async def scene(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        yield await make_scene(tmp_path, stack, [RolloutDouble("the replica")])


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps_of(scene: Scene) -> list[dict]:
    return [row for path in sorted((scene.run_dir / "trajectories").glob("step_*")) for row in lines_of(path)]


def dropped(scene: Scene) -> list[dict]:
    return lines_of(scene.run_dir / "trajectories/dropped.jsonl")


async def test_a_row_says_who_sampled_it_when_and_what_its_reward_is_made_of(scene) -> None:
    path = scene.directory / "measured.py"
    path.write_text(MEASURED)
    await scene.run(environment=f"{path}:Measured")
    rows = steps_of(scene)
    assert len(rows) == 16
    assert {row["environment"] for row in rows} == {scene.report()["environments"][0]["name"]}
    assert {row["replica"] for row in rows} == {"the replica"}
    for row in rows:
        assert row["metrics"] == {"letters": row["completion"].count("a"), "shape": 0.5}
        assert row["reward"] == sum(row["metrics"].values())
        assert 1e9 < row["drawn"] <= row["sampled"] <= row["scored"]
        assert "turn_rewards" not in row
        assert "token_ids" not in row
    (scene.run_dir / "config.toml").write_text("seed = 0\n")
    # A reward of the run is found again by what reads the rows.
    words = ["test", "--output-dir", str(scene.directory), "--environment", f"{path}:Measured"]
    assert await asyncio.to_thread(rescore_command.run, words) == 0


async def test_a_row_of_several_turns_has_their_rewards(scene) -> None:
    await scene.run(environment=DIALOGUE, max_steps=1)
    for row in steps_of(scene):
        assert row["turn_rewards"] == [[0, 1.0], [1, 2.0], [2, 3.0]]
        assert row["replica"] == "the replica"
        assert row["drawn"] <= row["sampled"] <= row["scored"]


async def test_the_tokens_of_some_trajectories_of_each_step_are_written_if_that_is_wanted(scene) -> None:
    await scene.run(write_tokens=3)
    for step, batch in scene.trainer.history.items():
        rows = {row["trajectory_id"]: row for row in steps_of(scene) if row["step"] == step}
        chosen = [row for row in rows.values() if "token_ids" in row]
        assert len(chosen) == 3
        assert len({row["group_id"] for row in chosen}) == 2
        for each in batch:
            row = rows[each.trajectory_id]
            if "token_ids" in row:
                assert row["token_ids"] == list(each.token_ids)
                assert row["mask_runs"] == list(each.mask_runs)
                assert row["logprobs"] == list(each.logprobs)


async def test_what_brings_no_signal_or_no_reward_is_kept_as_text(scene) -> None:
    answers = iter(["same", "same"] + ["ab", "xab", "aab"] * 100)
    scene.replicas[0].text = lambda request, index: next(answers)
    report = await scene.run(
        filter={"drop_degenerate": True}, max_running=1, environment_args={"fail": "x"}, max_steps=2
    )
    rows = dropped(scene)
    found = {(row["completion"], row["reason"]) for row in rows}
    assert found >= {("same", "NO_SIGNAL"), ("xab", "MISSING_REWARD")}
    assert {text for text, reason in found if reason == "MISSING_REWARD"} == {"xab"}
    counts = report["trajectories_dropped"]
    assert {reason: sum(row["reason"] == reason for row in rows) for reason in counts} == counts
    for row in rows:
        assert (row["step"], row["outcome"], row["staleness"]) == (None, "dropped", None)
        assert row["environment"] == report["environments"][0]["name"]
        assert row["prompt"] == [{"role": "user", "content": "abc"}]
    assert not {row["trajectory_id"] for row in rows} & {row["trajectory_id"] for row in steps_of(scene)}


async def test_what_is_too_old_for_a_batch_is_kept_and_the_change_of_the_bound_is_an_event(scene) -> None:
    scene.trainer.automatic = False
    task = scene.start(common={"max_staleness": 3}, max_steps=6)
    async with scene.client() as client:
        await scene.until(lambda: len(scene.replicas[0].calls) == 8 and len(scene.trainer.waiting) == 2)
        await scene.until_run(client, lambda run: run.running_episodes == 0)
        await client.set("test", {"max_staleness": "0"})
        watched = scene.watch("setting_changed")
        scene.trainer.run_freely()
        await task
    stale = [row for row in dropped(scene) if row["reason"] == "STALE"]
    assert len(stale) == scene.report()["trajectories_dropped"]["STALE"] == 8
    assert all(row["completion"] in {"ab", "aab"} and row["sampled"] for row in stale)
    changed = [each for each in lines_of(scene.run_dir / "events.jsonl") if each["kind"] == "setting_changed"]
    assert [(each["key"], each["old_value"], each["new_value"]) for each in changed] == [("max_staleness", "3", "0")]
    assert [event_row(each) for each in await watched] == changed


async def test_what_was_sampled_of_a_lost_episode_is_kept(scene) -> None:
    await scene.run(
        environment=DIALOGUE, environment_args={"odd_seeds_die": True}, advantage="none", group_size=2, max_steps=1
    )
    lost = [row for row in dropped(scene) if row["reason"] == "ENVIRONMENT_DIED"]
    assert lost
    for row in lost:
        assert (row["completion"], len(row["prompt"]), row["replica"]) == ("ab", 1, "the replica")
        assert row["trajectory_id"] not in {each["trajectory_id"] for each in steps_of(scene)}


async def test_what_the_end_of_a_run_leaves_is_written_once_although_the_run_is_started_again(scene) -> None:
    report = await scene.run(max_steps=2, common={"max_staleness": 3})
    left = report["trajectories_dropped"].get("RUN_ENDED", 0)
    assert [row["reason"] for row in dropped(scene)] == ["RUN_ENDED"] * left
    first = dropped(scene)
    events = lines_of(scene.run_dir / "events.jsonl")
    async with asyncio.timeout(DEADLINE_S):
        await scene.start(max_steps=2, common={"max_staleness": 3})
    assert dropped(scene)[: len(first)] == first
    names = [row["trajectory_id"] for row in dropped(scene)]
    assert len(names) == len(set(names))
    later = lines_of(scene.run_dir / "events.jsonl")
    assert later[: len(events)] == events
    numbers = [each["sequence_no"] for each in later]
    assert numbers == sorted(set(numbers))


async def test_the_events_of_a_run_are_those_that_a_watcher_gets(scene) -> None:
    events = scene.watch()
    await scene.run()
    expected = [event_row(each) for each in await events if each.WhichOneof("kind") not in {"group_scored", "load"}]
    found = lines_of(scene.run_dir / "events.jsonl")
    assert [each for each in found if each["kind"] != "load"] == expected
    assert sum(each["kind"] == "load" for each in found) <= 1 + (found[-1]["time"] - found[0]["time"]) / 10
    assert found[-1]["state"] == "succeeded"
    assert {each["kind"] for each in expected} >= {"state_changed", "step_finished", "checkpoint_written"}


async def test_nothing_of_trajectories_is_written_if_that_is_not_wanted(scene) -> None:
    await scene.run(max_steps=1, write_trajectories=False, filter={"drop_degenerate": True})
    assert not (scene.run_dir / "trajectories").exists()
    assert (scene.run_dir / "events.jsonl").exists()


async def test_a_step_tells_how_rewards_spread_and_how_much_is_said_again(scene) -> None:
    scene.replicas[0].text = lambda request, index: "aaa" if request.request_id.endswith("g1/0") else "a" * index + "b"
    await scene.run(max_steps=1, common={"max_staleness": 2}, environment_args={"fail": ""})
    (step,) = read_metrics(scene.run_dir / "metrics.jsonl").values()
    assert [step[f"reward/p{each}"] for each in (10, 50, 90)] == pytest.approx([0.15, 0.75, 1.0])
    assert (step["groups/all_solved"], step["groups/all_zero"], step["groups/degenerate"]) == (1.0, 0.0, 1.0)
    assert (step["completion/mean_tokens_rewarded"], step["completion/mean_tokens_unrewarded"]) == (2.0, 1.0)
    assert (step["completion/duplicate_share"], step["completion/repetition"]) == (0.5, 0.0)
    assert [step[f"staleness/tokens_at_{age}"] for age in range(3)] == [9.0, 0.0, 0.0]
    assert step["environment/failed_calls"] == 0.0
    assert step["environment/score_seconds_p95"] > 0.0


async def test_calls_of_an_environment_that_failed_count_in_the_step_after_them(scene) -> None:
    scene.replicas[0].text = lambda request, index: "abx" if request.request_id.endswith("g1/0") else "ab"
    await scene.run(environment_args={"fail": "x"}, max_running=1)
    failed = [
        step["environment/failed_calls"] for _, step in sorted(read_metrics(scene.run_dir / "metrics.jsonl").items())
    ]
    assert failed[0] > 0
    assert sum(failed) == sum(
        count for reason, count in scene.report()["environments"][0]["failed_calls"].items() if reason != "missing"
    )


async def test_a_run_of_an_earlier_release_goes_on(scene) -> None:
    """Its records have no environment, replica or times: fields of the contract that were not set."""
    scene.trainer.busy = True
    task = scene.start(common={"max_staleness": 1})
    await scene.until(lambda: len(scene.replicas[0].calls) == 4 and scene.trainer.headers)
    task.cancel()
    await asyncio.wait({task})
    scene.trainer.busy = False
    report = await restarted(scene, common={"max_staleness": 1})
    assert report["state"] == "succeeded"
    assert all(row["drawn"] <= row["sampled"] <= row["scored"] for row in steps_of(scene))
    assert orchestrator_pb2.TrajectoryRecord().environment == ""
