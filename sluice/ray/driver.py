"""The driver of a run on Ray: it reserves a place for each part, starts the parts, and restarts a part that died or lost a peer.

Ray restarts an actor that died, on another node if its own is gone. Its process then has another address, so the parts that call it
are restarted with that address. If the process stays on its node, it keeps its port, and no other part is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sluice.certificates import AUTHORITIES, PRINCIPALS
from sluice.config import ConfigError, PeersConfig
from sluice.plan.plan import Plan
from sluice.plan.ray import FIXED_PORTS, PEERS, Bundle, Seat, seat, unplaced
from sluice.ray.part_actor import POLL_S, Address, Order, PartActor
from sluice.supervise.log_records import LogLine
from sluice.supervise.restart_policy import GiveUp, after_exit
from sluice.supervise.supervisor import STOP_MARGIN_S, ChildState, Ending, Listener, Outcome

SPREAD = "SPREAD"
"""Ray's strategy for the bundles: on as many nodes as there are, so that one lost node takes as few parts as possible."""

_PAUSE_S = 0.5
"""Seconds between two looks at something that Ray does not announce."""

_KILLED = -9
"""Exit code of the process of a dead actor, for the restart policy: its watchdog killed it."""

_ANSWER_S = 30.0
"""Seconds that a living actor may take for a call that does not wait for anything."""

_HICCUP_S = 5.0
"""Seconds within which an actor that could not be reached must answer, or it counts as dead."""


@dataclass(frozen=True)
class Running:
    """What the driver knows of a run before it starts.

    Attributes:
        plan: What to start.
        settings: File of settings for every process, with secrets.
        dispatcher_token: See `Order`.
        certificates: Folder of certificates that was made for this run; None if the settings name certificates or disable them.
        probe: See `PartActor.reserve`; for actors that keep state.
        directory: Working directory of the driver, which the actors enter.
        logs: Directory of the logs.
        pin: Address of the node for all parts that keep state; empty for any node.
        place_s: Seconds until Ray must have placed an actor, at the start and after a node was lost.
    """

    plan: Plan
    settings: str
    dispatcher_token: str
    certificates: Path | None
    probe: tuple[str, str]
    directory: str
    logs: Path
    place_s: float
    pin: str = ""


@dataclass
class Held:
    """An actor, and where it is."""

    seat: Seat
    actor: Any
    address: Address | None = None
    seen: int = 0


