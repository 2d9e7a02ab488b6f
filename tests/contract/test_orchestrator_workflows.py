"""Episodes against a replica over gRPC: several turns, seeds, the choice of replicas, and `sluice eval`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog
from orchestrator_doubles import ENVIRONMENT, RolloutDouble, serve_rollout
from simulated_clock import SimulatedClock

from orchestrator_svc.commands.eval.command import COMMAND
from orchestrator_svc.commands.eval.config import EvalConfig
from orchestrator_svc.commands.eval.play import run_evaluation
from orchestrator_svc.config import EpisodeConfig
from orchestrator_svc.journal.episodes import JournaledEpisodes
from orchestrator_svc.journal.store import Journal, JournalLimits
from orchestrator_svc.run.workflows import EpisodeData, MultiTurn, Sampling, SingleTurn, choose_workflow
from sluice.clock import CLOCK, Clock
from sluice.config import ConfigError, SecurityConfig
from sluice.environments.base import Task
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.worker import EnvironmentFailedError
from sluice.rpc import SluiceError
from sluice.sampling import pool as pool_module
from sluice.sampling.config import ReplicasConfig
from sluice.sampling.policy import PolicyEngine
from sluice.sampling.pool import ReplicaPool
from sluice.sampling.served import ServedDeadline
from sluice.v1 import journal_pb2, orchestrator_pb2, rollout_pb2, tokens_pb2
from sluice.versions import BASE, Version

DIALOGUE = f"{Path(__file__).parent / 'dialogue_environment.py'}:Dialogue"
CALL_S = 60.0


@contextlib.asynccontextmanager
async def engine_over(*replicas: RolloutDouble, clock: Clock = CLOCK, **settings):
    """An engine on a pool of served doubles."""
    async with contextlib.AsyncExitStack() as stack:
        targets = [await stack.enter_async_context(serve_rollout(each)) for each in replicas]
        config = ReplicasConfig(**{"poll_s": 0.05, "progress_s": 60.0, **settings})
        pool = ReplicaPool(targets, SecurityConfig(), config, lambda _: None, clock=clock)
        polling = asyncio.create_task(pool.run())
        try:
            async with asyncio.timeout(120):
                while len([each for each in pool.replicas if each.seen]) < len(replicas):  # noqa: ASYNC110 - first polls
                    await asyncio.sleep(0.01)
                yield PolicyEngine(pool, "test", 600.0), pool
        finally:
            polling.cancel()
            await asyncio.wait({polling})


async def run_episodes(
    engine: PolicyEngine,
    data: EpisodeData,
    *,
    max_turns: int = 8,
    environment: str = DIALOGUE,
    clock: Clock = CLOCK,
    **arguments,
) -> list[orchestrator_pb2.TrajectoryRecord]:
    """Run dialogues in processes of their own."""
    settings = EnvironmentProcessesConfig(call_s=CALL_S, count=1)
    async with EnvironmentProcesses(environment, arguments, settings, (60.0, "start_s"), clock=clock) as opened:
        return await MultiTurn(opened, max_turns).arun_episode(engine, data)


def episode(episodes: int = 2, **settings) -> EpisodeData:
    sampling = Sampling(temperature=1.0, max_tokens=8, **settings)
    return EpisodeData(Task("t", {}), "g1", episodes, sampling, BASE, "test/g1", seed=5)


async def test_turns_are_appended_to_the_ids_that_were_sampled() -> None:
    replica = RolloutDouble(version=Version(1, 3))
    async with engine_over(replica) as (engine, _):
        records = await run_episodes(engine, episode())
    assert len(records) == 2
    for record in records:
        trajectory = record.trajectory
        assert sum(trajectory.mask_runs) == len(trajectory.token_ids)
        assert trajectory.mask_runs[1::2] == [2, 2, 2], "three turns of two tokens"
        assert trajectory.turn_runs == [2, 2, 2]
        assert len(trajectory.logprobs) == 6
        assert [(span.start, span.policy_version.number) for span in trajectory.version_spans] == [(0, 3)]
        assert trajectory.reward == 1 + 2 + 3
        assert [each.reward for each in trajectory.turn_rewards] == [1, 2, 3]
        assert [each.role for each in record.conversation.messages] == ["user", "assistant"] * 3
        assert trajectory.finish_reason == tokens_pb2.FINISH_REASON_STOP
    prompts = [list(call.request.token_ids.ids) for call in replica.calls]
    longest = max(prompts, key=len)
    assert all(longest[: len(prompt)] == prompt for prompt in prompts), "every prompt begins the next one"


async def test_the_environment_s_template_arguments_come_with_every_prompt(tmp_path: Path) -> None:
    arguments = {"enable_thinking": False, "effort": 1}
    letters = tmp_path / "letters.py"
    letters.write_text(ENVIRONMENT)
    replica = RolloutDouble()
    tokenized: list[tokens_pb2.Conversation] = []
    whole = replica.Tokenize

    async def tokenize(request, context):
        tokenized.append(request.conversation)
        return await whole(request, context)

    replica.Tokenize = tokenize
    data = episode(1, chat_template_kwargs=arguments)
    settings = EnvironmentProcessesConfig(call_s=CALL_S, count=1)
    async with engine_over(replica) as (engine, _):
        await run_episodes(engine, data)
        async with EnvironmentProcesses(f"{letters}:Letters", {}, settings, (60.0, "start_s")) as opened:
            (task, *_) = await opened.tasks("train", 0)
            await SingleTurn(opened).arun_episode(engine, replace(data, task=task))
    assert len(tokenized) == 3
    sampled = replica.calls[-1].request.conversation
    for conversation in (*tokenized, sampled):
        assert conversation.template_arguments_json == '{"enable_thinking": false, "effort": 1}'


@pytest.mark.parametrize(("most", "cut_off", "worth"), [(8, False, 3.0), (2, False, 1.5), (8, True, 0.5)])
async def test_an_environment_is_told_that_a_turn_is_the_last_and_scores_what_there_is(most, cut_off, worth) -> None:
    replica = RolloutDouble()
    if cut_off:
        replica.finish = lambda request: tokens_pb2.FINISH_REASON_LENGTH
    patient = DIALOGUE.replace(":Dialogue", ":Patient")
    async with engine_over(replica) as (engine, _):
        (record,) = await run_episodes(engine, episode(1), max_turns=most, environment=patient)
    assert record.trajectory.reward == worth
    ended_by_run = worth % 1 > 0
    assert record.metrics["last"] == ended_by_run
    assert (record.trajectory.finish_reason == tokens_pb2.FINISH_REASON_LENGTH) == ended_by_run


async def retried(
    answers: list[str], directory: Path, *, max_turns: int = 8, finish=None
) -> tuple[RolloutDouble, list]:
    """Ask for the opposite of hot, again and again; the model gives these answers."""
    (directory / "opposites.py").write_text(OPPOSITES)
    replica, given = RolloutDouble(), iter(answers)
    replica.text = lambda request, index: next(given)
    if finish is not None:
        replica.finish = lambda request: finish
    config = EpisodeConfig(workflow="retry", max_turns=max_turns, retry={"message": "No.", "discount": 0.5})
    settings = EnvironmentProcessesConfig(count=1)
    reference = f"{directory / 'opposites.py'}:Opposites"
    opened = EnvironmentProcesses(reference, {}, settings, (60.0, "start_s"))
    async with engine_over(replica) as (engine, _), opened as environment:
        return replica, await choose_workflow(config, environment).arun_episode(engine, episode(1))


OPPOSITES = """
from sluice.environments.base import Task

