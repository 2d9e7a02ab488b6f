"""What a lease, a session and a claim may do: retries, forks, bounds and times, each in a small run with the real journal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import grpc
import pytest
from run_facts import drawn, dropped
from session_facts import digest, generation

from orchestrator_svc.config import ExternalConfig
from orchestrator_svc.journal.external import Session
from orchestrator_svc.journal.store import Journal, JournalLimits
from orchestrator_svc.sessions import claims
from orchestrator_svc.sessions.claims import LOST_S, Claimed, Claims, Recorded, Running
from orchestrator_svc.sessions.desk import Desk, Waiting
from orchestrator_svc.sessions.lending import Lending
from sluice.rpc import SluiceError
from sluice.v1 import common_pb2, episode_pb2, session_pb2, tokens_pb2

LIMITS = ExternalConfig(
    lease_s=50,
    idle_s=30,
    attempts=2,
    most_sessions=3,
    most_leased=3,
    most_generations=3,
    most_requests=2,
    session_mb=1,
    branches_mb=1,
    most_branches=6,
)


class Run:
    """A run with two groups of two episodes on offer, and a clock that stands still."""

    def __init__(self, journal: Journal) -> None:
        self.journal, self.now = journal, 0.0
        self.lending = Lending(journal, LIMITS, self.now)
        self.claims = Claims(journal, self.lending, LIMITS)
        for number in (1, 2):
            journal.record_fact(drawn(number))
            self.lending.offer(number)

    def lease(self, request: str = "r", principal: str = "ann", tasks: int = 1, episodes: int = 0) -> list[str]:
        message = episode_pb2.LeaseTasksRequest(request_id=request, max_tasks=tasks, max_episodes=episodes)
        return [each.lease_id for each in self.lending.lease(principal, message, self.now)]

    def open(self, lease: str, request: str = "o", principal: str = "ann") -> Session:
        message = episode_pb2.OpenEpisodeRequest(lease_id=lease, request_id=request)
        return self.lending.open(principal, message, self.now)

    def begin(
        self, name: str, body: int = 1, *, gateway: str = "east", retry: int = 0, joined: str = "", **more: object
    ) -> Claimed | Recorded | Running:
        message = session_pb2.BeginGenerationRequest(
            episode_id="g1-0-0",
            request_id=name,
            gateway=gateway,
            body_digest=digest([body]),
            **{"is_retry": retry > 0, "retry": retry} | more,
        )
        message.claim.seconds = 20
        return self.claims.begin_generation("ann", message, self.now, joined=joined)

    def record(
        self,
        name: str,
        prompt: Sequence[int],
        *replies: Sequence[int],
        body: int = 1,
        undelivered: bool = False,
        **more: str,
    ) -> tuple[list[str], str]:
        made = generation(name, prompt, *replies, **more)
        made.body_digest = digest([body])
        message = session_pb2.RecordGenerationRequest(
            episode_id="g1-0-0", gateway="east", generation=made, undelivered=undelivered
        )
        return self.claims.record_generation("ann", message, self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.lending.expire(self.now)
        self.claims.expire(self.now)


def released(name: str, gateway: str) -> session_pb2.ReleaseGenerationRequest:
    return session_pb2.ReleaseGenerationRequest(episode_id="g1-0-0", request_id=name, gateway=gateway)


@pytest.fixture
async def run(tmp_path) -> AsyncIterator[Run]:
    journal = Journal(tmp_path, {"run": "r"}, limits=JournalLimits(fsync_interval_s=0.0))
    yield Run(journal)
    await journal.close()


@pytest.fixture
async def session(run: Run) -> Session:
    return run.open(run.lease()[0])


# Claims.


async def test_equal_requests_in_flight_are_as_many_samples_and_a_marked_one_joins(run, session):
    assert run.begin("a") == Claimed(None, 0)
    assert run.begin("b", gateway="west") == Claimed(None, 0)
    assert run.begin("a2", gateway="west", retry=1) == Running("a", 20.0, "east"), (
        "at its own gateway it would have shown"
    )
    assert run.begin("a2", gateway="west", retry=1) == Running("a", 20.0, "east"), "the same call again"
    run.record("a", [1], [2])
    assert run.begin("a2", gateway="west", joined="a").request.request_id == "a"


async def test_a_request_with_an_idempotency_key_is_one_however_often_it_is_sent(run, session):
    assert isinstance(run.begin("a", is_retry=True), Claimed)
    for name in ("b", "c"):
        assert run.begin(name, is_retry=True) == Running("a", 20.0, "east")
    run.record("a", [1], [2])
    assert [run.begin(name, is_retry=True).request.request_id for name in ("d", "e")] == ["a", "a"]


async def test_a_request_without_a_reader_is_for_the_next_one_marked_or_not_and_for_one(run, session):
    run.begin("a")
    run.begin("a", held=True, unread=True)
    assert run.begin("b", gateway="west") == Running("a", 20.0, "east")
    assert isinstance(run.begin("c", gateway="west"), Claimed), "b reads it"
    run.begin("b", gateway="west", joined="a", unread=True)
    run.claims.release("ann", released("c", "west"), 0)
    assert run.begin("d") == Running("a", 20.0, "east"), "the client of b has left, too"


async def test_requests_that_are_lost_together_and_retried_together_stay_as_many(run, session):
    run.begin("a")
    run.begin("b")
    run.claims.end_all_of("east", run.now)
    assert isinstance(run.begin("a1", gateway="west", retry=1), Claimed)
    assert isinstance(run.begin("b1", gateway="west", retry=1), Claimed)


async def test_the_retry_of_a_request_whose_reply_an_unmarked_one_was_given_is_another_sample(run, session):
    run.begin("a")
    run.begin("a", held=True, unread=True)
    assert isinstance(run.begin("b", gateway="west"), Running)
    assert isinstance(run.begin("a1", gateway="west", retry=1), Claimed)


async def test_what_waits_at_a_gateway_that_was_killed_reads_nothing(run, session):
    run.begin("a")
    run.begin("a", held=True, unread=True)
    assert isinstance(run.begin("b", gateway="west"), Running)
    run.claims.end_all_of("west", run.now)
    assert run.begin("c", gateway="north") == Running("a", 20.0, "east")


async def test_of_requests_in_flight_a_retry_is_that_of_one_whose_gateway_has_left(run, session):
    run.begin("a")
    run.begin("b", gateway="north")
    run.claims.away.add("east")
    assert run.begin("a1", gateway="west", retry=1) == Running("a", 20.0, "east")
    run.claims.end_all_of("east", run.now)
    assert isinstance(run.begin("a1", gateway="west", joined="a", retry=1), Claimed)


async def test_a_claim_that_a_restarted_orchestrator_has_lost_is_made_again(run, session):
    run.begin("a")
    run.claims = Claims(run.journal, run.lending, LIMITS)
    run.begin("a", held=True, unread=True)
    assert run.begin("b", gateway="west") == Running("a", 20.0, "east")


async def test_a_request_that_was_released_or_whose_claim_ended_is_taken_over(run, session):
    run.begin("a")
    assert run.begin("b", gateway="west", retry=1) == Running("a", 20.0, "east")
    run.claims.release("ann", released("a", "west"), 0)
    assert isinstance(run.begin("b", gateway="west", retry=1), Running), "only its own gateway releases a claim"
    run.claims.release("ann", released("a", "east"), 0)
    assert isinstance(run.begin("b", gateway="west", joined="a", retry=1), Claimed)
    run.wait(20)
    assert isinstance(run.begin("a", joined="b", retry=2), Claimed), "the gateway of b is gone"


async def test_a_reply_whose_client_left_before_it_had_read_it_is_for_the_next_request(run, session):
    run.begin("a")
    run.record("a", [1], [2])
    assert session.leaves() == ["a/0"]
    run.begin("a", held=True, unread=True)
    assert session.leaves() == [], "the client left while its reply was sent"
    assert run.begin("b").request.request_id == "a"
    run.begin("b", held=True, unread=True)
    assert session.leaves() == [], "and so did the next one"
    run.begin("b", held=True)
    assert session.leaves() == ["a/0"]
    run.begin("a", held=True, unread=True)
    assert session.leaves() == ["a/0"], "the client of b has it"


async def test_a_reply_that_one_of_two_clients_has_read_is_trained(run, session):
    run.begin("a")
    assert isinstance(run.begin("b", gateway="west", retry=1), Running)
    run.record("a", [1], [2])
    assert run.begin("b", gateway="west", joined="a", retry=1).request.request_id == "a"
    run.begin("b", gateway="west", held=True, unread=True)
    assert session.leaves() == ["a/0"]
    run.begin("a", held=True, unread=True)
    assert session.leaves() == []


async def test_a_request_by_name_that_asks_for_its_own_reply_counts_by_itself(run, session):
    run.begin("a", is_retry=True)
    run.record("a", [1], [2])
    assert run.begin("a", gateway="west", is_retry=True).request.request_id == "a"
    run.begin("a", gateway="west", held=True, unread=True)
    assert session.leaves() == ["a/0"], "it may have been read before"


async def test_a_reply_that_nobody_was_given_is_given_to_the_next_request_with_the_same_body(run, session):
    run.begin("a")
    run.record("a", [1], [2], undelivered=True)
    assert session.leaves() == []
    assert run.begin("b").request.request_id == "a"
    assert session.leaves() == ["a/0"], "it is somebody's now"
    assert isinstance(run.begin("c"), Claimed), "once"


async def test_a_reply_that_nobody_was_given_belongs_to_no_branch_unless_something_continues_it(run, session):
    run.begin("a")
    run.record("a", [1], [2])
    run.begin("b", body=2)
    run.record("b", [1, 2, 3], [4], body=2, parent="a/0", undelivered=True)
    assert session.branches() == [("a/0",)], "what it continues is a leaf"
    run.record("c", [1, 2, 3, 4, 5], [6], body=3, parent="b/0")
    assert session.branches() == [("a/0", "b/0", "c/0")]


async def test_an_episode_of_which_nothing_was_delivered_is_not_submitted(run, session):
    run.record("a", [1], [2], undelivered=True)
    submit = episode_pb2.SubmitTrajectoryRequest(episode_id=session.name)
    with pytest.raises(SluiceError, match="nothing of it was delivered"):
        run.lending.submit("ann", submit, 0.0)
    assert run.begin("a").request.request_id == "a"
    assert run.lending.submit("ann", submit, 0.0) == ("g1-0",)


async def test_the_claims_of_a_gateway_that_was_killed_end(run, session):
    run.begin("a")
    run.begin("b", body=2, gateway="west")
    assert run.claims.end_all_of("east", run.now) == ["g1-0-0"]
    assert isinstance(run.begin("c", gateway="west", retry=1), Claimed)
    assert run.begin("d", body=2, retry=1) == Running("b", 20.0, "west"), "that of another gateway holds"
    assert run.claims.end_all_of("east", run.now) == []


async def test_a_gateway_that_repeats_its_call_prolongs_its_claim(run, session):
    run.begin("a")
    run.wait(15)
    assert isinstance(run.begin("a"), Claimed)
    run.wait(15)
    assert run.begin("a", gateway="west") == Running("a", 35.0, "east")


async def test_only_a_marked_retry_gets_the_recorded_reply_to_the_same_body(run, session):
    run.begin("a")
    run.record("a", [1], [2])
    run.begin("b")
    run.record("b", [1], [3])
    assert isinstance(run.begin("c"), Claimed), "without a mark it is another sample"
    run.claims.release("ann", released("c", "east"), 0)
    assert run.begin("d", is_retry=True).request.request_id == "b", "the newest one"
    assert run.begin("a").request.request_id == "a", "the same name is the same request"
    assert isinstance(run.begin("e", body=2, retry=1), Claimed), "nothing was recorded for this body"
    with pytest.raises(SluiceError, match="another body"):
        run.begin("a", body=2)


async def test_a_retry_gets_a_reply_that_was_recorded_after_its_claim_was_lost(run, session):
    run.begin("a")
    run.claims.end_all_of("east", run.now)
    run.record("a", [1], [2])
    assert run.begin("a1", gateway="west", retry=1).request.request_id == "a"


async def test_all_repetitions_get_the_reply_and_so_many_are_noted(run, session, monkeypatch):
    monkeypatch.setattr(claims, "MOST_GIVEN", 3)
    run.begin("a")
    run.record("a", [1], [2])
    for number in range(6):
        assert run.begin(f"r{number}", retry=1).request.request_id == "a"
    assert len(run.lending.find("g1-0-0").given) == 3
    run.begin("r5", held=True, unread=True)
    assert isinstance(run.begin("s", retry=2), Recorded), (
        "what the client of r5 left is no request that is being sampled"
    )


async def test_of_the_requests_that_ended_without_a_reply_the_last_ones_are_remembered(run, session, monkeypatch):
    monkeypatch.setattr(claims, "MOST_LOST", 2)
    for name in "abcd":
        run.begin(name)
        run.claims.release("ann", released(name, "east"), 0)
    run.begin("e", body=2)
    assert list(run.claims._requests["g1-0-0"].lost) == ["c", "d"]
    run.now += LOST_S
    run.begin("f", body=2)
    assert list(run.claims._requests["g1-0-0"].lost) == ["e"], "its claim ended"


async def test_the_longest_known_prefix_wins_by_keys_and_by_token_ids(run, session):
    run.begin("a")
    run.record("a", [1, 2], [3])
    run.begin("b")
    assert run.record("b", [1, 2, 3, 4], [5, 6]) == (["b/0"], "a/0")
    keys = [digest([9]), digest([1, 2, 3, 4, 5, 6]), digest([1, 2, 3])]
    found = run.begin("c", prefix_keys=keys)
    assert (found.parent.generation_id, found.prefix) == ("b/0", 1)
    by_ids = tokens_pb2.TokenIds(ids=[1, 2, 3, 4, 7])
    assert run.begin("c", token_ids=by_ids).parent.generation_id == "a/0"
    assert run.begin("c", token_ids=tokens_pb2.TokenIds(ids=[1, 2])).parent is None


async def test_of_samples_with_the_same_tokens_the_parent_is_the_one_that_the_gateway_names_else_the_newest(
    run, session
):
    run.begin("a")
    run.record("a", [1], [2], [2])
    run.begin("b")
    assert run.record("b", [1, 2, 3], [4], parent="a/0")[1] == "a/0"
    run.begin("c", body=3)
    assert run.record("c", [1, 2, 5], [4], body=3, parent="nonsense")[1] == "a/1"


async def test_a_request_for_more_samples_than_a_session_may_have_is_refused_before_they_are_sampled(run, session):
    with pytest.raises(SluiceError, match=r"most_branches") as full:
        run.begin("a", samples=7)
    assert (full.value.reason, full.value.code.name) == ("SESSION_FULL", "FAILED_PRECONDITION")
    run.begin("a", samples=3)
    run.begin("b", 2, samples=3)
    run.record("a", [1], [2], [3], [4])
    with pytest.raises(SluiceError, match=r"has 6 samples, and 1 more"):
        run.begin("c", 3)


async def test_rewards_beyond_the_bound_are_refused_and_counted_as_their_senders(run, session):
    run.begin("a")
    run.record("a", [1], [2])
    for value in (float("nan"), float("inf"), 1e6 + 1, -1e39):
        for call in (
            lambda value=value: run.lending.reward(
                "ann", episode_pb2.RecordRewardRequest(episode_id="g1-0-0", reward=value), 0.0
            ),
            lambda value=value: run.lending.submit(
                "ann", episode_pb2.SubmitTrajectoryRequest(episode_id="g1-0-0", reward=value), 0.0
            ),
        ):
            with pytest.raises(SluiceError, match=r"max_reward") as refused:
                call()
            assert (refused.value.reason, refused.value.code.name) == ("REWARD_TOO_LARGE", "INVALID_ARGUMENT")
    assert [(each.principal, each.count) for each in run.lending.refusals.describe()] == [("ann", 8)]
    assert session.submission is None
    assert not session.rewards


async def test_submitted_episodes_leave_room_for_others_and_none_is_lent_that_cannot_be_opened(run):
    limits = LIMITS.model_copy(update={"most_sessions": 1})
    lending = Lending(run.journal, limits, 0.0)
    lending.offer(1)
    lease = lambda name: lending.lease(  # noqa: E731
        "ann", episode_pb2.LeaseTasksRequest(request_id=name, max_tasks=1, max_episodes=1), 0.0
    )
    (first,) = lease("one")
    lending.open("ann", episode_pb2.OpenEpisodeRequest(lease_id=first.lease_id, request_id="o"), 0.0)
    with pytest.raises(SluiceError, match="most_sessions"):
        lease("two")
    assert len(run.journal.ledger.groups[1].external.leases) == 1
    run.record("a", [1], [2])
    lending.submit("ann", episode_pb2.SubmitTrajectoryRequest(episode_id="g1-0-0", reward=1.0), 0.0)
    assert len(lease("two")) == 1


async def test_bounds_of_a_session_are_errors_that_say_what_to_do(run, session):
    run.begin("a", 1)
    run.begin("b", 2)
    with pytest.raises(SluiceError, match="most_requests") as refused:
        run.begin("c", 3)
    assert refused.value.retry_after_s == 1.0
    run.record("a", [1], [2])
    run.record("b", [1], [3], body=2)
    run.record("x", [1], [4], body=9)  # without a claim: the process that gave it may have died
    with pytest.raises(SluiceError, match=r"most_generations.*submit it") as full:
        run.begin("c", 3)
    assert full.value.retry_after_s is None, "waiting does not help"
    assert full.value.code.name == "FAILED_PRECONDITION"
    for name in ("d", "e"):
        run.record(name, [1], [5], body=4)
    with pytest.raises(SluiceError, match="recorded in session"):
        run.record("f", [1], [6], body=5)


async def test_a_session_of_great_size_samples_no_more(run, session):
    for name, body in (("a", 1), ("b", 2)):
        run.begin(name, body)
    for name, body in (("a", 1), ("b", 2)):
        run.record(name, range(1, 100_000), [body], body=body)
    with pytest.raises(SluiceError, match="session_mb"):
        run.begin("d", 4)
    with pytest.raises(SluiceError, match=r"under way may add to the .*session_mb"):
        run.record("c", range(1, 100_000), [3], body=3)


async def test_what_a_session_has_no_room_for_is_refused_before_it_is_sampled_where_that_is_known(run, session):
    with pytest.raises(SluiceError, match="session_mb") as full:
        run.begin("a", least_bytes=(1 << 20) + 1)
    assert (full.value.code.name, full.value.reason) == ("FAILED_PRECONDITION", "SESSION_FULL")
    run.begin("a", least_bytes=1 << 19)
    with pytest.raises(SluiceError, match="session_mb"):
        run.begin("b", 2, least_bytes=(1 << 19) + 1)
    run.begin("b", 2, least_bytes=1 << 19)


PROMPT = range(1, 50_001)
"""Token ids of 200 kB as a branch counts them: five branches are a MiB, and are recorded once."""


@pytest.fixture
def roomy(run: Run) -> Run:
    """A run in which branches are what fills a session first."""
    run.claims = Claims(run.journal, run.lending, LIMITS.model_copy(update={"session_mb": 16, "most_branches": 100}))
    return run


async def test_a_request_counts_what_its_branches_will_take_of_a_batch(roomy, session):
    roomy.begin("a", samples=3)
    roomy.record("a", PROMPT, [1], [2], [3])
    assert session.branch_tokens == 150_003
    assert session.payload_bytes < 1 << 19, "there is room for the recording of another"
    # Each sample of a request that continues one has the whole prompt: with the two that are left that would be six.
    ids = {"token_ids": tokens_pb2.TokenIds(ids=[*PROMPT, 1])}
    with pytest.raises(SluiceError, match=r"branches_mb\. Ask for fewer samples") as full:
        roomy.begin("b", 2, samples=4, **ids)
    assert (full.value.code.name, full.value.reason) == ("FAILED_PRECONDITION", "SESSION_FULL")
    roomy.begin("b", 2, samples=3, **ids)
    with pytest.raises(SluiceError, match="branches_mb"):  # requests in progress count
        roomy.begin("c", 3, samples=2, token_ids=tokens_pb2.TokenIds(ids=[*PROMPT, 2]))


async def test_a_conversation_is_one_branch_however_many_turns_it_has(roomy, session):
    ids = [*PROMPT]
    for turn in range(3):
        roomy.begin(f"t{turn}", turn, token_ids=tokens_pb2.TokenIds(ids=ids))
        roomy.record(f"t{turn}", ids, [7], body=turn)
        ids = [*ids, 7, 8]
        assert session.branch_tokens == len(ids) - 1


async def test_branches_beyond_what_requests_under_way_may_add_are_not_recorded(roomy, session):
    for name, body in (("a", 1), ("b", 2)):
        roomy.begin(name, body, samples=3)  # nobody knows yet how long their prompts are
    for name, body in (("a", 1), ("b", 2)):
        roomy.record(name, [body, *PROMPT[1:]], [1], [2], [3], body=body)
    with pytest.raises(SluiceError, match="branches_mb"):
        roomy.begin("c", 3)
    with pytest.raises(SluiceError, match=r"under way may add to the 1 of .*branches_mb"):
        roomy.record("c", PROMPT, *([[each] for each in range(5)]), body=3)


async def test_a_submission_does_not_name_more_branches_than_a_batch_has_room_for(roomy, session):
    ids = [*range(1, 100_001)]
    for turn in range(3):
        roomy.begin(f"t{turn}", turn, token_ids=tokens_pb2.TokenIds(ids=ids))
        roomy.record(f"t{turn}", ids, [7], body=turn)
        ids = [*ids, 7]
    path = ["t0/0", "t1/0", "t2/0"]
    named = [episode_pb2.Branch(generation_ids=path[: end + 1]) for end in range(3)]
    with pytest.raises(SluiceError, match=r"branches_mb\. Name fewer") as refused:
        roomy.lending.submit("ann", episode_pb2.SubmitTrajectoryRequest(episode_id="g1-0-0", branches=named), 0.0)
    assert refused.value.code.name == "INVALID_ARGUMENT"
    request = episode_pb2.SubmitTrajectoryRequest(episode_id="g1-0-0", branches=named[:2])
    assert roomy.lending.submit("ann", request, 0.0) == ("g1-0.0", "g1-0.1")


async def test_a_recording_that_no_session_has_room_for_is_refused(run, session):
    run.begin("a")
    with pytest.raises(SluiceError, match=r"the recording of request 'a' .*session_mb") as full:
        run.record("a", range(1, 300_000), [2])
    assert (full.value.code.name, full.value.reason) == ("FAILED_PRECONDITION", "SESSION_FULL")
    run.record("a", [1], [2])


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("generation.request_id", {"request_id": "x" * 129}),
        ("generation.body_digest", {"body_digest": b"short"}),
        ("generation.keys", {"keys": []}),
        ("generation.temperature", {"temperature": 0.0}),
        ("generation.temperature", {"temperature": float("nan")}),
        ("generation.response", {"response": None}),
    ],
)
async def test_what_could_not_be_trained_or_found_again_is_not_recorded(run, session, field, change):
    made = generation("a", [1], [2, 3])
    for name, value in change.items():
        made.ClearField(name)
        if value is not None:
            made.MergeFrom(session_pb2.RecordedGeneration(**{name: value}))
    request = session_pb2.RecordGenerationRequest(episode_id=session.name, gateway="east", generation=made)
    with pytest.raises(SluiceError) as refused:
        run.claims.record_generation("ann", request, 0)
    assert list(refused.value.violations) == [field]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("logprobs", [-0.1]),
        ("logprobs", [-0.1, float("nan")]),
        ("version_spans", []),
        ("version_spans", [1]),
        ("version_spans", [0, 2]),
    ],
)
async def test_a_token_without_a_log_probability_or_a_version_is_not_recorded(run, session, field, values):
    made = generation("a", [1], [2, 3])
    sample = made.response.samples[0]
    sample.ClearField(field)
    getattr(sample, field).extend(
        tokens_pb2.VersionSpan(start=each) if field == "version_spans" else each for each in values
    )
    request = session_pb2.RecordGenerationRequest(episode_id=session.name, gateway="east", generation=made)
    with pytest.raises(SluiceError) as refused:
        run.claims.record_generation("ann", request, 0)
    assert list(refused.value.violations) == [f"generation.response.samples[0].{field}"]


# Leases and sessions.


async def test_groups_are_lent_in_their_order_and_no_more_than_a_principal_may_have(run):
    assert run.lease("one", tasks=2) == ["g1-lease-1", "g2-lease-1"], "two episodes of the first, and one"
    assert [each.episodes for each in run.journal.ledger.groups[2].external.leases.values()] == [{0}]
    with pytest.raises(SluiceError, match="most_leased"):
        run.lease("two")
    assert run.lease("one", "bob", tasks=9) == ["g2-lease-2"]
    assert run.lease("two", "bob") == [], "nothing is on offer"


async def test_an_episode_whose_lease_ends_is_on_offer_again_until_it_was_opened_too_often(run):
    run.lending.withdraw(2)
    first = run.open(run.lease("one")[0])
    for _ in range(4):
        run.wait(20)
        run.lending.renew("ann", "g1-lease-1", run.now)
    assert run.lending.find(first.name) is first, "a renewal renews the idle time too"
    run.wait(50)
    assert run.journal.ledger.ended_sessions[first.name].reason in ("IDLE", "LEASE_ENDED")
    with pytest.raises(SluiceError, match="LeaseTasks"):
        run.lending.renew("ann", "g1-lease-1", run.now)
    again = run.open(run.lease("two", "bob")[0], principal="bob")
    assert (first.name, again.name) == ("g1-0-0", "g1-0-1")
    run.wait(60)
    slots = run.journal.ledger.groups[1].external.slots
    assert [(each.over, each.lease_id) for each in slots] == [(True, ""), (False, "")]


async def test_a_session_is_not_idle_while_a_request_of_it_is_under_way(run, session):
    message = session_pb2.BeginGenerationRequest(
        episode_id=session.name, request_id="a", gateway="east", body_digest=digest([1])
    )
    message.claim.seconds = 45
    run.claims.begin_generation("ann", message, run.now)
    run.wait(40)
    assert run.lending.find(session.name) is session
    run.wait(5)
    assert run.lending.find(session.name) is not session


async def test_an_ended_session_is_told_apart_from_an_unknown_one(run, session):
    run.lending.abandon("ann", episode_pb2.AbandonEpisodeRequest(episode_id=session.name))
    with pytest.raises(SluiceError) as ended:
        run.begin("a")
    assert (ended.value.reason, ended.value.metadata) == ("SESSION_ENDED", {"ended": "ABANDONED"})
    for name in ("g1-0-9", "g9-0-0", "g1-0", "nonsense", "", "g1-0-00", f"g{'9' * 5000}-0-0"):
        with pytest.raises(SluiceError) as unknown:
            run.lending.open_session("ann", name)
        assert unknown.value.code.name == "NOT_FOUND"


async def test_a_submission_must_name_whole_paths_of_its_own_tree(run, session):
    submit = lambda *branches, **more: run.lending.submit(  # noqa: E731
        "ann",
        episode_pb2.SubmitTrajectoryRequest(
            episode_id=session.name, branches=[episode_pb2.Branch(generation_ids=each) for each in branches], **more
        ),
        0.0,
    )
    with pytest.raises(SluiceError, match="abandon it instead"):
        submit()
    run.begin("a")
    run.record("a", [1], [2])
    run.begin("b")
    run.record("b", [1, 2, 3], [4], [5])
    for branches, problem in [
        ([["b/0"]], "all generations from the root"),
        ([["a/0", "b/0"], ["a/0", "b/0"]], "twice"),
        ([["c/0"]], "no generation 'c/0'"),
        ([[]], "all generations"),
    ]:
        with pytest.raises(SluiceError, match=problem):
            submit(*branches)
    with pytest.raises(SluiceError, match="finite"):
        submit(reward=float("inf"))
    assert submit(["a/0", "b/1"]) == ("g1-0",)
    assert submit(["a/0", "b/1"]) == ("g1-0",)
    with pytest.raises(SluiceError, match="submitted before"):
        submit()
    run.journal.record_fact(dropped(1, "EPISODE_DEADLINE"))
    assert submit(["a/0", "b/1"]) == ("g1-0",), "also when its group has ended"
    with pytest.raises(SluiceError, match="submitted before"):
        submit(["a/0", "b/1"], reward=1.0)


async def test_what_was_sampled_at_no_temperature_is_recorded_only_if_it_is_not_trained(run, session):
    run.begin("a")
    for temperature in (0.0, 1e-6, float("nan"), 101.0):
        with pytest.raises(SluiceError, match=r"need one from 0\.01 to 100"):
            run.record("a", [1], [2], temperature=temperature)
    assert run.record("a", [1], [2], temperature=1e-6, not_trained="TEMPERATURE")[0] == ["a/0"]
    run.begin("b", body=2)
    assert run.record("b", [1], [3], body=2, temperature=0.01)[0] == ["b/0"], "a little less, as float32"


async def test_who_samples_at_most_settles_no_session_that_has_two_keys(run, session):
    run.begin("a")
    run.record("a", [1], [2])
    sampler, nobody = common_pb2.CREDENTIAL_SESSION_KEY, common_pb2.CREDENTIAL_NONE
    give, submit, abandon = (
        episode_pb2.RecordRewardRequest(episode_id=session.name, reward=1),
        episode_pb2.SubmitTrajectoryRequest(episode_id=session.name, reward=1),
        episode_pb2.AbandonEpisodeRequest(episode_id=session.name),
    )
    for by in (sampler, nobody):
        for call in (
            lambda: run.lending.reward("ann", give, 0.0, by),  # noqa: B023 - called at once
            lambda: run.lending.submit("ann", submit, 0.0, by),  # noqa: B023
            lambda: run.lending.abandon("ann", abandon, by),  # noqa: B023
            lambda: run.lending.settling("ann", session.name, by),  # noqa: B023
        ):
            with pytest.raises(SluiceError) as refused:
                call()
            assert (refused.value.code, refused.value.reason) == (
                grpc.StatusCode.PERMISSION_DENIED,
                "SETTLING_KEY_REQUIRED",
            )
    assert (session.rewards, session.submission) == ({}, None)
    settler = common_pb2.CREDENTIAL_SETTLING_KEY
    first = run.lending.submit("ann", submit, 0.0, settler)
    assert run.lending.submit("ann", submit, 0.0, common_pb2.CREDENTIAL_PRINCIPAL) == first, "whoever repeats it"
    run.journal.record_fact(dropped(1, "EPISODE_DEADLINE"))
    assert run.lending.submit("ann", submit, 0.0, settler) == first
    with pytest.raises(SluiceError, match="the session key only samples"):
        run.lending.submit("ann", submit, 0.0, sampler)


async def test_a_reward_counts_until_all_episodes_of_the_group_have_ended(run, session):
    run.begin("a")
    run.record("a", [1], [2])
    other = run.open("g1-lease-1", "o2")
    give = lambda reward: run.lending.reward(  # noqa: E731
        "ann", episode_pb2.RecordRewardRequest(episode_id=session.name, reward=reward), run.now
    )
    run.lending.submit("ann", episode_pb2.SubmitTrajectoryRequest(episode_id=session.name), 0.0)
    give(0.5)
    run.lending.abandon("ann", episode_pb2.AbandonEpisodeRequest(episode_id=other.name))
    give(0.5)  # a repeated call
    with pytest.raises(SluiceError, match="reward_follows"):
        give(1.0)


# Memory.


async def test_what_was_sampled_in_a_session_leaves_the_memory_when_the_session_ends(run, session):
    desk = Desk(run.journal, LIMITS, Waiting(), b"", posed=lambda _group: None)
    other = run.open("g1-lease-1", "o2")
    for each in (session, other):
        desk.remember(each, generation("a", [1], [2]))
    both = desk.cached_bytes
    desk.expire(run.now)
    assert desk.cached_bytes == both > 0, "both may be continued"
    run.lending.abandon("ann", episode_pb2.AbandonEpisodeRequest(episode_id=other.name))
    desk.expire(run.now)
    assert desk.cached_bytes == both / 2
    run.journal.record_fact(dropped(1, "EPISODE_DEADLINE"))
    desk.expire(run.now)
    assert desk.cached_bytes == 0
