"""Runs with several environments: their mix, their own settings, quarantine, refills, and rules for long episodes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path

import pytest
from orchestrator_doubles import RolloutDouble
from test_orchestrator_run import Scene, make_scene, restarted

from orchestrator_svc.config import EnvironmentConfig
from orchestrator_svc.journal.ledger import folded
from orchestrator_svc.journal.store import Journal, JournalLimits, read_facts
from orchestrator_svc.run.curriculum import Curriculum
from sluice.config import FailedForGoodError
from sluice.environments.base import Task
from sluice.rpc import SluiceError
from sluice.v1 import journal_pb2 as pb
from sluice.v1 import tokens_pb2

pytestmark = pytest.mark.slow

CUT, STOPPED = tokens_pb2.FINISH_REASON_LENGTH, tokens_pb2.FINISH_REASON_STOP


@pytest.fixture
async def scene(tmp_path: Path):
    async with contextlib.AsyncExitStack() as stack:
        yield await make_scene(tmp_path, stack, [RolloutDouble()])


def mixed(scene: Scene, *environments: dict) -> dict:
    """Settings of a run with these environments, all of them the letters."""
    reference = f"{scene.directory / 'letters_env.py'}:Letters"
    return {"environment": "", "environments": [{"environment": reference, **each} for each in environments]}


def named(report: dict, name: str) -> dict:
    return next(each for each in report["environments"] if each["name"] == name)


def rows_of(scene: Scene) -> list[dict]:
    """The trajectories as the run's files have them."""
    files = sorted((scene.run_dir / "trajectories").iterdir())
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def trained(scene: Scene) -> list[tokens_pb2.Trajectory]:
    return [each for batch in scene.trainer.history.values() for each in batch]