class Opposites:
    name = "opposites"
    def tasks(self, split, seed):
        return [Task("t")]
    def messages(self, task):
        return [{"role": "user", "content": "The opposite of hot?"}]
    def score(self, task, completion):
        return {"cold": 1.0, "cool": 0.5, "hot": 0.0}[completion]
"""


async def test_a_question_is_asked_again_until_its_answer_is_good_enough(tmp_path) -> None:
    _, (record,) = await retried(["hot", "cool", "cold"], tmp_path)
    said = [(each.role, each.content) for each in record.conversation.messages]
    assert said[1:] == [
        ("assistant", "hot"),
        ("user", "No."),
        ("assistant", "cool"),
        ("user", "No."),
        ("assistant", "cold"),
    ]
    assert record.trajectory.reward == 1.0 * 0.5**2
    assert [each.reward for each in record.trajectory.turn_rewards] == [0.0, 0.25, 0.0]
    assert len(record.trajectory.turn_runs) == 3


async def test_the_last_answer_counts_where_none_is_good_enough(tmp_path) -> None:
    _, (record,) = await retried(["cool", "hot", "cool"], tmp_path, max_turns=3)
    assert record.trajectory.reward == pytest.approx(0.5 * 0.5**2)
    assert record.trajectory.finish_reason == tokens_pb2.FINISH_REASON_LENGTH


async def test_an_answer_that_was_cut_off_is_scored_and_ends_the_episode(tmp_path) -> None:
    replica, (record,) = await retried(["cool"], tmp_path, finish=tokens_pb2.FINISH_REASON_LENGTH)
    assert record.trajectory.reward == 0.5
    assert len(replica.calls) == 1


async def test_an_answer_without_a_score_leaves_the_reward_missing(tmp_path) -> None:
    _, (record,) = await retried(["unheard of"], tmp_path)
    assert not record.trajectory.HasField("reward")


async def test_a_version_that_changes_between_turns_is_kept_apart() -> None:
    replica = RolloutDouble(version=Version(1, 3))

    def text(request, index):
        replica.version = Version(1, replica.version.number + 1)
        return "ab"

    replica.text = text
    async with engine_over(replica) as (engine, _):
        (record,) = await run_episodes(engine, episode(1))
    spans = [(span.start, span.policy_version.number) for span in record.trajectory.version_spans]
    assert spans == [(0, 3), (2, 4), (4, 5)]


async def late(clock: SimulatedClock, running: asyncio.Future[Any], hanging: int) -> None:
    """Let `CALL_S` pass each time that an episode hangs, so many times."""
    with structlog.testing.capture_logs() as logs:
        for _ in range(hanging):
            await clock.until(lambda: running.done() or "hangs" in [each.get("text") for each in logs])
            logs.clear()
            await clock.advance(CALL_S)
        await asyncio.wait({running})


async def test_episodes_that_hang_are_given_up_and_stop_no_others() -> None:
    clock = SimulatedClock()
    async with engine_over(RolloutDouble()) as (engine, _):
        running = asyncio.create_task(run_episodes(engine, episode(4), clock=clock, odd_seeds_hang=True))
        await late(clock, running, 2)
        records = running.result()
    assert [record.trajectory.trajectory_id for record in records] == ["g1-1", "g1-3"], "the seeds are 5 to 8"


async def test_a_group_whose_episodes_all_fail_by_the_environment_says_how_it_failed() -> None:
    clock = SimulatedClock()
    async with engine_over(RolloutDouble()) as (engine, _):
        running = asyncio.create_task(run_episodes(engine, episode(1), clock=clock, odd_seeds_hang=True))
        await late(clock, running, 1)
        with pytest.raises(EnvironmentFailedError, match="reset of task t did not end within 60 s") as failed:
            running.result()
    assert (failed.value.reason, failed.value.task_id) == ("ENVIRONMENT_HUNG", "t")


@pytest.mark.parametrize("fickle", [False, True])
async def test_an_episode_beside_one_that_kills_their_process_is_replayed_or_begins_again(fickle) -> None:
    replica = RolloutDouble()
    async with engine_over(replica) as (engine, _):
        records = await run_episodes(engine, episode(2), odd_seeds_die=True, fickle=fickle)
    assert [record.trajectory.trajectory_id for record in records] == ["g1-1"]
    assert records[0].trajectory.turn_runs == [2, 2, 2]
    attempts = {call.request.request_id.rpartition("/")[0] for call in replica.calls}
    assert attempts <= {"test/g1/0", "test/g1/1"} if fickle else attempts == {"test/g1/0"}


async def until(condition) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - any condition, of any double
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("fickle", [False, True])
async def test_a_start_replays_an_episode_from_its_recorded_turns_or_begins_it_again(tmp_path, fickle) -> None:
    replica = RolloutDouble()

    def two_turns_then_nothing(request, index):
        if len(replica.calls) == 2:
            replica.gate.clear()
        return "ab"

    replica.text = two_turns_then_nothing
    first = Journal(tmp_path, {"run": "test"}, limits=JournalLimits(fsync_interval_s=0.0))
    first.record_fact(journal_pb2.Fact(task_drawn=journal_pb2.TaskDrawn(group=1, task_id="t", episodes=1)))
    data = replace(episode(1), log=JournaledEpisodes(first, first.ledger.groups[1]))
    async with engine_over(replica) as (engine, _):
        running = asyncio.create_task(run_episodes(engine, data, fickle=fickle))
        await until(lambda: len(replica.calls) == 3)
        running.cancel()
        await asyncio.wait({running})
        await first.close()
        replica.gate.set()
        second = Journal(tmp_path, {"run": "test"}, limits=JournalLimits(fsync_interval_s=0.0))
        data = replace(episode(1), log=JournaledEpisodes(second, second.ledger.groups[1]))
        (record,) = await run_episodes(engine, data, fickle=fickle)
        await second.close()
    names = [call.request.request_id.removeprefix("test/g1/") for call in replica.calls]
    again = ["1/0.0", "1/0.1", "1/0.2"] if fickle else ["0/0.2"]
    assert names == ["0/0.0", "0/0.1", "0/0.2", *again], "a request without an answer is repeated under its name"
    assert record.trajectory.turn_runs == [2, 2, 2]
    assert [each.reward for each in record.trajectory.turn_rewards] == [1, 2, 3]
    assert len(record.trajectory.logprobs) == 6


async def test_a_late_episode_is_lost_alone_and_no_later_process_runs_it_again(tmp_path) -> None:
    clock, replica = SimulatedClock(), RolloutDouble(works=True)
    replica.gate.clear()
    replica.gated = lambda request: request.request_id.endswith("/1.1")
    first = Journal(tmp_path, {"run": "test"}, limits=JournalLimits(fsync_interval_s=0.0))
    first.record_fact(journal_pb2.Fact(task_drawn=journal_pb2.TaskDrawn(group=1, task_id="t", episodes=3)))

    async def run(engine: PolicyEngine, journal: Journal) -> list[str]:
        deadline = ServedDeadline(CALL_S, clock)
        data = replace(episode(3), log=JournaledEpisodes(journal, journal.ledger.groups[1]))
        async with deadline.limit():
            records = await run_episodes(engine.timed(deadline), data)
        return [each.trajectory.trajectory_id for each in records]

    async with engine_over(replica) as (engine, _):
        running = asyncio.create_task(run(engine, first))
        await until(lambda: len(replica.calls) == 8)
        await clock.until(lambda: first.ledger.groups[1].lost, step_s=1.0)
        assert await running == ["g1-0", "g1-2"]
        await first.close()
        second = Journal(tmp_path, {"run": "test"}, limits=JournalLimits(fsync_interval_s=0.0))
        assert await run(engine, second) == ["g1-0", "g1-2"]
        assert second.ledger.groups[1].lost == {1: "EPISODE_DEADLINE"}
        for each in (0, 2):
            JournaledEpisodes(second, second.ledger.groups[1]).keep_loss(each, "EPISODE_FAILED")
        with pytest.raises(SluiceError, match="every episode of group g1"):
            await run(engine, second)
        await second.close()
    assert len(replica.calls) == 8, "the second process asked for nothing"


async def test_an_episode_that_needs_more_turns_than_allowed_is_truncated() -> None:
    async with engine_over(RolloutDouble()) as (engine, _):
        (record,) = await run_episodes(engine, episode(1), max_turns=2, turns=5)
    assert record.trajectory.finish_reason == tokens_pb2.FINISH_REASON_LENGTH
    assert len(record.trajectory.turn_runs) == 2


async def test_samples_of_one_request_go_on_with_seeds_of_their_own() -> None:
    asked = []
    for _ in range(2):
        replica = RolloutDouble(text=lambda request, index: "ab")
        replica.finish = lambda request: (
            tokens_pb2.FINISH_REASON_STOP if request.token_ids.ids else tokens_pb2.FINISH_REASON_ABORT
        )
        async with engine_over(replica) as (engine, _):
            sampling = tokens_pb2.SamplingParams(seed=7, max_tokens=10)
            await engine.agenerate(rollout_pb2.GenerateRequest(text="x", n=4, sampling=sampling))
        asked.append(sorted(call.request.sampling.seed for call in replica.calls if call.request.token_ids.ids))
    assert len(set(asked[0])) == 4, "or all four would sample the same tokens from here on"
    assert not set(asked[0]) & {7, 8, 9, 10}, "and none repeats the numbers that an interrupted sample drew"
    assert asked[0] == asked[1], "the same run gives the same seeds"


async def test_seeds_differ_by_episode_and_turn_and_are_the_same_again() -> None:
    seeds = []
    for _ in range(2):
        replica = RolloutDouble()
        async with engine_over(replica) as (engine, _pool):
            await run_episodes(engine, episode(2, seeded=True))
        seeds.append(sorted(call.request.sampling.seed for call in replica.calls))
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 6


async def test_a_pool_whose_poll_breaks_ends_instead_of_polling_no_more_in_silence() -> None:
    def broken(_replica) -> None:
        raise RuntimeError("told nobody")

    async with serve_rollout(RolloutDouble()) as target:
        pool = ReplicaPool([target], SecurityConfig(), ReplicasConfig(poll_s=0.05), broken)
        async with asyncio.timeout(60):
            with pytest.raises(ExceptionGroup) as ended:
                await pool.run()
    assert ended.group_contains(RuntimeError, match="told nobody")


async def test_requests_go_to_the_replica_with_the_least_to_do() -> None:
    replicas = [RolloutDouble("one"), RolloutDouble("two")]
    for each in replicas:
        each.gate.clear()
    async with engine_over(*replicas) as (engine, _):
        request = rollout_pb2.GenerateRequest(text="x", n=1)
        calls = []
        for _ in range(6):
            calls.append(
                asyncio.create_task(
                    engine.agenerate(rollout_pb2.GenerateRequest.FromString(request.SerializeToString()))
                )
            )
            await asyncio.sleep(0)
        while sum(len(each.calls) for each in replicas) < 6:  # noqa: ASYNC110 - the doubles wait for their gate
            await asyncio.sleep(0.01)
        assert [len(each.calls) for each in replicas] == [3, 3]
        for each in replicas:
            each.gate.set()
        await asyncio.gather(*calls)


async def test_only_replicas_that_are_new_enough_are_chosen() -> None:
    old, new = RolloutDouble("old", version=Version(1, 1)), RolloutDouble("new", version=Version(1, 4))
    async with engine_over(old, new) as (engine, pool):
        for _ in range(3):
            await engine.agenerate(rollout_pb2.GenerateRequest(text="x", min_policy_version=Version(1, 2).to_proto()))
        assert (len(old.calls), len(new.calls)) == (0, 3)
        assert pool.pick(Version(1, 5)) is None
        waiting = asyncio.create_task(pool.choose(Version(1, 5)))
        pool.wait_for(Version(1, 5))
        old.version = Version(1, 5)
        assert (await waiting).name == "old"


async def test_the_text_of_a_continued_sample_is_decoded_by_the_replica_as_a_whole() -> None:
    """Its two parts alone may be halves of a character, which have no text of their own."""

    def utf8(request: rollout_pb2.GenerateRequest, index: int) -> str:
        return "\u00a9" if request.token_ids.ids else "\u00c3"  # the two bytes of an e with an accent

    replica = RolloutDouble(text=utf8)
    replica.finish = lambda request: (
        tokens_pb2.FINISH_REASON_STOP if request.token_ids.ids else tokens_pb2.FINISH_REASON_ABORT
    )
    replica.decode = lambda token_ids: bytes(token_ids).decode(errors="replace")
    async with engine_over(replica) as (engine, _):
        answer = await engine.agenerate(rollout_pb2.GenerateRequest(text="x"))
    assert (list(answer.samples[0].token_ids), answer.samples[0].text) == ([0xC3, 0xA9], "\u00e9")


async def test_a_request_that_is_at_fault_is_not_sent_around() -> None:
    replica = RolloutDouble(failures=[SluiceError.invalid_argument("prompt", "too long")])
    async with engine_over(replica) as (engine, _):
        with pytest.raises(SluiceError, match="too long"):
            await engine.agenerate(rollout_pb2.GenerateRequest(text="x"))
        assert engine.counts["retried"] == 0


async def test_a_replica_that_stops_answering_gets_no_work_and_rejoins() -> None:
    replica = RolloutDouble()
    async with engine_over(replica) as (_, pool):
        replica.state = rollout_pb2.REPLICA_STATE_DRAINING
        while pool.pick(BASE) is not None:  # noqa: ASYNC110 - the next poll tells
            await asyncio.sleep(0.01)
        assert "draining" in pool.replicas[0].why_not()
        replica.state = rollout_pb2.REPLICA_STATE_SERVING
        assert (await pool.choose(BASE)).name == "replica-0"


SILENT = SluiceError.failed_precondition("SILENT", "does not answer")


def ask(engine: PolicyEngine, name: str) -> asyncio.Task[rollout_pb2.GenerateResponse]:
    return asyncio.create_task(engine.agenerate(rollout_pb2.GenerateRequest(text="x", request_id=name)))


async def test_the_calls_of_an_evicted_replica_are_cancelled_and_made_elsewhere() -> None:
    stuck, other = RolloutDouble("stuck"), RolloutDouble("other")
    stuck.gate.clear()
    other.state = rollout_pb2.REPLICA_STATE_DRAINING
    clock = SimulatedClock()
    async with engine_over(stuck, other, clock=clock, poll_s=1.0) as (engine, pool):
        (answering,) = (replica.progress for replica in pool.replicas if replica.name == "other")

        async def pass_until(condition: Callable[[], object]) -> None:
            while not condition():
                heard = answering.heard_at
                await clock.advance(1.0)
                await clock.until(lambda heard=heard: answering.heard_at > heard)

        assert sum(not replica.why_not() for replica in pool.replicas) == 1
        calls = [ask(engine, f"r{number}") for number in range(3)]
        await clock.until(lambda: len(stuck.calls) == 3)  # they wait at the gate
        stuck.status_failure = SILENT
        await pass_until(lambda: pool.pick(BASE) is None)
        assert engine.counts["evicted_silent"] == 1
        assert not any(call.done() for call in calls), "there is nowhere to go yet"
        assert sum(replica.in_flight for replica in pool.replicas) == 3
        other.state = rollout_pb2.REPLICA_STATE_SERVING
        await pass_until(lambda: all(call.done() for call in calls))
        await asyncio.gather(*calls)
        assert len(other.calls) == 3
        assert engine.counts["retried"] == 3


async def test_a_replica_that_left_the_name_service_finishes_its_requests_before_it_is_forgotten(monkeypatch) -> None:
    leaving, other = RolloutDouble("leaving"), RolloutDouble("other", state=rollout_pb2.REPLICA_STATE_DRAINING)
    leaving.gate.clear()
    searches = 0

    async def only_the_other(targets: list[str]) -> list[str]:
        nonlocal searches
        searches += 1
        return targets[1:] if leaving.state == rollout_pb2.REPLICA_STATE_DRAINING else targets

    monkeypatch.setattr(pool_module, "resolve_targets", only_the_other)
    async with engine_over(leaving, other, resolve_s=0.05) as (engine, pool), asyncio.timeout(60):
        call = ask(engine, "r")
        while not leaving.calls:  # noqa: ASYNC110 - it waits at the gate
            await asyncio.sleep(0.01)
        leaving.state, other.state = rollout_pb2.REPLICA_STATE_DRAINING, rollout_pb2.REPLICA_STATE_SERVING
        while [each.name for each in pool.replicas if not each.why_not()] != ["other"]:  # noqa: ASYNC110 - polls tell
            await asyncio.sleep(0.01)
        seen = searches
        while searches < seen + 2:  # noqa: ASYNC110 - one whole search has found it gone
            await asyncio.sleep(0.01)
        leaving.gate.set()
        await call
        assert (len(leaving.calls), len(other.calls), engine.counts["retried"]) == (1, 0, 0)
        while len(pool.replicas) > 1:  # noqa: ASYNC110 - a later search forgets it
            await asyncio.sleep(0.01)


async def test_a_caller_that_is_cancelled_itself_is_not_sent_elsewhere() -> None:
    stuck, other = RolloutDouble("stuck"), RolloutDouble("other")
    stuck.gate.clear()
    other.gate.clear()
    async with engine_over(stuck, other) as (engine, _):
        call = ask(engine, "r")
        while not stuck.calls and not other.calls:  # noqa: ASYNC110 - it waits at the gate
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len(stuck.calls) + len(other.calls) == 1
        assert engine.counts["retried"] == 0


async def test_eval_scores_a_running_server(tmp_path, capsys) -> None:
    (tmp_path / "letters_eval_env.py").write_text(ENVIRONMENT)
    settings = tmp_path / "eval.toml"
    settings.write_text(f'environment = "{tmp_path}/letters_eval_env.py:Letters"\nprompts = 6\nsamples = 2\n')
    output, samples = tmp_path / "eval.json", tmp_path / "samples.jsonl"
    async with serve_rollout(RolloutDouble(version=Version(1, 7))) as address:
        argv = ["@", str(settings), "--address", address, "--output", str(output), "--samples-output", str(samples)]
        code = await asyncio.to_thread(COMMAND.run, argv)
    result = json.loads(output.read_text())
    assert code == 0
    assert result["policy_version"] == "1.7"
    assert result["metrics"]["reward_mean"] == pytest.approx((0.5 + 2 / 3) / 2)
    assert result["metrics"]["greedy_reward_mean"] == 0.5
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(rows) == 6 * 3
    assert sum(row["greedy"] for row in rows) == 6
    assert "reward, greedy" in capsys.readouterr().out


async def test_an_evaluation_sends_a_server_its_template_arguments_and_writes_them_down(tmp_path) -> None:
    (tmp_path / "letters.py").write_text(ENVIRONMENT)
    output, replica = tmp_path / "eval.json", RolloutDouble()
    flags = {"environment": f"{tmp_path}/letters.py:Letters", "prompts": 1, "samples": 1, "output": output}
    async with serve_rollout(replica) as address:
        argv = [f"--{name}={value}" for name, value in {"address": address, **flags}.items()]
        argv += ["--chat-template-kwargs.enable_thinking", "false"]
        assert await asyncio.to_thread(COMMAND.run, argv) == 0
        with pytest.raises(ConfigError, match="leave chat_template out"):
            COMMAND.run([*argv, "--chat-template", str(output)])
    sent = {call.request.conversation.template_arguments_json for call in replica.calls}
    assert sent == {'{"enable_thinking": false}'}
    assert json.loads(output.read_text())["chat_template_kwargs"] == {"enable_thinking": False}


MUTE = """
from sluice.environments.base import Task, Turn

