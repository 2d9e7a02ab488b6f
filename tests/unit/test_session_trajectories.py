"""The tree of a session becomes trajectories: each sampled token is trained once, with the advantage of the branches that hold it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from session_facts import digest, generation

from orchestrator_svc.config import EpisodeConfig
from orchestrator_svc.journal.external import EPISODE, RecordedRequest, Sample, Session, Target
from orchestrator_svc.journal.facts import Place
from orchestrator_svc.journal.records import Beginning, SharedRecord, decoded, encode
from orchestrator_svc.run.sifting import sift
from orchestrator_svc.run.training import _give_advantages
from orchestrator_svc.sessions.trajectories import UNDELIVERED, Built, TreeError, build
from sluice.advantages import ESTIMATORS, Episode, estimate, slopes
from sluice.v1 import episode_pb2, session_pb2, tokens_pb2
from sluice.v1 import journal_pb2 as pb
from sluice.versions import Version


def session_of(
    made: list[session_pb2.RecordedGeneration], episode: int = 0, branches=(), *, truncated=False
) -> Session:
    """A submitted session in which this was sampled."""
    session = Session(7, episode, 0, "ann", "g7-lease-1", "open")
    for each in made:
        samples = tuple(
            Sample(f"{each.request_id}/{index}", each.parent, key, 0, digest(sample.token_ids))
            for index, (key, sample) in enumerate(zip(each.keys, each.response.samples, strict=True))
        )
        session.requests[each.request_id] = RecordedRequest(each.request_id, b"", samples, Place(1, 0, b""), 0)
        session.samples |= {sample.generation_id: sample for sample in samples}
    named = [episode_pb2.Branch(generation_ids=each) for each in branches]
    session.submission = pb.EpisodeSubmitted(branches=named, truncated=truncated)
    return session


def built(made: list[session_pb2.RecordedGeneration], rewards=None, episode: int = 0, branches=(), **flags) -> Built:
    return build(session_of(made, episode, branches, **flags), made, rewards or {}, "task")


def forked() -> list[session_pb2.RecordedGeneration]:
    """Return two turns, the second sampled twice: branches a/0 b/0 and a/0 b/1."""
    return [generation("a", [1, 2], [3, 4]), generation("b", [1, 2, 3, 4, 5], [6], [7, 8], parent="a/0")]


def test_what_no_client_was_given_is_not_trained_and_counted():
    made = [
        generation("a", [1, 2], [3, 4]),
        generation("lost", [1, 2, 3, 4, 5], [6, 7, 8], parent="a/0"),
        generation("b", [1, 2, 3, 4, 5], [9], parent="a/0"),
    ]
    session = session_of(made)
    session.undelivered.add("lost")
    found = build(session, made, {EPISODE: 1.0}, "task")
    (record,) = found.records
    assert list(record.trajectory.token_ids) == [1, 2, 3, 4, 5, 9]
    assert found.not_trained == {UNDELIVERED: 3}


def test_a_linear_episode_is_one_trajectory_as_our_own_workflows_make_it():
    made = [
        generation("a", [1, 2], [3, 4], version=Version(1, 0)),
        generation("b", [1, 2, 3, 4, 5], [6], parent="a/0", version=Version(1, 1)),
        generation("c", [1, 2, 3, 4, 5, 6], [7, 8], parent="b/0", version=Version(1, 1)),
    ]
    (record,) = built(made, {EPISODE: 1.0, Target("b/0"): 0.25}).records
    trajectory = record.trajectory
    assert (trajectory.trajectory_id, trajectory.episode_id, trajectory.group_id) == ("g7-0", "g7-0", "g7")
    assert list(trajectory.token_ids) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(trajectory.mask_runs) == [2, 2, 1, 1, 0, 2]
    assert list(trajectory.logprobs) == pytest.approx([-0.003, -0.004, -0.006, -0.007, -0.008])
    assert [(each.start, each.policy_version.number) for each in trajectory.version_spans] == [(0, 0), (2, 1)]
    assert list(trajectory.turn_runs) == [2, 1, 2]
    assert [(each.turn, each.reward) for each in trajectory.turn_rewards] == [(1, 0.25)]
    assert (trajectory.reward, trajectory.temperature) == (1.0, 1.0)
    assert not trajectory.branch_rewards
    assert [each.content for each in record.whole().conversation.messages] == ["1 2 3 4 5 6", "7 8"]
    assert record.beginning is None


def test_a_branch_names_the_replicas_of_its_own_turns_and_when_its_last_token_was_there():
    first, second = forked()
    other = generation("c", [1, 2, 3, 4, 5], [9], parent="a/0")
    for place, (each, replica) in enumerate([(first, "r0"), (second, "r1"), (other, "r0")], 1):
        each.response.replicas.append(replica)
        each.response.sample_time.FromSeconds(place)
    found = [each.whole() for each in built([first, second, other], {EPISODE: 1.0}).records]
    assert [list(each.replicas) for each in found] == [["r0", "r1"], ["r0", "r1"], ["r0"]]
    assert [each.sample_time.seconds for each in found] == [2, 2, 3]
    assert not built(forked()).records[0].own.HasField("sample_time")  # a gateway of an earlier release does not say it


def test_a_token_is_trained_in_the_first_branch_that_holds_it_and_context_in_the_others():
    first, second = (each.whole_trajectory() for each in built(forked(), {EPISODE: 1.0}).records)
    assert (first.trajectory_id, second.trajectory_id) == ("g7-0.0", "g7-0.1")
    assert first.episode_id == second.episode_id == "g7-0"
    assert (list(first.token_ids), list(first.mask_runs)) == ([1, 2, 3, 4, 5, 6], [2, 2, 1, 1])
    assert (list(second.token_ids), list(second.mask_runs)) == ([1, 2, 3, 4, 5, 7, 8], [5, 2])
    assert list(second.logprobs) == pytest.approx([-0.007, -0.008])
    assert (list(first.turn_runs), list(second.turn_runs)) == ([2, 1], [2])


def test_a_submission_may_name_its_branches_and_a_branch_without_a_token_of_its_own_trains_none():
    named = [["a/0", "b/1"], ["a/0"]]
    first, second = (each.whole_trajectory() for each in built(forked(), {EPISODE: 1.0}, branches=named).records)
    assert list(first.mask_runs) == [2, 2, 1, 2]
    assert (list(second.token_ids), list(second.mask_runs)) == ([1, 2, 3, 4], [4])
    found = sift(built(forked(), {EPISODE: 1.0}, branches=named).records, EpisodeConfig(), 8)
    assert found.untrainable == {"g7-0.1": "NO_TOKENS"}


def held(record: SharedRecord) -> list[Beginning]:
    """The parts before its own."""
    return record.beginning.parts() if record.beginning else []


TOOL = tokens_pb2.Tool(name="look", description="Looks.")


@st.composite
def trees(draw) -> list[session_pb2.RecordedGeneration]:
    """A session that forks anywhere; some of its requests change messages that they continue, or tools."""
    made: list[session_pb2.RecordedGeneration] = []
    said: dict[str, tuple[list[int], list[tokens_pb2.ChatMessage]]] = {"": ([], [])}
    for index in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from(list(said)))
        ids, messages = said[parent]
        prompt = [*ids, *draw(st.lists(st.integers(0, 9), min_size=1 - bool(parent), max_size=3))]
        replies = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=3))
        each = generation(f"r{index}", prompt, *replies, parent=parent)
        kept = messages[: len(messages) - draw(st.sampled_from([0, 0, 0, 1]))]
        asked = tokens_pb2.ChatMessage(role="user", content=f"question {index}")
        tools = draw(st.sampled_from([[], [], [TOOL]]))
        each.conversation.CopyFrom(tokens_pb2.Conversation(messages=[*kept, asked], tools=tools))
        made.append(each)
        for number, sample in enumerate(each.response.samples):
            answer = tokens_pb2.ChatMessage(role="assistant", content=sample.text)
            said[f"r{index}/{number}"] = ([*prompt, *sample.token_ids], [*kept, asked, answer])
    return made


@given(trees(), st.randoms(use_true_random=False))
def test_records_are_whole_when_they_leave_and_what_branches_begin_with_is_there_once(made, choice):
    session = session_of(made)
    paths = [session.path(each) for each in session.samples]
    named = [] if choice.random() < 0.5 else choice.sample(paths, k=choice.randrange(1, len(paths) + 1))
    branches = session.branches(named)
    records = built(made, {EPISODE: 1.0}, branches=named).records
    by_name = {f"{each.request_id}/{index}": (each, index) for each in made for index in range(len(each.keys))}
    for record, branch in zip(records, branches, strict=True):
        last, index = by_name[branch[-1]]
        sample = last.response.samples[index]
        whole = record.whole()
        assert list(whole.trajectory.token_ids) == [*last.response.prompt_token_ids, *sample.token_ids]
        assert record.tokens == len(whole.trajectory.token_ids) == sum(whole.trajectory.mask_runs)
        assert record.trajectory_bytes >= whole.trajectory.ByteSize()
        said = tokens_pb2.ChatMessage(role="assistant", content=sample.text)
        assert list(whole.conversation.messages) == [*last.conversation.messages, said]
        assert whole.conversation.tools == last.conversation.tools
        assert record.own.conversation.messages[-1] == said, "the last message is read without the rest"
    encoded = encode(records)
    again = list(decoded([each[::2] for each in encoded.beginnings], [each[::2] for each in encoded.rests]))
    assert [each.whole() for each in again] == [each.whole() for each in records]
    # What two branches have in common is a part of both, and that part is one object.
    for one, two in combinations(range(len(records)), 2):
        first, second = (branches[each] for each in (one, two))
        together = sum(a.partition("/")[0] == b.partition("/")[0] for a, b in zip(first, second, strict=False))
        parts = [{id(each) for each in held(records[number])} for number in (one, two)]
        assert bool(parts[0] & parts[1]) == bool(together)


def test_what_n_samples_of_one_prompt_take_is_the_prompt_once_and_their_tokens():
    prompt = list(range(1000))
    made = [generation(name, [*prompt, number], *([[7]] * 64)) for number, name in enumerate("abc")]
    records = built(made, {EPISODE: 1.0}).records
    assert len(records) == 192
    parts = {id(part): part for each in records for part in held(each)}
    assert sum(len(each.own.trajectory.token_ids) for each in records) == 192
    assert [part.tokens for part in parts.values()] == [1001, 1001, 1001]
    assert all(each.own.ByteSize() < 200 for each in records)


def test_a_deep_session_that_forks_at_each_turn_takes_its_tokens_once():
    made, ids, parent = [], list(range(50)), ""
    for turn in range(100):
        made.append(generation(f"t{turn}", ids, [1], [2], parent=parent))
        parent, ids = f"t{turn}/0", [*ids, 1, *range(50)]
    records = built(made, {EPISODE: 1.0}).records
    assert len(records) == 101
    parts = {id(part): part for each in records for part in held(each)}
    own = sum(len(each.own.trajectory.token_ids) for each in records)
    shared = sum(len(next(decoded([], [(part.payload, 0)])).trajectory.token_ids) for part in parts.values())
    assert shared + own <= len(made[-1].response.prompt_token_ids) + 2 * 100
    assert records[-1].tokens == len(made[-1].response.prompt_token_ids) + 1


def test_what_may_not_be_trained_and_another_temperature_are_context_and_counted():
    made = [
        generation("a", [1], [2, 3], temperature=0.5, not_trained="TOP_P"),
        generation("b", [1, 2, 3], [4], parent="a/0", temperature=0.5),
        generation("c", [1, 2, 3, 4], [5, 6], parent="b/0", temperature=1.0),
    ]
    result = built(made, {EPISODE: 1.0}, truncated=True)
    trajectory = result.records[0].trajectory
    assert (trajectory.temperature, list(trajectory.mask_runs)) == (1.0, [4, 2])
    assert result.not_trained == {"TOP_P": 2, "TEMPERATURE": 1}
    assert trajectory.finish_reason == tokens_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ({}, None),
        ({Target("a/0"): 0.25, Target("b/1"): 0.5}, 0.75),
        ({Target(branch="b/0"): 1.0, Target(branch="b/1"): 0.0, Target("a/0"): 9.0}, 0.5),
        ({Target(branch="b/1"): 1.0}, 1.0),
        ({EPISODE: 0.0, Target(branch="b/0"): 1.0}, 0.0),
    ],
)
def test_the_reward_of_an_episode_is_its_own_or_the_mean_of_its_branches_or_the_sum_of_its_turns(rewards, expected):
    for each in built(forked(), rewards).records:
        assert (each.trajectory.reward if each.trajectory.HasField("reward") else None) == expected


def test_rewards_of_turns_of_a_forked_episode_are_each_at_one_token():
    rewards = {EPISODE: 2.0, Target("a/0"): 0.5, Target("b/1"): 0.25}
    first, second = (each.trajectory for each in built(forked(), rewards).records)
    # The rest of the reward, 2 - 0.75, is at the end of each branch. The reward of the shared turn is in the branch that trains it.
    assert list(first.token_rewards) == [0.0, 0.5, 1.25]
    assert list(second.token_rewards) == [0.0, 1.5]
    assert not first.turn_rewards


def test_a_branch_whose_prompts_do_not_fit_together_or_that_was_not_recorded_is_an_error():
    broken = [generation("a", [1], [2]), generation("b", [1, 3, 4], [5], parent="a/0")]
    with pytest.raises(TreeError, match="does not begin"):
        built(broken)
    with pytest.raises(TreeError, match="nothing was recorded"):
        build(session_of(forked()), forked()[:1], {}, "task")


async def test_advantages_of_tokens_follow_from_the_branches_below_them():
    # Group of two episodes: one forked into branches of rewards 1 and 0, one linear with reward 0.
    # Episode rewards 0.5 and 0: mean 0.25, sample std sqrt(0.125) = 0.353553.
    # centered: a/0 (below it both) 0.5 - 0.25; b/0: 1 - 0.25; b/1: 0 - 0.25.
    one = built(forked(), {Target(branch="b/0"): 1.0, Target(branch="b/1"): 0.0}).records
    other = built([generation("z", [1, 2], [9])], {EPISODE: 0.0}, episode=1).records
    await _give_advantages("centered", [*one, *other])
    assert [list(each.trajectory.advantages) for each in (*one, *other)] == [
        pytest.approx([0.25, 0.25, 0.75]),
        pytest.approx([-0.25, -0.25]),
        pytest.approx([-0.25]),
    ]
    await _give_advantages("grpo", [*one, *other])
    spread = 0.125**0.5 + 1e-6
    assert [list(each.trajectory.advantages) for each in (*one, *other)] == [
        pytest.approx([0.25 / spread, 0.25 / spread, 0.75 / spread]),
        pytest.approx([-0.25 / spread, -0.25 / spread]),
        pytest.approx([-0.25 / spread]),
    ]


async def test_group_statistics_count_episodes_and_not_branches():
    # Were the branches counted, the mean would be 2/3 and not 1/2.
    one = built(forked(), {EPISODE: 1.0}).records
    other = built([generation("z", [1, 2], [9])], {EPISODE: 0.0}, episode=1).records
    await _give_advantages("centered", [*one, *other])
    assert [list(each.trajectory.advantages) for each in (*one, *other)] == [[0.5], [0.5], [-0.5]]
    settings = EpisodeConfig(filter={"min_reward_mean": 0.6})
    assert sift([*one, *other], settings, 8).without_signal


def test_a_penalty_for_length_is_taken_from_the_whole_episode_and_all_its_branches():
    records = built(forked(), {Target(branch="b/0"): 1.0, Target(branch="b/1"): 0.0}).records
    records[1].trajectory.finish_reason = tokens_pb2.FINISH_REASON_LENGTH
    group = sift(records, EpisodeConfig(overlong={"policy": "penalise", "penalty": 0.5}), 8)
    assert [each.trajectory.reward for each in group.records] == [0.0, 0.0]
    assert [list(each.trajectory.branch_rewards) for each in group.records] == [[0.0, 0.5], [-0.5]]
    assert group.overlong == 1


@given(
    st.sampled_from(sorted(ESTIMATORS)),
    st.lists(st.floats(0, 4), min_size=2, max_size=6),
    st.lists(st.floats(0, 4), min_size=1, max_size=4),
)
@example("maxrl", [0.0, 0.0], [2.2e-309])
def test_the_mean_over_all_branches_of_an_episode_is_its_advantage(name, others, branches):
    """So a tree pushes as much as an episode that did not fork."""
    reward = float(np.mean(branches))
    episodes = [Episode("forked", "g", reward), *(Episode(str(i), "g", each) for i, each in enumerate(others))]
    value, slope = estimate(name, episodes)["forked"], slopes(name, episodes)["forked"]
    of_branches = [value + slope * (each - reward) for each in branches]
    assert np.mean(of_branches) == pytest.approx(value, abs=1e-6 * (1 + max(map(abs, of_branches))))


@pytest.mark.parametrize(
    "name", [name for name in sorted(ESTIMATORS) if name not in ("lite_ppo", "reinforce_pp_baseline")]
)
def test_a_slope_says_what_a_difference_of_rewards_within_a_group_is_worth(name):
    # Two episodes of the group differ by 1: so do their advantages, by the slope (rloo leaves the own reward out: its baselines differ).
    episodes = [Episode("a", "g", 1.0), Episode("b", "g", 2.0), Episode("c", "g", 4.0)]
    values, grows = estimate(name, episodes), slopes(name, episodes)
    expected = 1.5 if name == "rloo" else grows["a"]
    assert values["b"] - values["a"] == pytest.approx(expected)
    assert slopes(name, [Episode("a", "g", 1.0)]) == {"a": 0.0}


def test_no_slope_is_unbounded_where_all_rewards_of_a_group_are_equal():
    episodes = [Episode("a", "g", 1.0), Episode("b", "g", 1.0)]
    assert {name: slopes(name, episodes)["a"] for name in ("grpo", "centered", "maxrl")} == {
        "grpo": 0.0,
        "centered": 1.0,
        "maxrl": 1.0,
    }