async def test_each_environment_has_its_share_and_its_own_settings(scene) -> None:
    scene.trainer.objectives = ["soft"]
    many = {"name": "many", "ratio": 3, "group_size": 3, "sampling": {"temperature": 0.5}}
    few = {"name": "few", "objective": "soft", "advantage": "rloo", "sampling": {"max_tokens": 7}}
    few["sampling"]["chat_template_kwargs"] = {"effort": "low"}
    loads = scene.watch("load")
    report = await scene.run(**mixed(scene, many, few), batch_size=4, load_report_s=0.005)
    assert {each.name for each in (await loads)[-1].load.environments} == {"many", "few"}
    assert [named(report, name)["groups"] for name in ("many", "few")] == [12, 4]
    assert [named(report, name)["wanted_share"] for name in ("many", "few")] == [0.75, 0.25]
    requests = [call.request for call in scene.replicas[0].calls]
    assert sorted((each.n, each.sampling.temperature, each.sampling.max_tokens) for each in requests) == [
        *[(2, 1.0, 7)] * 4,
        *[(3, 0.5, 256)] * 12,
    ]
    assert {(each.n, each.conversation.template_arguments_json) for each in requests} == {
        (2, '{"effort": "low"}'),
        (3, ""),
    }
    soft = [each for each in trained(scene) if each.objective == "soft"]
    assert len(soft) == 4 * 2
    assert sorted({round(each.advantages[0], 4) for each in soft}) == [-0.1667, 0.1667], "rloo of 1/2 and 2/3"
    header = scene.trainer.headers[0]
    assert header.advantage_estimator == "", "no estimator is that of all groups"
    environments = {each.advantage_estimator: set(each.group_ids) for each in header.estimated_groups}
    sent = {each.group_id: each.objective for each in scene.trainer.history[1]}
    assert environments["rloo"] == {group for group, objective in sent.items() if objective == "soft"}
    assert environments["centered"] | environments["rloo"] == sent.keys()
    shown = [row for row in rows_of(scene) if row["advantage"] == pytest.approx(1 / 6) or row["reward"] is None]
    assert len(shown) == 4, "the files have the advantages that were trained"
    metrics = [json.loads(line) for line in (scene.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["environments/few/reward_mean"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert metrics[0]["environments/many/reward_mean"] == pytest.approx((1 / 2 + 2 / 3 + 3 / 4) / 3)


async def test_an_objective_that_the_trainer_does_not_have_ends_the_run_before_anything_is_drawn(scene) -> None:
    with pytest.raises(FailedForGoodError, match=r"names the objective 'soft', but trainer\.objectives has none"):
        await scene.run(**mixed(scene, {"name": "a", "objective": "soft"}, {"name": "b"}))
    assert scene.replicas[0].calls == []


async def test_a_task_that_kills_its_process_is_put_in_quarantine_and_named(scene) -> None:
    deadly = {"name": "deadly", "args": {"deadly": ["train-1"], "count": 3}, "quarantine_after": 2}
    report = await scene.run(**mixed(scene, deadly, {"name": "sound"}), max_steps=6)
    found = named(report, "deadly")
    assert (report["state"], found["quarantined_count"], found["groups_failed"]) == ("succeeded", 1, 2)
    (task,) = found["quarantined"]
    assert (task["task_id"], task["failures"]) == ("train-1", 2)
    assert task["problem"].startswith("ENVIRONMENT_DIED: ")
    assert report["groups_failed"] == {"ENVIRONMENT_DIED": 2}
    assert sum(found["pools"].values()) == 2
    assert named(report, "sound")["quarantined"] == []


async def test_a_task_whose_request_is_refused_is_put_in_quarantine_and_named(scene) -> None:
    path = scene.directory / "named_env.py"
    path.write_text(
        "from letters_env import Letters\nclass Named(Letters):\n"
        "    def messages(self, task): return [{'role': 'user', 'content': task.task_id}]\n"
    )

    def answered(request, index) -> str:
        if request.conversation.messages[0].content == "train-1":
            raise SluiceError.invalid_argument("conversation", "has 900 tokens; at most 64 fit this model")
        return "a"

    scene.replicas[0].text = answered
    settings = {"environment": f"{path}:Named", "environment_args": {"count": 3}, "quarantine_after": 2}
    report = await scene.run(**settings, max_steps=6)
    (found,) = report["environments"]
    (task,) = found["quarantined"]
    assert (report["state"], task["failures"]) == ("succeeded", 2)
    assert task["problem"].startswith("REQUEST_REFUSED: ")
    assert "at most 64 fit this model" in task["problem"]
    assert report["groups_failed"] == {"REQUEST_REFUSED": 2}


async def test_tasks_whose_messages_are_none_are_put_in_quarantine_and_pause_nothing(scene) -> None:
    path = scene.directory / "unfit_env.py"
    path.write_text(
        "from letters_env import Letters\nclass Unfit(Letters):\n"
        "    def messages(self, task):\n"
        "        fields = {} if task.task_id in ('train-0', 'train-1') else {'thinking': 'much'}\n"
        "        return [{'role': 'user', 'content': 'a letter', **fields}]\n"
    )
    settings = {"environment": f"{path}:Unfit", "environment_args": {"count": 14}, "quarantine_after": 1}
    report = await scene.run(**settings, max_failed_tasks=3, max_steps=8)
    (found,) = report["environments"]
    assert (report["state"], found["quarantined_count"]) == ("succeeded", 12)
    assert all("the unknown fields thinking" in each["problem"] for each in found["quarantined"])
    assert report["groups_failed"].keys() == {"ENVIRONMENT_MESSAGES"}


async def test_a_run_all_of_whose_tasks_are_in_quarantine_fails_and_says_why(scene) -> None:
    every = {"deadly": ["train-0", "train-1"], "count": 2}
    with pytest.raises(
        FailedForGoodError, match=r"every task of the run is in quarantine.* because of ENVIRONMENT_DIED: "
    ):
        await scene.run(environment_args=every, quarantine_after=1, max_running=1)
    report = scene.report()
    assert {each["task_id"] for each in report["environments"][0]["quarantined"]} == {"train-0", "train-1"}


async def test_groups_without_signal_are_replaced_from_their_own_environment(scene) -> None:
    answers = itertools.cycle(["same", "same", "ab", "aab"])
    scene.replicas[0].text = lambda request, index: next(answers) if request.n == 2 else "ab"[: index + 1]
    picky = {"name": "picky", "filter": {"drop_degenerate": True}}
    plain = {"name": "plain", "group_size": 4}
    report = await scene.run(**mixed(scene, picky, plain), max_running=1)
    found = named(report, "picky")
    assert found["groups_refilled"] == found["groups"] - found["groups_accepted"] >= 3
    assert abs(named(report, "plain")["groups"] - found["groups_accepted"]) <= 1, "replaced groups cost no share"
    assert report["trajectories_dropped"]["NO_SIGNAL"] == 2 * found["groups_refilled"]


async def test_groups_that_a_function_of_the_user_does_not_accept_are_replaced(scene) -> None:
    (scene.directory / "picky.py").write_text(
        "def long_enough(records):\n    return all(len(each.conversation.messages[-1].content) > 1 for each in records)\n"
    )
    lengths = itertools.cycle([1, 1, 2, 3])
    scene.replicas[0].text = lambda request, index: "a" * next(lengths)
    location = f"{scene.directory / 'picky.py'}:long_enough"
    report = await scene.run(filter={"should_accept": location}, max_running=1, max_steps=2)
    (found,) = report["environments"]
    assert found["groups_refilled"] == found["groups"] - found["groups_accepted"] >= 2
    assert {sum(each.mask_runs[1::2]) for each in trained(scene)} == {2, 3}


async def test_after_the_bound_on_refills_groups_without_signal_are_trained(scene) -> None:
    scene.replicas[0].text = lambda request, index: "same"
    report = await scene.run(
        filter={"drop_degenerate": True}, max_refills=3, on_max_refills="train", max_running=1, max_steps=2
    )
    assert report["state"] == "succeeded"
    assert report["environments"][0]["groups_refilled"] == 3 * 2, "three for each batch"
    assert report["trajectories_trained"] == 8


async def test_masked_episodes_count_in_their_group_and_their_tokens_are_not_trained(scene) -> None:
    ends = itertools.cycle([STOPPED, CUT])
    scene.replicas[0].finish = lambda request: next(ends)
    scene.trainer.verdict = lambda trajectory: "MASKED" if len(trajectory.mask_runs) == 1 else ""
    report = await scene.run(overlong={"policy": "mask"}, max_steps=2)
    assert report["trajectories_dropped"] == {"MASKED": 4}
    assert report["trajectories_trained"] == 4
    assert report["environments"][0]["overlong"] == {"mask": 4}
    for trajectory in trained(scene):
        assert abs(trajectory.advantages[0]) == pytest.approx(1 / 12), "of the two rewards 1/2 and 2/3"
        if trajectory.finish_reason == CUT:
            assert list(trajectory.mask_runs) == [len(trajectory.token_ids)]
            assert not trajectory.logprobs
            assert not trajectory.version_spans


async def test_penalised_and_filtered_episodes_are_counted(scene) -> None:
    ends = itertools.cycle([STOPPED, CUT, STOPPED])
    scene.replicas[0].finish = lambda request: next(ends)
    soft = {"name": "soft", "overlong": {"policy": "penalise", "penalty": 0.25}}
    strict = {"name": "strict", "overlong": {"policy": "filter"}}
    report = await scene.run(**mixed(scene, soft, strict), group_size=3, max_running=1)
    assert named(report, "soft")["overlong"] == {"penalise": 4}
    assert named(report, "strict")["overlong"] == {"filter": 4}
    assert report["trajectories_dropped"] == {"OVERLONG": 4}
    assert {round(each.reward, 4) for each in trained(scene) if each.finish_reason == CUT} == {round(2 / 3 - 0.25, 4)}


async def test_a_run_whose_episodes_are_all_cut_off_names_the_setting_that_drops_them(scene) -> None:
    scene.replicas[0].finish = lambda request: CUT
    with pytest.raises(
        FailedForGoodError,
        match=r"episodes of task \S+: they were cut off, and orchestrator\.overlong\.policy = filter trains none that was: raise"
        r" sampling\.max_tokens \(256\) or max_turns, or set the policy to none or penalise\. Correct that, then",
    ):
        await scene.run(overlong={"policy": "filter"}, max_failed_groups=3)


async def test_a_run_that_goes_on_draws_on_where_it_stopped(scene) -> None:
    settings = mixed(scene, {"name": "many", "ratio": 3}, {"name": "few"})
    before = await scene.run(**settings, max_steps=3)
    after = await restarted(scene, **settings, max_steps=8)
    assert (before["steps"], after["steps"]) == (3, 8)
    assert [named(after, name)["groups"] for name in ("many", "few")] == [12, 4]
    tasks = [(each.group_id, each.task_id) for each in trained(scene)]
    groups = dict(tasks)
    assert len(groups) == 16
    assert len(set(groups.values())) >= 12, "no task of an environment comes twice in a pass"


async def test_each_environment_is_evaluated_under_its_name(scene) -> None:
    report = await scene.run(
        **mixed(scene, {"name": "many"}, {"name": "few"}), evaluation={"every_steps": 4, "prompts": 3}, max_steps=4
    )
    (evaluation,) = report["evaluations"]
    assert evaluation["eval/many/reward_mean"] == evaluation["eval/few/reward_mean"] == pytest.approx(1 / 2)


async def test_a_ratio_that_is_changed_while_the_run_lives_holds_for_the_draws_that_follow(scene) -> None:
    scene.trainer.automatic = False
    settings = mixed(scene, {"name": "a"}, {"name": "b"})
    run = scene.start(**settings, max_steps=10, common={"max_staleness": 0})
    async with scene.client() as client:
        before = await scene.until_run(client, lambda run: sum(each.groups for each in run.environments) == 2)
        assert [each.groups for each in before.environments] == [1, 1]
        changed = await client.set("test", {"orchestrator.environments.a.ratio": "9.0"})
        assert [each.key for each in changed] == ["orchestrator.environments.a.ratio"]
        scene.trainer.run_freely()
        await run
    groups = [each["groups"] for each in scene.report()["environments"]]
    assert sum(groups) == 20
    assert groups[1] in {2, 3, 4}


async def test_a_task_to_draw_again_survives_a_kill(tmp_path) -> None:
    """The journal alone knows that a stale group's task has to be drawn again."""

    def opened() -> tuple[Curriculum, Journal]:
        settings = EnvironmentConfig(name="letters", environment="m:Letters")
        curriculum = Curriculum([(settings, [Task(f"t{number}") for number in range(5)])], 0)
        return curriculum, Journal(
            tmp_path, {"run": "r"}, limits=JournalLimits(fsync_interval_s=0.0), follow=curriculum.apply_fact
        )

    def record(journal: Journal, **kind) -> None:
        journal.record_fact(pb.Fact(**kind))

    curriculum, journal = opened()
    drawn = curriculum.choose_task(0.0, journal.ledger.redraws)
    task = pb.TaskDrawn(environment="letters", task_id=drawn.task_id, group=1, position=drawn.position, episodes=1)
    record(journal, task_drawn=task)
    ended = pb.EndedEpisode(episode=0, reward=1.0)
    ended.trajectories.add(trajectory_id="g1-0")
    record(journal, episodes_ended=pb.EpisodesEnded(group=1, episodes=[ended]))
    record(journal, group_accepted=pb.GroupAccepted(group=1))
    record(journal, group_dropped=pb.GroupDropped(group=1, reason="STALE", trajectories=1, redraw=True))
    await journal.durable()  # what follows is lost: the process is killed here
    curriculum, again = opened()
    chosen = curriculum.choose_task(0.0, again.ledger.redraws)
    assert (chosen.task_id, chosen.reason, chosen.draw) == (drawn.task_id, "STALE", 1)
    position = chosen.position
    task = pb.TaskDrawn(
        environment="letters", task_id=chosen.task_id, group=2, position=position, redraw_reason="STALE"
    )
    record(again, task_drawn=task)
    assert curriculum.choose_task(0.0, again.ledger.redraws).reason == ""
    await again.close()
    await journal.close()


async def test_a_task_in_quarantine_that_had_to_be_drawn_again_is_counted_and_the_run_goes_on(scene) -> None:
    """A process died after it had noted a stale group; meanwhile its task is in quarantine, and another one is gone."""
    identity = {"run": "test"}
    journal = Journal(scene.run_dir, identity, limits=JournalLimits(fsync_interval_s=0.0))
    for number, task in ((1, "train-0"), (2, "gone"), (3, "train-1")):
        drawn = pb.TaskDrawn(environment="Letters", task_id=task, group=number, position=number - 1, episodes=2)
        journal.record_fact(pb.Fact(task_drawn=drawn))
        journal.record_fact(pb.Fact(group_dropped=pb.GroupDropped(group=number, reason="STALE", redraw=True)))
    poisonous = pb.TaskQuarantined(environment="Letters", task_id="train-0", failures=3, problem="it died")
    journal.record_fact(pb.Fact(task_quarantined=poisonous))
    await journal.close()
    report = await scene.run()
    assert (report["state"], report["steps"]) == ("succeeded", 4)
    assert report["redraws_dropped"] == {"QUARANTINED": 1, "TASK_CHANGED": 1}
    tasks = {each.task_id for each in trained(scene)}
    assert "train-1" in tasks
    assert "train-0" not in tasks
    assert folded(read_facts(scene.run_dir)).redraws == []


async def with_quarantine(scene, *tasks: str) -> None:
    """Let an earlier process of the run have put tasks into quarantine."""
    journal = Journal(scene.run_dir, {"run": "test"}, limits=JournalLimits(fsync_interval_s=0.0))
    for task in tasks:
        noted = pb.TaskQuarantined(environment="Letters", task_id=task, failures=3, problem="the judge was down")
        journal.record_fact(pb.Fact(task_quarantined=noted))
    await journal.close()


def releases(scene) -> list[tuple[str, str]]:
    facts = (fact.task_released for _, fact in read_facts(scene.run_dir) if fact.HasField("task_released"))
    return [(each.task_id, each.principal) for each in facts]


async def test_a_start_releases_what_is_in_quarantine_if_the_settings_say_so(scene) -> None:
    await with_quarantine(scene, "train-0", "train-1")
    only = {"environment_args": {"count": 2}}
    with pytest.raises(FailedForGoodError, match=r"release_quarantine = true"):
        await scene.run(**only)
    report = await scene.run(**only, release_quarantine=True)
    assert (report["state"], report["environments"][0]["quarantined_count"]) == ("succeeded", 0)
    assert releases(scene) == [("train-0", ""), ("train-1", "")]


async def test_an_operator_releases_tasks_while_the_run_lives(scene) -> None:
    await with_quarantine(scene, "train-0", "train-1", "train-2")
    scene.trainer.automatic = False
    running = scene.start(environment_args={"count": 4})
    async with scene.client() as client:
        await scene.until(lambda: scene.trainer.waiting)
        with pytest.raises(SluiceError, match="no task 'train-3' is in quarantine; 3 are: Letters/train-0"):
            await client.set("test", {"quarantine.release": "train-3", "max_staleness": "1"})
        (changed,) = await client.set("test", {"quarantine.release": "train-1"})
        assert (changed.key, changed.new_value) == ("quarantine.release", "Letters/train-1")
        assert len(await client.set("test", {"quarantine.release": "all", "max_staleness": "1"})) == 3
        assert (await client.run("test")).environments[0].quarantined_count == 0
        scene.trainer.run_freely()
        await asyncio.wait_for(running, 60.0)
    assert releases(scene) == [("train-1", "anyone"), ("train-0", "anyone"), ("train-2", "anyone")]


async def test_unfinished_groups_of_tasks_that_are_gone_do_not_end_the_run(scene) -> None:
    journal = Journal(scene.run_dir, {"run": "test"}, limits=JournalLimits(fsync_interval_s=0.0))
    for number in range(1, 6):
        drawn = pb.TaskDrawn(environment="Letters", task_id=f"gone-{number}", group=number, position=number, episodes=2)
        journal.record_fact(pb.Fact(task_drawn=drawn))
    await journal.close()
    report = await scene.run(max_failed_groups=2)
    assert (report["state"], report["groups_failed"]) == ("succeeded", {"TASK_CHANGED": 5})