class Mute:
    name = "mute"
    messages = [{"role": "user", "content": "go"}]
    def tasks(self, split, seed):
        return [Task("a"), Task("b")]
    def reset(self, task, seed):
        return self
    def step(self, completion):
        return Turn(messages=self.messages)
"""


async def test_an_evaluation_says_why_rewards_are_missing(tmp_path, capsys) -> None:
    (tmp_path / "mute.py").write_text(MUTE)
    flags = {"environment": f"{tmp_path}/mute.py:Mute", "samples": 3, "max-turns": 2}
    async with serve_rollout(RolloutDouble(version=Version(1, 7))) as address:
        argv = [f"--{name}={value}" for name, value in {"address": address, **flags}.items()]
        assert await asyncio.to_thread(COMMAND.run, argv) == 1
    said = capsys.readouterr().err
    assert "8 episodes were cut off by max_tokens or max_turns" in said, "two tasks, three samples and a greedy one"
    assert "`last`" in said


BROKEN = """
from sluice.environments.base import Task

class Broken:
    name = "broken"
    def tasks(self, split, seed):
        return [Task("a")]
    def messages(self, task):
        return [{"role": "user", "content": "go"}]
    def score(self, task, completion):
        return {}["key"]
"""


async def test_an_evaluation_does_not_blame_the_length_of_what_cannot_be_scored(tmp_path, capsys) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    flags = {"environment": f"{tmp_path}/broken.py:Broken", "samples": 3, "max-tokens": 1}
    double = RolloutDouble(version=Version(1, 7), finish=lambda _: tokens_pb2.FINISH_REASON_LENGTH)
    async with serve_rollout(double) as address:
        argv = [f"--{name}={value}" for name, value in {"address": address, **flags}.items()]
        assert await asyncio.to_thread(COMMAND.run, argv) == 1
    said = capsys.readouterr().err
    assert "4 rewards are missing because the environment gave none: see `scoring failed` above" in said
    assert said.count("KeyError: 'key'") == 2, "once for the samples, once for the greedy one"
    assert "cut off" not in said


async def test_an_evaluation_whose_environment_never_lists_its_tasks_ends_with_the_remedy(tmp_path) -> None:
    (tmp_path / "slow_env.py").write_text(
        "import time\nclass Slow:\n    name = 'slow'\n"
        "    def tasks(self, split, seed):\n        print('lists', split)\n        time.sleep(3600)\n        return []\n"
        "    def messages(self, task):\n        return []\n"
        "    def score(self, task, completion):\n        return 0.0\n"
    )
    clock = SimulatedClock()
    config = EvalConfig(address="127.0.0.1:1", environment=f"{tmp_path}/slow_env.py:Slow", start_s=60.0)
    evaluating = asyncio.create_task(run_evaluation(config, clock))
    with structlog.testing.capture_logs() as logs:
        await clock.until(lambda: evaluating.done() or "lists eval" in [each.get("text") for each in logs])
        await clock.advance(60.0)
        with pytest.raises(ConfigError, match=r"did not list the tasks of split eval within 60 s"):
            await evaluating
