"""External episodes with the real journal whose process dies at any write: what an agent was told stays true."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import grpc
import pytest
from crashing_disk import CrashedError, CrashingDisk, Inline
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from run_facts import drawn, dropped
from session_facts import digest, generation

from orchestrator_svc.config import ExternalConfig
from orchestrator_svc.journal import snapshot, store
from orchestrator_svc.journal.external import Session, Target
from orchestrator_svc.journal.facts import Stage
from orchestrator_svc.journal.ledger import folded
from orchestrator_svc.journal.records import encode
from orchestrator_svc.journal.segments import JournalError
from orchestrator_svc.journal.snapshot import Snapshots
from orchestrator_svc.journal.store import Journal, JournalLimits, read_facts
from orchestrator_svc.sessions.claims import Claimed, Claims, Recorded, Running
from orchestrator_svc.sessions.lending import Lending
from orchestrator_svc.sessions.trajectories import build
from sluice.rpc import SluiceError
from sluice.v1 import episode_pb2, session_pb2
from sluice.v1 import journal_pb2 as pb

EPISODES = 2
LIMITS = ExternalConfig(
    lease_s=50, idle_s=30, attempts=2, most_sessions=6, most_leased=5, most_generations=6, most_requests=2
)
PRINCIPALS = ["ann", "bob"]
GATEWAYS = ["east", "west"]
MEMORY = Path("/dev/shm")


class CrashingSessions(RuleBasedStateMachine):
    """Agents of two principals call through two gateways; the process that answers dies again and again.

    The answers are kept here, and each call is repeated after each start.
    """

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed):
        self.chance = random.Random(seed)
        self.home = tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)
        self.directory = Path(self.home.name)
        self.loop = asyncio.Runner()
        self.now = 0.0
        self.names, self.tokens = itertools.count(1), itertools.count(1000)
        self.leased: dict[tuple[str, str], list[str]] = {}  # lease ids by principal and request
        self.opened: dict[tuple[str, str, str], str] = {}  # session by principal, lease and request
        self.recorded: dict[tuple[str, str], tuple[session_pb2.RecordGenerationRequest, list[str], str]] = {}
        self.rewards: dict[tuple[str, Target], set[float]] = {}  # the last answered, and those asked for since
        self.submitted: dict[str, tuple[str, episode_pb2.SubmitTrajectoryRequest, tuple[str, ...]]] = {}
        self.abandoned: dict[str, str] = {}
        self.whole: dict[str, list[int]] = {}  # token ids of each sample that was ever sent
        self.replies: dict[str, list[int]] = {}  # the sampled ones of them
        self.claimed: dict[tuple[str, str, str], session_pb2.BeginGenerationRequest] = {}
        self.disk = CrashingDisk(None, after=False, chance=self.chance)
        self.start()

    # The process.

    def start(self):
        while True:
            try:
                with patch.object(store, "SerialThread", Inline), patch.object(snapshot, "_VALUES_PER_FACT", 1 << 30):
                    limits = JournalLimits(fsync_interval_s=0.0, segment_bytes=400)
                    snapshots = Snapshots((), (), least_facts=self.chance.choice((1, 5, 30)))
                    self.journal = Journal(
                        self.directory, {"run": "r"}, limits=limits, snapshots=snapshots, disk=self.disk
                    )
            except CrashedError:
                self.disk.lose()
                self.disk = CrashingDisk(None, after=False, chance=self.chance)
            else:
                break
        self.ledger = self.journal.ledger
        assert self.ledger == folded(read_facts(self.directory))
        self.lending = Lending(self.journal, LIMITS, self.now)
        self.claims = Claims(self.journal, self.lending, LIMITS)
        for group in self.ledger.groups.values():
            if group.stage is Stage.RUNNING:
                self.lending.offer(group.number)
        self.claimed.clear()
        self.run(self.ask_again)

    def run(self, work):
        """Do some work of the process, which may die meanwhile. A dead process gives no answer."""

        async def within():
            work()

        try:
            self.loop.run(within())
        except JournalError:
            assert self.disk.dead
            self.killed(None, after=False)

    def answered(self, call):
        """Return the answer that a caller gets once the journal is durable; None if the process died before."""

        async def within():
            answer = call()
            await self.journal.durable()
            return answer

        try:
            return self.loop.run(within())
        except JournalError:
            assert self.disk.dead
            self.killed(None, after=False)
            return None

    def killed(self, calls, *, after):
        async def leave():
            if self.journal._flushing is not None:
                self.journal._flushing.cancel()
                await asyncio.wait({self.journal._flushing})
            self.journal._connection.close()

        self.loop.run(leave())
        self.disk.lose()
        self.disk = CrashingDisk(calls, after=after, chance=self.chance)
        self.start()

    @precondition(lambda self: self.chance.random() < 0.5)
    @rule(calls=st.integers(1, 24), after=st.booleans())
    def the_next_process_dies_at_a_write(self, calls, after):
        self.killed(calls, after=after)

    @precondition(lambda self: self.chance.random() < 0.3)
    @rule()
    def the_process_is_killed(self):
        self.killed(None, after=False)

    # A repeated call gets the same answer and changes nothing.

    def ask_again(self):
        facts = self.ledger.last_seq
        live = {
            name: each
            for group in self.ledger.groups.values()
            if group.external
            for name, each in group.external.leases.items()
        }
        for (principal, request_id), names in self.leased.items():
            left = [each for each in names if each in live]
            if left:
                request = episode_pb2.LeaseTasksRequest(request_id=request_id, max_tasks=2)
                assert [each.lease_id for each in self.lending.lease(principal, request, self.now)] == left
        for (principal, lease_id, request_id), name in self.opened.items():
            session = self.lending.find(name)
            assert session is not None, "an episode was opened and nobody knows"
            if isinstance(session, Session) and lease_id in live:
                request = episode_pb2.OpenEpisodeRequest(lease_id=lease_id, request_id=request_id)
                assert self.lending.open(principal, request, self.now) is session
        for principal, request, names in self.submitted.values():
            assert self.lending.submit(principal, request, self.now) == names
        for name, principal in self.abandoned.items():
            self.lending.abandon(principal, episode_pb2.AbandonEpisodeRequest(episode_id=name))
        self.ask_for_what_was_recorded()
        assert self.ledger.last_seq == facts, "a repeated call changed something"

    def ask_for_what_was_recorded(self):
        for (name, target), values in self.rewards.items():
            session = self.lending.find(name)
            assert session is not None
            if isinstance(session, Session):
                assert session.rewards[target] in values
        for (name, _), (request, ids, parent) in self.recorded.items():
            session = self.lending.find(name)
            if isinstance(session, Session):
                assert set(ids) <= session.samples.keys(), "a generation was recorded and nobody knows"
                if session.submission is None:
                    answer = self.claims.record_generation(session.principal, copied(request), self.now)
                    assert answer == (ids, parent)
                    other = copied(request)
                    other.generation.response.samples[0].token_ids[0] += 1
                    with pytest.raises(SluiceError) as refused:
                        self.claims.record_generation(session.principal, other, self.now)
                    assert refused.value.code is grpc.StatusCode.ALREADY_EXISTS

    # Groups.

    @rule()
    def a_group_is_drawn(self):
        def draw():
            if sum(each.stage is Stage.RUNNING for each in self.ledger.groups.values()) < 3:
                number = self.ledger.next_group
                self.journal.record_fact(drawn(number))
                self.lending.offer(number)

        self.run(draw)

    @precondition(lambda self: self.complete())
    @rule()
    def a_complete_group_ends(self):
        number = self.complete()[0]
        group = self.ledger.groups[number]
        sessions = [each for each in group.external.sessions if each.submission is not None]

        async def end():
            records = []
            for session in sessions:
                places = [each.place for each in session.requests.values()]
                made = await self.journal.read(places, session_pb2.RecordedGeneration)
                records.append((session, build(session, made, session.rewards, "task").records))
            everyone = [record for _, each in records for record in each]
            kept = self.journal.keep_trajectories(number, encode(everyone))
            placed = iter(kept.trajectories)
            episodes = [
                pb.EndedEpisode(episode=session.episode, trajectories=itertools.islice(placed, len(own)))
                for session, own in records
            ]
            ended = pb.EpisodesEnded(group=number, episodes=episodes, beginnings=kept.beginnings)
            self.journal.record_fact(pb.Fact(episodes_ended=ended))
            kind = {"group_accepted": pb.GroupAccepted(group=number)} if everyone else None
            self.journal.record_fact(pb.Fact(**kind) if kind else dropped(number, "EPISODE_FAILED"))
            self.lending.withdraw(number)

        try:
            self.loop.run(end())
        except JournalError:
            assert self.disk.dead
            self.killed(None, after=False)

    def complete(self):
        groups = self.ledger.groups.values()
        return [
            each.number for each in groups if each.stage is Stage.RUNNING and each.external and each.external.complete
        ]

    @precondition(lambda self: self.chance.random() < 0.1)
    @rule(choice=st.integers(0, 100))
    def a_group_fails(self, choice):
        running = [each.number for each in self.ledger.groups.values() if each.stage is Stage.RUNNING]
        if running:
            self.run(lambda: self.journal.record_fact(dropped(running[choice % len(running)], "EPISODE_DEADLINE")))

    # Agents.

    @rule(principal=st.sampled_from(PRINCIPALS), tasks=st.integers(1, 2), episodes=st.integers(0, 2))
    def tasks_are_leased(self, principal, tasks, episodes):
        name = f"lease-{next(self.names)}"
        request = episode_pb2.LeaseTasksRequest(request_id=name, max_tasks=tasks, max_episodes=episodes)
        answer = self.attempt(lambda: [each.lease_id for each in self.lending.lease(principal, request, self.now)])
        if answer:
            self.leased[principal, name] = answer

    @precondition(lambda self: self.leased)
    @rule(choice=st.integers(0, 100), other=st.booleans())
    def a_lease_is_renewed(self, choice, other):
        (principal, _), names = pick(self.leased, choice)
        self.attempt(lambda: self.lending.renew(other_than(principal) if other else principal, names[0], self.now))

    @precondition(lambda self: self.leased)
    @rule(choice=st.integers(0, 100))
    def an_episode_is_opened(self, choice):
        (principal, _), names = pick(self.leased, choice)
        lease_id, name = names[choice % len(names)], f"open-{next(self.names)}"
        request = episode_pb2.OpenEpisodeRequest(lease_id=lease_id, request_id=name)
        session = self.attempt(lambda: self.lending.open(principal, request, self.now).name)
        if session:
            self.opened[principal, lease_id, name] = session

    @rule(
        principal=st.sampled_from(PRINCIPALS), turns=st.integers(0, 3), choice=st.integers(0, 100), ends=st.booleans()
    )
    def an_agent_plays(self, principal, turns, choice, ends):
        """Begin an episode and sample some turns, as most agents do most of the time."""
        self.a_group_is_drawn()
        self.tasks_are_leased(principal, 1, 1)
        if self.leased:
            self.an_episode_is_opened(-1)
        for _ in range(turns):
            self.a_request_begins(choice, "east", fresh=False, retry=False)
            if self.claimed:
                self.a_generation_is_recorded(-1, 1 + choice % 2, 2)
        if self.opened and ends:
            self.an_episode_is_submitted(-1, named=choice % 3 == 0, follows=False, reward=None)

    @rule(choice=st.integers(0, 100), gateway=st.sampled_from(GATEWAYS), fresh=st.booleans(), retry=st.booleans())
    def a_request_begins(self, choice, gateway, fresh, retry):
        session = self.live_session(choice)
        if session is None:
            return
        known = [each for each in session.samples.values() if each.generation_id in self.whole]
        parent = None if fresh or not known else known[choice % len(known)]
        request = session_pb2.BeginGenerationRequest(
            episode_id=session.name,
            request_id=f"{session.name}/{next(self.names)}",
            gateway=gateway,
            body_digest=digest([choice % 3, 0 if parent is None else parent.tokens]),
            is_retry=retry,
            prefix_keys=[digest([7]), *([parent.key] if parent else [])],
        )
        request.claim.seconds = 20
        answer = self.attempt(lambda: self.claims.begin_generation(session.principal, request, self.now))
        if isinstance(answer, Claimed):
            assert (answer.parent.key if answer.parent else None) == (parent.key if parent else None)
            self.claimed[session.name, request.request_id, gateway] = request
        elif isinstance(answer, Recorded):
            assert retry
            assert answer.request.body_digest == request.body_digest
        elif isinstance(answer, Running):
            assert any(name == session.name and each == answer.request_id for name, each, _ in self.claimed)

    @precondition(lambda self: self.claimed)
    @rule(choice=st.integers(0, 100), samples=st.integers(1, 2), tokens=st.integers(1, 3))
    def a_generation_is_recorded(self, choice, samples, tokens):
        (name, request_id, gateway), begun = pick(self.claimed, choice)
        session = self.lending.find(name)
        keys = {} if not isinstance(session, Session) else {each.key: each for each in session.samples.values()}
        parent = next((keys[each] for each in begun.prefix_keys if each in keys), None)
        prompt = [*(self.whole[parent.generation_id] if parent else []), next(self.tokens)]
        replies = [[next(self.tokens) for _ in range(tokens)] for _ in range(samples)]
        made = generation(request_id, prompt, *replies)
        made.body_digest = begun.body_digest
        for index, reply in enumerate(replies):
            self.whole[f"{request_id}/{index}"] = [*prompt, *reply]
            self.replies[f"{request_id}/{index}"] = reply
        request = session_pb2.RecordGenerationRequest(episode_id=name, gateway=gateway, generation=made)
        principal = self.owner(name)
        answer = self.attempt(lambda: self.claims.record_generation(principal, copied(request), self.now))
        self.claimed.pop((name, request_id, gateway), None)
        if answer:
            ids, parent_id = answer
            assert parent_id == (parent.generation_id if parent else ""), "unique tokens have one parent"
            self.recorded[name, request_id] = (request, ids, parent_id)

    @precondition(lambda self: self.claimed)
    @rule(choice=st.integers(0, 100))
    def a_claim_is_released(self, choice):
        (name, request_id, gateway), _ = pick(self.claimed, choice)
        request = session_pb2.ReleaseGenerationRequest(episode_id=name, request_id=request_id, gateway=gateway)
        self.attempt(lambda: self.claims.release(self.owner(name), request, self.now))
        self.claimed.pop((name, request_id, gateway), None)

    @precondition(lambda self: self.opened)
    @rule(
        choice=st.integers(0, 100),
        reward=st.sampled_from([0.0, 0.5, 1.0]),
        kind=st.sampled_from(["", "turn", "branch"]),
    )
    def a_reward_is_recorded(self, choice, reward, kind):
        name = pick(self.opened, choice)[1]
        request = episode_pb2.RecordRewardRequest(episode_id=name, reward=reward)
        session = self.lending.find(name)
        if kind and isinstance(session, Session) and session.samples:
            sample = pick(session.samples, choice)[0]
            if kind == "turn":
                request.generation_id = sample
            else:
                request.branch = sample
        place = name, Target(request.generation_id, request.branch)
        self.reward_may_change(place, reward)
        if self.attempt(lambda: [self.lending.reward(self.owner(name), request, self.now)]):
            self.rewards[place] = {reward}

    @precondition(lambda self: self.opened)
    @rule(choice=st.integers(0, 100), named=st.booleans(), follows=st.booleans(), reward=st.sampled_from([None, 1.0]))
    def an_episode_is_submitted(self, choice, named, follows, reward):
        name = pick(self.opened, choice)[1]
        request = episode_pb2.SubmitTrajectoryRequest(episode_id=name, reward=reward, reward_follows=follows)
        session = self.lending.find(name)
        if named and isinstance(session, Session) and session.samples:
            request.branches.add(generation_ids=session.path(pick(session.samples, choice)[0]))
        before = self.submitted.get(name)
        repeated = not isinstance(session, Session) or session.submission is not None
        if reward is not None and not repeated:
            self.reward_may_change((name, Target()), reward)
        answer = self.attempt(lambda: self.lending.submit(self.owner(name), request, self.now))
        if answer:
            assert before is None or before[2] == answer
            self.submitted.setdefault(name, (self.owner(name), request, answer))
            if reward is not None and not repeated:
                self.rewards[name, Target()] = {reward}

    @precondition(lambda self: self.opened)
    @rule(choice=st.integers(0, 100), requeue=st.booleans())
    def an_episode_is_abandoned(self, choice, requeue):
        name = pick(self.opened, choice)[1]
        request = episode_pb2.AbandonEpisodeRequest(episode_id=name, reason="tired", requeue=requeue)
        if self.attempt(lambda: [self.lending.abandon(self.owner(name), request)]):
            self.abandoned[name] = self.owner(name)

    @precondition(lambda self: self.opened)
    @rule(choice=st.integers(0, 100))
    def another_principal_gets_nothing(self, choice):
        name = pick(self.opened, choice)[1]
        stranger = other_than(self.owner(name))
        request = session_pb2.BeginGenerationRequest(
            episode_id=name, request_id="x", gateway="g", body_digest=digest([1])
        )
        request.claim.seconds = 1
        for call in (
            lambda: self.claims.begin_generation(stranger, request, self.now),
            lambda: self.lending.submit(stranger, episode_pb2.SubmitTrajectoryRequest(episode_id=name), self.now),
            lambda: self.lending.reward(stranger, episode_pb2.RecordRewardRequest(episode_id=name), self.now),
            lambda: self.lending.abandon(stranger, episode_pb2.AbandonEpisodeRequest(episode_id=name)),
        ):
            with pytest.raises(SluiceError) as refused:
                call()
            assert refused.value.code is grpc.StatusCode.NOT_FOUND

    @rule(seconds=st.sampled_from([1.0, 10.0, 25.0, 60.0]))
    def time_passes(self, seconds):
        self.now += seconds

        def expire():
            self.lending.expire(self.now)
            self.claims.expire(self.now)
            assert self.lending.next_deadline() > self.now

        self.run(expire)
        self.claimed = {place: each for place, each in self.claimed.items() if seconds < 20}

    # Helpers.

    def attempt(self, call):
        """Return the answer that a caller gets; None if there is none, or if it is an error that may come at any time."""
        facts = self.ledger.last_seq
        try:
            return self.answered(call)
        except SluiceError as error:
            assert error.code.name in {"NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}  # noqa: PT017
            assert self.ledger.last_seq == facts, "a call that was refused changed something"
            return None

    def reward_may_change(self, place, reward):
        """Note that a caller sends a reward: a process that dies may have written it without having answered."""
        if place in self.rewards:
            self.rewards[place].add(reward)

    def owner(self, name):
        return next(principal for (principal, _, _), each in self.opened.items() if each == name)

    def live_session(self, choice):
        found = [self.lending.find(each) for each in self.opened.values()]
        live = [each for each in found if isinstance(each, Session) and each.submission is None]
        return live[choice % len(live)] if live else None

    def teardown(self):
        self.answered(lambda: None)  # everything is on disk, or the process died once more and another has started
        self.check_the_end()
        try:
            self.loop.run(self.journal.close())
        except JournalError:  # it died while it closed
            assert self.disk.dead
        self.loop.close()
        self.home.cleanup()

    def check_the_end(self):
        """Look at the facts alone, as an audit does."""
        facts = [fact for _, fact in read_facts(self.directory)]
        given_up = [fact.episode_given_up for fact in facts if fact.HasField("episode_given_up")]
        submitted = {
            (each.group, each.episode): each
            for each in (fact.episode_submitted for fact in facts if fact.HasField("episode_submitted"))
        }
        ends = Counter((each.group, each.episode) for each in given_up if not each.requeue)
        ends.update(
            (fact.episode_submitted.group, fact.episode_submitted.episode)
            for fact in facts
            if fact.HasField("episode_submitted")
        )
        assert set(ends.values()) <= {1}, "an episode ended twice"
        assert set(Counter(f.lease_ended.lease_id for f in facts if f.HasField("lease_ended")).values()) <= {1}
        self.check_leases(facts)
        for number in (fact.group_accepted.group for fact in facts if fact.HasField("group_accepted")):
            assert all(ends[number, episode] == 1 for episode in range(EPISODES))
            sampled = [
                fact.session_generation_recorded for fact in facts if fact.HasField("session_generation_recorded")
            ]
            self.check_trained(number, [each for each in sampled if each.group == number], submitted)

    def check_leases(self, facts):
        """An episode belongs to one lease at a time, and comes back from it once."""
        held = {}
        for fact in facts:
            kind = fact.WhichOneof("kind")
            each = getattr(fact, kind)
            if kind == "lease_granted":
                places = {(each.group, episode) for episode in each.episodes}
                assert not places & held.keys(), "lent twice"
                held |= dict.fromkeys(places, each.lease_id)
            elif kind == "episode_opened":
                assert held[each.group, each.episode] == each.lease_id
            elif kind == "episode_given_up":
                assert held.pop((each.group, each.episode))
                if not each.requeue:
                    held[each.group, each.episode] = "over"
            elif kind == "episode_submitted":
                held[each.group, each.episode] = "over"
            elif kind == "lease_ended":
                held = {place: lease for place, lease in held.items() if lease != each.lease_id}

    def check_trained(self, number, sampled, submitted):
        """Each token of a submitted session is trained once, but for the branches that its agent left out."""
        self.journal._in_memory.pop(number, None)  # so that it is read from the disk
        shared = self.loop.run(self.journal.trajectories(self.ledger.groups[number]))
        records = [each.whole() for each in shared]
        trained = Counter(token for record in records for token in trained_ids(record))
        assert set(trained.values()) <= {1}, "a token is trained twice"
        expected = set()
        for each in sampled:
            fact = submitted.get((number, each.episode))
            if fact is None or fact.attempt != each.attempt:
                continue
            named = {name for branch in fact.branches for name in branch.generation_ids}
            for name in (f"{each.request_id}/{index}" for index in range(len(each.samples))):
                if not named or name in named:
                    expected.update(self.replies[name])
        assert expected == trained.keys()


def trained_ids(record):
    ids, position = [], 0
    for index, length in enumerate(record.trajectory.mask_runs):
        if index % 2:
            ids += record.trajectory.token_ids[position : position + length]
        position += length
    return ids


def pick(mapping, choice):
    return list(mapping.items())[choice % len(mapping)]


def other_than(principal):
    return next(each for each in PRINCIPALS if each != principal)


def copied(request):
    copy = type(request)()
    copy.CopyFrom(request)
    return copy


CrashingSessions.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestCrashingSessions = pytest.mark.slow(CrashingSessions.TestCase)