@dataclass
class Instance:
    """The actors of one instance: one, or one for each node that it spans. They start and end together."""

    held: list[Held] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the instance."""
        return self.held[0].seat.instance

    @property
    def part(self) -> str:
        """Name of its part."""
        return self.held[0].seat.part.name


class CannotPlaceError(Exception):
    """Ray did not place an actor in time; the message names what it needs and what the cluster has."""


class RayRun:
    """Runs a plan on the cluster that this process is connected to.

    Args:
        running: The run.
        listener: Receives the lines and states of the processes.
        on_peers: Called with the addresses of the services when they are known, and when one has changed.
    """

    def __init__(self, running: Running, listener: Listener, on_peers: Callable[[PeersConfig], None]) -> None:
        self._running, self._listener, self._on_peers = running, listener, on_peers
        self._bundles, self._seats = seat(running.plan, running.pin)
        self._group: Any = None
        self._instances: dict[str, Instance] = {}
        self._addresses: dict[str, str] = {}
        self._moved = asyncio.Condition()

    async def run(self, stop: asyncio.Event) -> Outcome:
        """Place and start all parts, and keep them running until the end of one decides the outcome, or `stop` is set. Then end all.

        Raises:
            ConfigError: if a node cannot run its part.
        """
        try:
            stopped = asyncio.create_task(stop.wait())
            placing = asyncio.create_task(self._place())
            await asyncio.wait({stopped, placing}, return_when=asyncio.FIRST_COMPLETED)
            if not placing.done():
                placing.cancel()
                return Outcome(Ending.STOPPED)
            try:
                placing.result()
            except CannotPlaceError as error:
                return Outcome(Ending.FAILED, "placement", str(error))
            return await self._keep_all(stopped)
        finally:
            stopped.cancel()
            await self._end()

    def kill(self) -> None:
        """Kill all actors; `run` then returns, and their watchdogs end the processes."""
        for instance in self._instances.values():
            for held in instance.held:
                ray.kill(held.actor)

    async def _place(self) -> None:
        """Reserve the bundles and create the actors.

        Raises:
            CannotPlaceError: at the deadline.
        """
        self._group = placement_group(
            [each.resources for each in self._bundles], strategy=SPREAD, name=f"sluice-{self._running.plan.run}"
        )
        until = time.monotonic() + self._running.place_s
        while not await asyncio.to_thread(self._group.wait, _PAUSE_S):
            if time.monotonic() > until:
                raise CannotPlaceError(
                    f"not placed within {self._running.place_s:g} s (--place-deadline): {describe_shortage(self._bundles)}"
                )
        for each in self._seats:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=each.bundle)
            actor = (
                ray.remote(PartActor)
                .options(
                    name=f"{self._running.plan.run}/{each.name}",
                    num_cpus=each.cpus,
                    num_gpus=each.part.devices,
                    scheduling_strategy=strategy,
                    # Our own policy limits restarts, so that it is the same as on one machine. Ray restarts whenever it can.
                    max_restarts=-1,
                    max_task_retries=0,
                )
                .remote(each.name)
            )
            self._instances.setdefault(each.instance, Instance()).held.append(Held(each, actor))

    async def _keep_all(self, stopped: asyncio.Task[bool]) -> Outcome:
        keepers = [asyncio.create_task(self._keep(each), name=each.name) for each in self._instances.values()]
        running: set[asyncio.Task[Any]] = {stopped, *keepers}
        decisive: list[Outcome] = []
        try:
            while not decisive and len(running) > 1 and not stopped.done():
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                decisive = [outcome for keeper in keepers if keeper in done and (outcome := keeper.result())]
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
        failed = [outcome for outcome in decisive if outcome.ending is Ending.FAILED]
        return next(iter([*failed, *decisive]), Outcome(Ending.STOPPED))

    async def _keep(self, instance: Instance) -> Outcome | None:
        """Keep one instance running until its end decides the outcome of the run.

        Returns:
            The outcome; None if it has ended and the run continues without it.
        """
        restarts: list[float] = []
        while True:
            try:
                await asyncio.gather(*(self._locate(each) for each in instance.held))
                peers = await self._start(instance)
                outcome = await self._until_end(instance, peers)
                detail = "starts again: a peer has another address"
            except CannotPlaceError as error:
                return Outcome(Ending.FAILED, instance.name, str(error))
            except RayActorError as error:
                outcome, detail = self._after_loss(instance, error, restarts)
            if outcome is None:
                self._listener.on_state(instance.name, ChildState.RESTARTING, detail)
                await self._stop(instance)
            elif outcome.ending is Ending.FAILED:
                return replace(outcome, child=instance.name, reason=f"{outcome.reason} ({_where(instance)})")
            else:
                return None if outcome.ending is Ending.STOPPED else outcome

    def _after_loss(
        self, instance: Instance, error: RayActorError, restarts: list[float]
    ) -> tuple[Outcome | None, str]:
        """Decide what to do about an instance that lost an actor: return how the run ends, or None and the message about the restart."""
        if any(each.address is None for each in instance.held):
            reason = f"its actor cannot start (is sluice installed on every node?): {_last_line(error)}"
            return Outcome(Ending.FAILED, instance.name, reason), ""
        now, most = time.monotonic(), self._running.plan.most_restarts
        decision = after_exit(_KILLED, now, restarts, most, was_ready=True)
        if isinstance(decision, GiveUp):
            reason = f"lost its actor, and {decision.reason or 'is not to be started again'}: {_last_line(error)}"
            return Outcome(Ending.FAILED, instance.name, reason), ""
        restarts.append(now)
        return None, f"lost its actor; restart {decision.attempt} of {most}"

    async def _locate(self, held: Held) -> None:
        """Wait until Ray has started an actor, and find out its node and ports.

        Raises:
            ConfigError: if the node cannot run it.
            CannotPlaceError: at the deadline.
        """
        until = time.monotonic() + self._running.place_s
        before = held.address.ports if held.address else {}
        ports = {name: before.get(name, number) for name, number in held.seat.ports.items()}
        while True:
            left = until - time.monotonic()
            try:
                asked = held.actor.reserve.remote(
                    ports,
                    fixed=held.seat.part.name in FIXED_PORTS,
                    directory=self._running.directory,
                    probe=self._running.probe if held.seat.part.keeps_state else ("", ""),
                    release=version("sluice"),
                )
                address: Address = await asyncio.wait_for(asked, max(left, _PAUSE_S))
            except (ActorUnavailableError, TimeoutError):
                if time.monotonic() > until:
                    shortage = describe_shortage([self._bundles[held.seat.bundle]])
                    raise CannotPlaceError(
                        f"Ray did not start its actor within {self._running.place_s:g} s (--place-deadline): {shortage}"
                    ) from None
                await asyncio.sleep(_PAUSE_S)
                continue
            if not address.running:
                break
            # It was out of reach for a while, so its process has not been stopped yet.
            await self._stop_actor(held)
        if address.problem:
            raise ConfigError(f"{held.seat.name}: {address.problem}")
        held.address, held.seen = address, 0

    async def _start(self, instance: Instance) -> Mapping[str, str]:
        """Start the processes of an instance once the addresses of its peers are known, and return these."""
        first = instance.held[0]
        assert first.address is not None  # noqa: S101 - `_locate` has been awaited
        if "grpc" in first.address.ports:
            await self._publish(instance, f"{first.address.host}:{first.address.ports['grpc']}")
        needed = PEERS.get(instance.part, ())
        async with self._moved:
            await self._moved.wait_for(lambda: all(name in self._addresses for name in needed))
            peers = {name: self._addresses[name] for name in needed}
        flags = [word for name, address in peers.items() for word in (f"--peers.{name}", address)]
        if instance.part == "rollout":
            own = f"{first.address.host}:{first.address.ports['grpc']}"
            flags += ["--rollout.announce", "true", "--rollout.advertise", own]
        rendezvous = ""
        if "rendezvous" in first.address.ports:
            rendezvous = f"{first.address.host}:{first.address.ports['rendezvous']}"
        starts = []
        for held in instance.held:
            assert held.address is not None  # noqa: S101
            order = Order(
                name=held.seat.name,
                part=held.seat.part,
                instance=held.seat.instance,
                rank=held.seat.rank,
                rendezvous=rendezvous,
                flags=tuple(flags),
                settings=self._running.settings,
                dispatcher_token=self._running.dispatcher_token,
                certificates=self._certificates(held.seat.part.service),
                logs=str(self._running.logs),
                most_restarts=self._running.plan.most_restarts,
            )
            asked = held.actor.start.remote(order, held.address.host, held.address.ports)
            starts.append(asyncio.wait_for(asked, _ANSWER_S))
        try:
            await asyncio.gather(*starts)
        except TimeoutError as error:
            raise RayActorError(error_msg=f"{instance.name}: no answer within {_ANSWER_S:g} s") from error
        return peers

    def _certificates(self, service: str) -> Mapping[str, bytes]:
        """Return the files that a service needs from the folder of certificates."""
        folder = self._running.certificates
        names = (AUTHORITIES, PRINCIPALS, f"{service}.pem", f"{service}.key")
        return {name: (folder / name).read_bytes() for name in names} if folder else {}

    async def _publish(self, instance: Instance, address: str) -> None:
        """Make the address of an instance known to the other parts. They learn several instances of a part from announcements."""
        key = instance.part if instance.name == instance.part else instance.name
        if self._addresses.get(key) == address:
            return
        async with self._moved:
            self._addresses[key] = address
            self._moved.notify_all()
        names = PeersConfig.model_fields
        known = {name: each for name, each in self._addresses.items() if name in names and name != "rollout"}
        replicas = [each for name, each in sorted(self._addresses.items()) if name.partition("-")[0] == "rollout"]
        if {"orchestrator", "trainer", "weightsync"} <= set(known):
            self._on_peers(PeersConfig(**known, rollout=replicas))

    async def _until_end(self, instance: Instance, peers: Mapping[str, str]) -> Outcome | None:
        """Pass on events until a process ended.

        Returns:
            The outcome; None if the address of a peer has changed.

        Raises:
            RayActorError: if an actor is gone.
        """
        ends = [asyncio.create_task(self._follow(each)) for each in instance.held]
        moved = asyncio.create_task(self._moves(peers))
        try:
            done, _ = await asyncio.wait({*ends, moved}, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                if end in done:
                    return end.result()
            return None
        finally:
            for task in (*ends, moved):
                task.cancel()
            await asyncio.gather(*ends, moved, return_exceptions=True)

    async def _moves(self, peers: Mapping[str, str]) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: any(self._addresses[name] != at for name, at in peers.items()))

    async def _follow(self, held: Held) -> Outcome:
        """Pass on the events of one actor until its process has ended for good."""
        while True:
            try:
                events = await asyncio.wait_for(held.actor.events.remote(held.seen), POLL_S + _ANSWER_S)
            except (ActorUnavailableError, TimeoutError):
                await self._same_process(held)
                continue
            for number, event in events:
                held.seen = number
                if isinstance(event, Outcome):
                    return event
                if isinstance(event, LogLine):
                    self._listener.on_line(held.seat.name, event)
                else:
                    self._listener.on_state(held.seat.name, *event)

    async def _same_process(self, held: Held) -> None:
        """Check that an actor that did not answer exists and still holds its process.

        Raises:
            RayActorError: if not.
        """
        assert held.address is not None  # noqa: S101
        with contextlib.suppress(ActorUnavailableError, TimeoutError):
            asked = held.actor.reserve.remote(
                {}, fixed=False, directory=self._running.directory, probe=("", ""), release=version("sluice")
            )
            now: Address = await asyncio.wait_for(asked, _HICCUP_S)
            if now.running and now.incarnation == held.address.incarnation:
                return
        raise RayActorError(error_msg=f"the actor of {held.seat.name} on {held.address.host} is gone")

    async def _stop(self, instance: Instance) -> None:
        """Drain and end the processes of an instance. Actors that are gone have no processes."""
        await asyncio.gather(*(self._stop_actor(each) for each in instance.held))

    async def _stop_actor(self, held: Held) -> None:
        with contextlib.suppress(RayActorError, TimeoutError):
            await asyncio.wait_for(held.actor.stop.remote(), held.seat.part.drain_s + STOP_MARGIN_S + _ANSWER_S)

    async def _end(self) -> None:
        """End everything, and give the resources back."""
        await asyncio.gather(*(self._stop(each) for each in self._instances.values()))
        with contextlib.suppress(RayError):
            for instance in self._instances.values():
                for held in instance.held:
                    ray.kill(held.actor)
            if self._group is not None:
                remove_placement_group(self._group)


def describe_shortage(bundles: Sequence[Bundle]) -> str:
    """Return what is too large for the cluster, or not free, and what the cluster has."""
    nodes = {each["NodeManagerAddress"]: each["Resources"] for each in ray.nodes() if each["Alive"]}
    over = unplaced(bundles, list(nodes.values()))
    free = ray.available_resources()
    wanted = "; ".join(f"{each.name} ({_amounts(each.resources)})" for each in over or bundles)
    has = "; ".join(f"{host} {_amounts(resources)}" for host, resources in sorted(nodes.items()))
    verb = "no node is large enough for" if over else "other work holds what is needed for"
    return f"{verb} {wanted}. The cluster has: {has or 'no nodes'}; free of all that: {_amounts(free)}. Add nodes, or use fewer devices"


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(
        f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU") if resources.get(name) or name == "CPU"
    )


def _where(instance: Instance) -> str:
    return ", ".join(
        f"node {each.address.host}, ports {dict(each.address.ports)}" for each in instance.held if each.address
    )


def _last_line(error: Exception) -> str:
    """Return the line of an error of Ray that names the cause."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
