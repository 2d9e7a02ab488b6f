"""What `sluice trace` tells of a run's sessions, from facts alone and from what was sampled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from session_facts import digest, generation, granted, opened

from orchestrator_svc.commands.trace import lines
from orchestrator_svc.commands.trace_history import Trace, following
from orchestrator_svc.journal.facts import LedgerError
from sluice.v1 import journal_pb2 as pb
from sluice.v1 import session_pb2, tokens_pb2
from sluice.versions import Version

NAME = "g1-0-0"


def recorded(made: session_pb2.RecordedGeneration, *, undelivered: bool = False) -> pb.Fact:
    prompt = list(made.response.prompt_token_ids)
    whole = [[*prompt, *each.token_ids] for each in made.response.samples]
    samples = [pb.SessionSample(tokens=len(each), ids_digest=digest(each)) for each in whole]
    return pb.Fact(
        session_generation_recorded=pb.SessionGenerationRecorded(
            group=1, request_id=made.request_id, parent=made.parent, samples=samples, undelivered=undelivered
        )
    )


def submitted(**fields: object) -> pb.Fact:
    return pb.Fact(episode_submitted=pb.EpisodeSubmitted(group=1, **fields))


def ended(*trajectories: str, reward: float = 1.0, reason: str = "") -> pb.Fact:
    accepted = [pb.AcceptedTrajectory(trajectory_id=each) for each in trajectories]
    episode = pb.EndedEpisode(episode=0, reward=reward, trajectories=accepted, reason=reason)
    return pb.Fact(episodes_ended=pb.EpisodesEnded(group=1, episodes=[episode]))


def trace(*facts: pb.Fact) -> Trace:
    drawn = pb.Fact(task_drawn=pb.TaskDrawn(group=1, environment="Sums", task_id="7", episodes=2))
    told = [drawn, granted(1, 1, [0, 1]), opened(1, 0), *facts]
    for second, fact in enumerate(told):
        fact.time.FromSeconds(1_000_000 + second)
    return Trace.of(enumerate(told, 1))


def story(told: Trace, generations: Sequence[session_pb2.RecordedGeneration] = (), name: str = NAME) -> list[str]:
    return [line.strip() for line in lines(told, told.sessions[name], dict(enumerate(generations, 1)), tokens=True)]


FIRST = generation("a", [1, 2], [3, 4])
SECOND = generation("b", [1, 2, 3, 4, 5], [6], parent="a/0")
FORK = generation("c", [1, 2, 3, 9], [7], [8])
TREE = (FIRST, SECOND, FORK)


def test_a_request_continues_all_of_another_one_or_leaves_it_at_a_token() -> None:
    before = {1: FIRST, 2: SECOND}
    assert following(FIRST, {})[:3] == (0, 0, False)
    assert following(SECOND, {1: FIRST})[:3] == (1, 4, True)
    assert following(FORK, before)[:3] == (1, 3, False)
    assert following(generation("d", [7], [8]), before)[:3] == (0, 0, False)
    assert following(SECOND, {})[:3] == (0, 0, False), "what it continues is not kept any more"


def test_a_continuation_shows_the_messages_after_the_reply() -> None:
    second = generation("b", [1, 2, 3, 4, 5], [6], parent="a/0")
    said = [("user", "1 2"), ("assistant", "3 4"), ("tool", "five")]
    del second.conversation.messages[:]
    second.conversation.messages.extend(tokens_pb2.ChatMessage(role=role, content=text) for role, text in said)
    assert [each.content for each in following(second, {1: FIRST}).messages] == ["five"]
    second.parent = ""
    assert [each.content for each in following(second, {1: FIRST}).messages] == ["3 4", "five"]


def test_an_episode_is_told_from_its_opening_to_the_step_that_trained_it() -> None:
    told = trace(
        *map(recorded, TREE),
        pb.Fact(reward_recorded=pb.RewardRecorded(group=1, reward=0.5, branch="b/0")),
        pb.Fact(reward_recorded=pb.RewardRecorded(group=1, reward=0.25, generation_id="c/1")),
        submitted(reward=1, truncated=True),
        ended("g1-0.0", "g1-0.1", "g1-0.2"),
        pb.Fact(batch_made=pb.BatchMade(sequence_no=4, trajectory_ids=["g1-0.0", "g1-0.1", "g1-0.2", "g2-0"])),
        pb.Fact(
            batch_applied=pb.BatchApplied(
                sequence_no=4,
                policy_version=Version(2, 4).to_proto(),
                dropped={"STALE": pb.DroppedTrajectories(trajectory_ids=["g1-0.1"])},
            )
        ),
    )
    shown = story(told, TREE)
    assert shown[0] == "episode g1-0-0: task 7 of Sums, by ann"
    for line in (
        "+1.000 s  #1  unknown route",
        "prompt 5 tokens: continues #1 (4), 1 new",
        "prompt 4 tokens: a fork, equal to #1 up to token 3",
        "sampled 1 tokens as sample 1, version 0.0, stop",
        "prompt ids from 3: 9",
        "+4.000 s  reward 0.5 of the branch that ends with #2",
        "+5.000 s  reward 0.25 of the turn #3 sample 1",
        "+6.000 s  submitted, reward 1, cut off by the agent",
        "trajectory g1-0.0: #1 -> #2: trained in step 4, which made version 2.4",
        "trajectory g1-0.1: #3: not trained: STALE",
    ):
        assert line in shown
    assert "2 tokens" not in "".join(story(told)), "nothing of the replies is made up where they are not kept"


def test_rewards_and_ends_say_what_let_them_in() -> None:
    told = trace(
        recorded(FIRST),
        pb.Fact(reward_recorded=pb.RewardRecorded(group=1, reward=1, settled_by="CREDENTIAL_SESSION_KEY")),
        pb.Fact(reward_recorded=pb.RewardRecorded(group=1, reward=0, settled_by="CREDENTIAL_NONE")),
        submitted(reward=0.5, settled_by="CREDENTIAL_PRINCIPAL"),
    )
    shown = story(told, [FIRST])
    for line in (
        "+2.000 s  reward 1, by the session key",
        "+3.000 s  reward 0, by a caller without a key",
        "+4.000 s  submitted, reward 0.5, by principal ann",
    ):
        assert line in shown
    by_its_key = pb.EpisodeGivenUp(group=1, reason="ABANDONED", settled_by="CREDENTIAL_SETTLING_KEY")
    shown = story(trace(pb.Fact(episode_given_up=by_its_key)))
    assert "+1.000 s  given up: ABANDONED, by the settling key; the episode has ended" in shown


def test_what_a_checkpoint_covers_is_told_as_far_as_the_facts_know_it() -> None:
    shown = story(trace(recorded(FIRST), recorded(SECOND)))
    assert "+1.000 s  #1  4 tokens with the prompt; what they say is not kept any more: a checkpoint covers it" in shown
    assert any("#2  6 tokens with the prompt, continues #1;" in line for line in shown)
    assert shown[-1] == "it is open"


def test_several_versions_of_one_reply_are_told_with_their_tokens() -> None:
    made = generation("a", [1], [2, 3, 4], version=Version(1, 1))
    made.response.samples[0].version_spans.add(start=2, policy_version=Version(1, 2).to_proto())
    made.not_trained, made.dialect, made.gateway = "TOP_P", "openai.chat", "door"
    made.replicas.extend(["one:1", "two:2"])
    made.begin_time.FromMilliseconds(1_000_002_750)
    shown = story(trace(recorded(made)), [made])
    assert "sampled 3 tokens, version 1.1 from 0, 1.2 from 2, stop" in shown
    assert "+1.000 s  #1  openai.chat  gateway door  replica one:1, then two:2  0.250 s" in shown
    assert "#1 is not trained: TOP_P" in shown


def test_what_no_client_got_is_told_until_one_asks_again() -> None:
    told = trace(recorded(FIRST, undelivered=True))
    assert "no client has it" in story(told, [FIRST])[2]
    again = pb.SessionGenerationDelivered(group=1, request_id="a")
    told = trace(recorded(FIRST, undelivered=True), pb.Fact(session_generation_delivered=again))
    shown = story(told, [FIRST])
    assert "no client has it" not in "".join(shown)
    assert "+2.000 s  a client asked again, and got #1" in shown


def test_an_attempt_that_is_given_up_ends_and_the_next_one_is_another() -> None:
    given_up = pb.Fact(episode_given_up=pb.EpisodeGivenUp(group=1, reason="IDLE", requeue=True))
    told = trace(recorded(FIRST), given_up, granted(1, 2, [0]), opened(1, 0, attempt=1, lease=2))
    assert list(told.sessions) == [NAME, "g1-0-1"]
    assert story(told)[-1] == "+2.000 s  given up: IDLE; the episode is offered again"
    assert story(told, name="g1-0-1")[0] == "episode g1-0-1: task 7 of Sums, attempt 2, by ann"


@pytest.mark.parametrize(
    ("then", "outcome"),
    [
        ([], "accepted, in no batch yet"),
        (["made"], "in batch 4, not trained yet"),
        (["made", "unmade"], "accepted, in no batch yet"),
        (["made", "applied"], "trained in step 4, which made version 1.4"),
        (["made", "applied", "back"], "trained, and taken back when the trainer went back to version 1.3"),
        (["made", "applied", "back", "applied"], "trained in step 4, which made version 1.4"),
        (["dropped"], "not trained: STALE"),
    ],
)
def test_the_last_word_on_a_trajectory_counts(then: list[str], outcome: str) -> None:
    facts = {
        "made": pb.Fact(batch_made=pb.BatchMade(sequence_no=4, groups=[1], trajectory_ids=["g1-0"])),
        "unmade": pb.Fact(batch_unmade=pb.BatchUnmade(sequence_no=4, reason="the settings changed")),
        "applied": pb.Fact(
            batch_applied=pb.BatchApplied(sequence_no=4, policy_version=Version(1, 4).to_proto(), trained=["g1-0"])
        ),
        "back": pb.Fact(epoch_begun=pb.EpochBegun(epoch=2, origin=Version(1, 3).to_proto())),
        "dropped": pb.Fact(group_dropped=pb.GroupDropped(group=1, reason="STALE", trajectories=1)),
    }
    told = trace(recorded(FIRST), submitted(reward=1), ended("g1-0"), *(facts[each] for each in then))
    assert told.outcomes == {"g1-0": outcome}


def test_a_group_that_is_dropped_ends_its_open_episodes() -> None:
    told = trace(pb.Fact(group_dropped=pb.GroupDropped(group=1, reason="REPLACED")))
    assert told.sessions[NAME].end == "GROUP_ENDED"
    assert story(told)[-1] == "+1.000 s  its group was dropped: REPLACED"


def test_facts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LedgerError, match="group 5"):
        trace(opened(5, 0))
