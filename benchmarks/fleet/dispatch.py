"""The orchestrator of a simulated fleet: dispatch, streams, polls, batches, and the trainer behind it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from benchmarks.fleet.fleet import EPOCH, World
from benchmarks.fleet.network import Process, Uplink
from benchmarks.fleet.weights import Weights
from benchmarks.simulated_services import messages_of_stream
from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.journal.ledger import Ledger
from orchestrator_svc.run.scheduler import OnStale, Scheduler, StalenessBound
from sluice.sampling.policy import coalescing_s
from sluice.v1 import journal_pb2
from sluice.versions import BASE, Version


class Orchestrator:
    """Dispatch, streams, polls, batches, and the trainer behind it."""

    def __init__(self, world: World) -> None:
        self._world, self._clock = world, world.clock
        self._costs, self._work = world.costs.orchestrator, world.work
        self.weights = Weights(world, self._serves_now)
        self.process = Process(self._costs.idle, endless=world.endless)
        self.uplink = Uplink(self._clock, world.network.bytes_per_s)
        replicas = world.fleet.replicas
        self.known = [0] * replicas
        """Version of each replica according to the last poll."""
        self._load = [0] * replicas
        self._least = [(0, each) for each in range(replicas)]
        self._behind: list[int] = []
        """Replicas that were skipped because of their version."""
        self._wanted = 0
        self.awaited: int | None = None
        self.polls = 0
        self._poll_serial = [0] * replicas
        self.running: dict[int, tuple[int, float]] = {}
        self.started = self.ended = self.applied = 0
        self._pieces: dict[int, list[tuple[int, float]]] = {}
        self._stale: dict[int, float] = {}
        self._queued: list[int] = []
        self._training = False

    def begin(self, steps: int) -> None:
        """Begin the first epoch, and poll every replica."""
        batch = self._work.batch_of(self._world.fleet)
        self._ledger = Ledger()
        self._scheduler = Scheduler(
            self._ledger,
            StalenessBound(self._work.max_staleness, batch, (self._work.max_staleness + 1) * batch),
            window_fraction=OrchestratorConfig.model_fields["window_fraction"].default,
            on_stale=OnStale.DROP,
            max_steps=steps + self._work.max_staleness + 2,  # the fleet stays full until the last version that counts
            max_running=self._world.fleet.replicas * self._work.groups_per_replica,
        )
        self._note(epoch_begun=journal_pb2.EpochBegun(epoch=EPOCH, origin=BASE.to_proto()))
        self._scheduler.is_open = True
        poll_s = self._world.limits.replicas.poll_s
        self._poll_s = poll_s + 2 * self._world.network.latency_s
        self._clock.on_poll = self._poll
        self._clock.polls.extend(
            (poll_s * replica / self._world.fleet.replicas, replica, 0) for replica in range(self._world.fleet.replicas)
        )
        self._start_what_may()

    def staleness(self, batches: Sequence[int]) -> float:
        """Return by how many versions a token of these batches lags behind, on average."""
        known = [self._stale[each] for each in batches if each in self._stale]
        return abs(round(sum(known) / len(known), 9)) if known else 0.0  # sums of shares are 1e-16 off

    def _note(self, **kind: Any) -> None:  # noqa: ANN401 - one of the kinds of a fact
        self._ledger.apply_fact(self._ledger.last_seq + 1, journal_pb2.Fact(**kind))

    # Polls.

    def _poll(self, replica: int, serial: int) -> None:
        """Take a replica's answer to a status request, and plan the next one."""
        if serial != self._poll_serial[replica]:
            return  # it answered earlier, because it served the awaited version
        self.polls += 1
        done = self.process.do(self._clock.now, self._costs.poll_s)
        version = self.weights.version_of(replica)
        if version != self.known[replica]:
            self.known[replica] = version
            heapq.heappush(self._least, (self._load[replica], replica))
            self._clock.at(done, self._start_what_may)
        self._poll_serial[replica] = serial + 1
        self._clock.polls.append((done + self._poll_s, replica, serial + 1))

    def _serves_now(self, replica: int) -> None:
        """Note that a replica serves another version, and let it answer the request that waits for it."""
        if self.awaited is not None and self.known[replica] < self.awaited:
            self._poll_serial[replica] += 1
            arrives = self._clock.now + self._world.network.latency_s
            self._clock.at(arrives, self._poll, replica, self._poll_serial[replica])

    # Groups.

    def _generation_s(self) -> float:
        """Draw the seconds of a request."""
        return self._work.generation_s * (1 + self._work.spread * self._world.drawing.uniform(-1, 1))

    def _start_what_may(self) -> None:
        awaited = None
        while awaited is None and (wanted := self._scheduler.wanted_version()) is not None:
            replica = self._pick(wanted.number)
            if replica is None:
                awaited = wanted.number
            else:
                self._start(replica)
        if awaited is not None and awaited != self.awaited:
            self._ask_all(awaited)
        self.awaited = awaited

    def _ask_all(self, awaited: int) -> None:
        """Ask all replicas that lack a version at once; each answers when it has it, or after the time between two polls."""
        last = self._clock.polls[-1][0] if self._clock.polls else 0.0
        answers = max(last, self._clock.now + self._poll_s)
        for replica, version in enumerate(self.known):
            if version < awaited:
                self._poll_serial[replica] += 1
                self._clock.polls.append((answers, replica, self._poll_serial[replica]))

    def _pick(self, wanted: int) -> int | None:
        """Return the least loaded replica with this version or a newer one, as `place` would choose; None if there is none."""
        if wanted < self._wanted:
            for each in self._behind:
                heapq.heappush(self._least, (self._load[each], each))
            self._behind.clear()
        self._wanted = wanted
        while self._least:
            load, replica = heapq.heappop(self._least)
            if load != self._load[replica]:
                continue  # there is a newer entry
            if self.known[replica] >= wanted:
                heapq.heappush(self._least, (load, replica))
                return replica
            self._behind.append(replica)
        return None

    def _change_load(self, replica: int, more: int) -> None:
        self._load[replica] += more
        heapq.heappush(self._least, (self._load[replica], replica))

    def _start(self, replica: int) -> None:
        number, version = self._ledger.next_group, Version(EPOCH, self.known[replica])
        self._note(
            task_drawn=journal_pb2.TaskDrawn(group=number, episodes=self._work.group, policy_version=version.to_proto())
        )
        self.started += 1
        self._change_load(replica, 1)
        picking_s = self._costs.picks * self._costs.pick_s.of(self._world.fleet.replicas)
        sent = self.process.do(self._clock.now, picking_s + self._costs.message_s) + self._world.network.latency_s
        self._world.traffic.add("requests", 1, self._costs.request_bytes)
        generation_s = self._generation_s()
        self.running[number] = (replica, sent)
        every_s = coalescing_s(self._world.limits.replicas, len(self.running))
        parts = messages_of_stream(generation_s, self._work.tokens, every_s)
        self._clock.at(sent + self._world.network.latency_s, self._receive, number, 0, 0)
        for part in range(1, parts + 1):
            arrives = sent + generation_s * part / parts + self._world.network.latency_s
            self._clock.at(arrives, self._receive, number, part, parts)

    def _receive(self, number: int, part: int, parts: int) -> None:
        """Take a message of a stream: the opening (part 0), tokens, or the last tokens."""
        tokens = self._work.group * self._work.tokens / parts if parts else 0.0
        self._world.traffic.add("stream messages", 1, self._costs.message_bytes + tokens * self._costs.token_bytes)
        done = self.process.do(self._clock.now, self._costs.message_s)
        if part and part == parts:
            done = self.process.do(self._clock.now, self._costs.trajectory_s * self._work.group)
            self._clock.at(done, self._accept, number, self._clock.now - self._world.network.latency_s)

    def _accept(self, number: int, until: float) -> None:
        replica, since = self.running.pop(number)
        self.ended += 1
        self._change_load(replica, -1)
        pieces = self.weights.served_between(replica, since, until)
        floor = self._ledger.groups[number].floor.number
        self._pieces[number] = pieces
        versions = sorted({max(floor, version) for version, _ in pieces})
        accepted = journal_pb2.GroupAccepted(
            group=number, policy_versions=[Version(EPOCH, each).to_proto() for each in versions]
        )
        self._note(group_accepted=accepted)
        self._make_batches()
        self._start_what_may()

    # Batches.

    def _make_batches(self) -> None:
        for group in self._scheduler.stale_groups():
            self._note(group_dropped=journal_pb2.GroupDropped(group=group.number, reason="STALE"))
        while (groups := self._scheduler.choose_batch()) is not None:
            number = self._ledger.next_batch
            self._note(batch_made=journal_pb2.BatchMade(sequence_no=number, groups=[each.number for each in groups]))
            pieces = [piece for each in groups for piece in self._pieces.pop(each.number)]
            seconds = sum(length for _, length in pieces)
            self._stale[number] = number - 1 - sum(version * length for version, length in pieces) / seconds
            trajectories = len(groups) * self._work.group
            tokens = trajectories * self._work.tokens
            size = trajectories * self._costs.trajectory_bytes + tokens * self._costs.trained_token_bytes
            self._world.traffic.add("batches", 2, size)
            self.uplink.send(size, self._at_trainer, number)

    def _at_trainer(self, number: int) -> None:
        self._note(batch_sent=journal_pb2.BatchSent(sequence_no=number, epoch=EPOCH))
        self._queued.append(number)
        self._train_next()

    def _train_next(self) -> None:
        if self._queued and not self._training:
            self._training = True
            number = self._queued.pop(0)
            encode_s = self.weights.encode_s
            self._clock.at(self._clock.now + self._work.train_s + encode_s, self._trained, number)

    def _trained(self, number: int) -> None:
        self._training = False
        self.weights.push(number)
        self._clock.at(self._clock.now + self._world.network.latency_s, self._apply, number)
        self._train_next()

    def _apply(self, number: int) -> None:
        self._note(batch_applied=journal_pb2.BatchApplied(sequence_no=number))
        self.applied = number
        self._make_batches()
        self._start_what_may()
