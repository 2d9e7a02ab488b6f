"""Equal requests of one session through two gateways: who loses a connection, who retries, who dies, and which reply each client gets."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from run_facts import drawn
from session_facts import digest, generation

from orchestrator_svc.config import ExternalConfig
from orchestrator_svc.journal.store import Journal, JournalLimits
from orchestrator_svc.sessions.claims import Claimed, Claims, Earlier, Recorded, RequestState, repeated
from orchestrator_svc.sessions.lending import Lending
from sluice.v1 import episode_pb2, session_pb2

LIMITS = ExternalConfig(lease_s=1e6, idle_s=1e6, group_s=1e6)
GATEWAYS = ["east", "west"]
CLAIM_S = 30

earlier = st.lists(
    st.builds(
        Earlier,
        name=st.uuids().map(str),
        state=st.sampled_from(RequestState),
        read=st.booleans(),
        retry=st.integers(0, 3),
        doubt=st.integers(0, 2),
    ),
    max_size=6,
)


@given(earlier)
def test_an_unmarked_request_repeats_only_what_nobody_reads(known):
    found = repeated(known, is_retry=False, retry=0)
    assert found is None or (not found.read and found.state is not RequestState.LOST)
    assert (found is None) == all(each.read or each.state is RequestState.LOST for each in known)


@given(earlier, st.integers(1, 4))
def test_a_retry_joins_what_is_read_only_if_no_retry_with_its_number_has(known, retry):
    found = repeated(known, is_retry=True, retry=retry)
    if found is not None and found.state is RequestState.SAMPLED and found.read:
        assert found.retry < retry
        assert all(each.state is not RequestState.LOST and each.read for each in known), "nothing better is there"


@given(earlier)
def test_a_request_with_a_name_is_what_was_sent_before_under_it(known):
    found = repeated(known, is_retry=True, retry=0)
    assert (found is None) == all(each.state is RequestState.LOST for each in known)


@dataclass(eq=False)
class Client:
    """One that asks until it has a reply."""

    marks: bool
    sent: int = 0
    name: str = ""
    gateway: str = ""
    reply: str = ""


class EqualRequests(RuleBasedStateMachine):
    """Gateways see when a client leaves. Time passes as the test says."""

    @initialize()
    def begin(self):
        self.home = tempfile.TemporaryDirectory()
        self.loop = asyncio.Runner()
        self.now, self.names, self.tokens = 0.0, itertools.count(), itertools.count(1000)
        self.clients: list[Client] = []
        self.running: dict[tuple[str, str], set[Client]] = {}  # clients that wait, by gateway and request
        self.waiting: dict[Client, str] = {}  # at another gateway than that which samples
        self.restarted = False

        async def start():
            self.journal = Journal(Path(self.home.name), {"run": "r"}, limits=JournalLimits(fsync_interval_s=0.0))
            self.journal.record_fact(drawn(1))
            self.start()
            (lease,) = self.lending.lease("ann", episode_pb2.LeaseTasksRequest(request_id="l", max_tasks=1), 0.0)
            opening = episode_pb2.OpenEpisodeRequest(lease_id=lease.lease_id, request_id="o")
            self.session = self.lending.open("ann", opening, 0.0)

        self.loop.run(start())

    def start(self):
        self.lending = Lending(self.journal, LIMITS, self.now)
        self.claims = Claims(self.journal, self.lending, LIMITS)
        self.lending.offer(1)

    def teardown(self):
        if hasattr(self, "loop"):
            self.loop.run(self.journal.close())
            self.loop.close()
            self.home.cleanup()

    def call(self, client, name="", joined="", **more):
        async def calling():
            request = session_pb2.BeginGenerationRequest(
                episode_id=self.session.name,
                request_id=name or client.name,
                gateway=client.gateway,
                body_digest=digest([1]),
                is_retry=client.marks and client.sent > 1,
                retry=client.sent - 1 if client.marks else 0,
                **more,
            )
            request.claim.seconds = CLAIM_S
            return self.claims.begin_generation("ann", request, self.now, joined=joined)

        return self.loop.run(calling())

    def say(self, gateway, name, *, unread):
        speaker = Client(marks=False, gateway=gateway)
        self.call(speaker, name, held=True, unread=unread)

    # Clients.

    @rule(marks=st.booleans(), gateway=st.sampled_from(GATEWAYS))
    def a_client_asks(self, marks, gateway):
        if len(self.clients) < 12:
            self.clients.append(client := Client(marks))
            self.send(client, gateway)

    @precondition(lambda self: any(not each.name and not each.reply for each in self.clients))
    @rule(choice=st.integers(0, 11), gateway=st.sampled_from(GATEWAYS))
    def a_client_asks_again(self, choice, gateway):
        lost = [each for each in self.clients if not each.name and not each.reply]
        self.send(lost[choice % len(lost)], gateway)

    def send(self, client, gateway):
        client.sent += 1
        client.name, client.gateway = f"r{next(self.names)}", gateway
        self.follow(client, self.call(client))

    def follow(self, client, answer):
        """React to an answer as a gateway does."""
        self.waiting.pop(client, None)
        if isinstance(answer, Claimed):
            self.running[client.gateway, client.name] = {client}
        elif isinstance(answer, Recorded):
            self.read(client, answer.request.request_id)
        elif (client.gateway, answer.request_id) in self.running:
            assert answer.gateway == client.gateway
            readers = self.running[client.gateway, answer.request_id]
            readers.add(client)
            if len(readers) == 1:
                self.say(client.gateway, answer.request_id, unread=False)
        else:
            self.waiting[client] = answer.request_id

    def read(self, client, reply):
        client.reply, client.name = reply, ""
        with_it = [each for each in self.clients if each.reply == reply]
        if not self.restarted or all(each.sent == 1 for each in with_it):
            assert len(with_it) == 1, "as many samples as clients that asked"

    @precondition(lambda self: any(each.name for each in self.clients))
    @rule(choice=st.integers(0, 11))
    def a_connection_breaks(self, choice):
        there = [each for each in self.clients if each.name]
        self.leave(there[choice % len(there)])

    def leave(self, client):
        name, client.name = client.name, ""
        for (gateway, request), readers in self.running.items():
            if client in readers:
                readers.discard(client)
                if not readers:
                    self.say(gateway, request, unread=True)
        if client in self.waiting:
            self.call(client, name, joined=self.waiting.pop(client), unread=True)

    # Gateways and the orchestrator.

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 11), leaves=st.booleans())
    def a_request_is_recorded(self, choice, leaves):
        (gateway, name), readers = pick(self.running, choice)

        async def record():
            made = generation(name, [1], [next(self.tokens)])
            made.body_digest = digest([1])
            request = session_pb2.RecordGenerationRequest(
                episode_id=self.session.name, gateway=gateway, generation=made, undelivered=not readers
            )
            self.claims.record_generation("ann", request, self.now)

        self.loop.run(record())
        del self.running[gateway, name]
        if leaves and len(readers) == 1:
            # Before it has read the reply.
            (client,) = readers
            client.name = ""
            self.say(gateway, name, unread=True)
        else:
            for each in readers:
                self.read(each, name)
        self.ask_again(name)

    def ask_again(self, name):
        """Gateways that wait for a request hear that it has ended."""
        for client, request in list(self.waiting.items()):
            if request == name:
                self.follow(client, self.call(client, joined=name))

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 11))
    def a_request_fails(self, choice):
        (gateway, name), readers = pick(self.running, choice)
        del self.running[gateway, name]
        for client in readers:
            client.name = ""
        released = session_pb2.ReleaseGenerationRequest(episode_id=self.session.name, request_id=name, gateway=gateway)
        self.claims.release("ann", released, self.now)
        self.ask_again(name)

    @rule(gateway=st.sampled_from(GATEWAYS))
    def a_gateway_dies(self, gateway):
        held = [name for at, name in self.running if at == gateway]
        for name in held:
            for client in self.running.pop((gateway, name)):
                client.name = ""
        for client in [each for each in self.waiting if each.gateway == gateway]:
            del self.waiting[client]
            client.name = ""
        self.claims.end_all_of(gateway, self.now)
        for name in held:
            self.ask_again(name)

    @rule()
    def the_orchestrator_restarts(self):
        self.restarted = True
        self.start()
        for (gateway, name), readers in self.running.items():
            self.say(gateway, name, unread=not readers)
        for client, name in list(self.waiting.items()):
            self.follow(client, self.call(client, joined=name))

    @rule(seconds=st.sampled_from([1.0, CLAIM_S - 1.0]))
    def time_passes(self, seconds):
        self.now += seconds
        for (gateway, name), readers in self.running.items():
            self.say(gateway, name, unread=not readers)
        for client, name in list(self.waiting.items()):
            self.follow(client, self.call(client, joined=name))
        self.claims.expire(self.now)

    @rule()
    def what_was_read_is_trained_and_nothing_else(self):
        trained = {name.rpartition("/")[0] for name in self.session.leaves()}
        assert trained == {each.reply for each in self.clients} - {""}


def pick(things, choice):
    return list(things.items())[choice % len(things)]


TestEqualRequests = EqualRequests.TestCase
TestEqualRequests.settings = settings(deadline=None, max_examples=40, stateful_step_count=40)
