"""The rollout replicas: what each one last said, which of them get work, and generation that survives their failures.

`Replica` is one of them, `ReplicaPool` finds, polls and chooses them, `PolicyEngine` samples through the pool: at any replica
that serves a version that is new enough, and at another one if it fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import grpc
import structlog

from orchestrator_svc.config import ReplicasConfig
from sluice.config import SecurityConfig
from sluice.rpc import SluiceError, connect
from sluice.v1 import orchestrator_pb2, rollout_pb2, rollout_pb2_grpc, tokens_pb2
from sluice.versions import BASE, Version, append_spans

log = structlog.get_logger(__name__)

_Answer = TypeVar("_Answer")

_FIRST_COOLDOWN_S = 0.2
_LONGEST_COOLDOWN_S = 10.0
"""Seconds without work after a failed request, doubled with each further failure: a replica may answer polls and still fail."""

_READY = {rollout_pb2.REPLICA_STATE_SERVING, rollout_pb2.REPLICA_STATE_PAUSED}
"""A paused replica takes work too: a pause is short (an update) or an operator's wish, and requests queue there."""

_ELSEWHERE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""Failures that another replica, or the same one later, may not repeat."""

_INTERRUPTED = {
    tokens_pb2.FINISH_REASON_ABORT,
    tokens_pb2.FINISH_REASON_ERROR,
    tokens_pb2.FINISH_REASON_VERSION_RETIRED,
}
"""Ends that are not the policy's: the sample is continued from its tokens."""

_CONTINUATIONS = 8
"""How often one sample is continued before its group fails."""

_BUSY_RETRY_S = 0.5

_DNS = "dns:///"
_UNIX = "unix:"
_LOOKUP_S = 5.0
"""Seconds that the resolver may take for one name."""


class Replica:
    """One rollout replica: its channel, its last status, and whether it gets work."""

    def __init__(self, target: str, security: SecurityConfig, evict_after: int) -> None:
        self.target = target
        self.status = rollout_pb2.GetStatusResponse()
        self.model = rollout_pb2.GetModelResponse()
        self.version: Version = BASE
        self.in_flight = 0
        self.calls: set[asyncio.Future[Any]] = set()
        self.seen = False
        self._channel = connect(target, security)
        self.rollout = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self.admin = rollout_pb2_grpc.RolloutAdminServiceStub(self._channel)
        self._evict_after = evict_after
        self._failed_polls = 0
        self._failed_work = 0
        self._rest_until = 0.0
        self._last_error = "has not answered yet"

    @property
    def name(self) -> str:
        """Its own name; its address until it answered once."""
        return self.status.replica or self.target

    @property
    def evicted(self) -> bool:
        """Whether it failed too many polls in a row to get work."""
        return self._failed_polls >= self._evict_after

    def cancel_calls(self) -> None:
        """Cancel the calls under way; their callers make them at another replica."""
        for call in self.calls:
            call.cancel()

    async def poll(self, deadline_s: float) -> None:
        """Ask for its status; remember a failure rather than raise it."""
        try:
            if not self.model.model:
                self.model = await self.rollout.GetModel(rollout_pb2.GetModelRequest(), timeout=deadline_s)
            status = await self.admin.GetStatus(rollout_pb2.GetStatusRequest(), timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            self._failed_polls += 1
            self._last_error = str(SluiceError.from_rpc(error))
            if self.evicted:
                self.model.Clear()  # whatever comes back may serve another model
            return
        self.status = status
        self.version = Version.from_proto(status.policy_version)
        self.seen, self._failed_polls = True, 0

    def work_failed(self, error: SluiceError) -> None:
        """Record a failed request: the replica gets no work for a while."""
        self._last_error = str(error)
        rest = min(_LONGEST_COOLDOWN_S, _FIRST_COOLDOWN_S * 2**self._failed_work)
        self._failed_work += 1
        self._rest_until = time.monotonic() + rest

    def work_succeeded(self, version: Version) -> None:
        """Record a request that succeeded; `version` sampled its last token."""
        self._failed_work = 0
        self._rest_until = 0.0
        self.version = max(self.version, version)

    def why_not(self, wanted: Version | None = None) -> str:
        """Return why it gets no work; empty if it does."""
        if not self.seen or self.evicted:
            return f"does not answer: {self._last_error}"
        if self.status.state not in _READY:
            return f"is {rollout_pb2.ReplicaState.Name(self.status.state).removeprefix('REPLICA_STATE_').lower()}"
        if time.monotonic() < self._rest_until:
            return f"failed lately: {self._last_error}"
        if wanted is not None and self.version < wanted:
            return f"serves version {self.version}, wanted is {wanted} or newer"
        return ""

    def describe(self) -> orchestrator_pb2.Replica:
        """Describe it for operators."""
        reason = self.why_not()
        return orchestrator_pb2.Replica(
            replica=self.name,
            address=self.target,
            policy_version=self.version.to_proto(),
            eligible=not reason,
            reason=reason,
            running=self.in_flight,
        )

    async def close(self) -> None:
        """Close its channel."""
        await self._channel.close()


class ReplicaPool:
    """Finds, polls and chooses replicas; `run` does the first two.

    Args:
        addresses: Configured addresses. A name stands for all addresses that it resolves to, and is resolved again regularly.
        on_change: Called when a replica's version or fitness changed.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        security: SecurityConfig,
        config: ReplicasConfig,
        on_change: Callable[[Replica], None],
    ) -> None:
        self._addresses = []
        for address in addresses:
            try:
                check_address(address)
            except ValueError as error:
                log.warning("a replica is left out (peers.rollout)", reason=str(error))
            else:
                self._addresses.append(address)
        self._security, self._config = security, config
        self._on_change = on_change
        self._replicas: dict[str, Replica] = {}
        self._pollers: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._hurry = asyncio.Event()
        self._wanted: Version | None = None
        self._leases: dict[str, tuple[str, float]] = {}
        self._last_digest = self._last_dtype = ""

    @property
    def replicas(self) -> list[Replica]:
        """All known replicas."""
        return list(self._replicas.values())

    async def run(self) -> None:
        """Find and poll replicas until cancelled, then close their channels.

        Raises:
            ExceptionGroup: with whatever the search for replicas or one of the polls raised.
        """
        try:
            async with asyncio.TaskGroup() as pollers:
                while True:
                    await self._follow_names(pollers)
                    await asyncio.sleep(self._config.resolve_s)
        finally:
            for replica in self._replicas.values():
                await replica.close()

    async def _follow_names(self, pollers: asyncio.TaskGroup) -> None:
        now = time.monotonic()
        self._leases = {name: lease for name, lease in self._leases.items() if lease[1] > now}
        targets = await resolve_targets([*self._addresses, *(target for target, _ in self._leases.values())])
        for target in targets:
            if target not in self._replicas:
                replica = Replica(target, self._security, self._config.evict_after)
                self._replicas[target] = replica
                self._pollers[target] = pollers.create_task(self._poll(replica), name=f"poll {target}")
        for target in [each for each in self._replicas if each not in targets]:
            # It left the name service, or its lease is over. Forget it unless it still works.
            replica = self._replicas[target]
            if replica.seen and not replica.evicted and (replica.in_flight or not replica.why_not()):
                continue
            poller = self._pollers.pop(target)
            del self._replicas[target]
            poller.cancel()
            await asyncio.gather(poller, return_exceptions=True)
            replica.cancel_calls()
            await replica.close()
            log.info("replica forgotten", replica=replica.name, target=target)

    async def _poll(self, replica: Replica) -> None:
        while True:
            before = (replica.version, replica.why_not())
            await replica.poll(self._config.poll_deadline_s)
            if replica.model.tokenizer_digest:
                self._last_digest, self._last_dtype = replica.model.tokenizer_digest, self.sampler_dtype()
            if (replica.version, replica.why_not()) != before:
                reason = replica.why_not()
                log.debug("replica changed", replica=replica.name, version=str(replica.version), reason=reason)
                self._on_change(replica)
                self._changed.set()
                if any(not each.why_not() for each in self._replicas.values()):
                    # A call at an evicted replica may never end; another replica takes it.
                    for each in self._replicas.values():
                        if each.evicted:
                            each.cancel_calls()
            await self._pause(replica)

    async def _pause(self, replica: Replica) -> None:
        """Wait for the next poll: briefly while dispatch waits for a version that this replica does not serve yet."""
        if self._wanted is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.poll_s):
                    await self._hurry.wait()
        elif not replica.why_not() and replica.version < self._wanted:
            await asyncio.sleep(self._config.waiting_poll_s)
        else:
            await asyncio.sleep(self._config.poll_s)

    def register(self, name: str, target: str) -> float:
        """Use a replica that announced itself; return the seconds within which it has to send a heartbeat.

        Raises:
            ValueError: if its address cannot be one.
        """
        check_address(target)
        self._leases[name] = (target, time.monotonic() + self._config.lease_s)
        return self._config.lease_s

    def heartbeat(self, name: str) -> float:
        """Renew a lease; return its seconds.

        Raises:
            KeyError: if the lease is unknown or over.
        """
        return self.register(name, self._leases[name][0])

    def wait_for(self, wanted: Version | None) -> None:
        """Poll often while dispatch waits for a version; None: it waits for none."""
        self._wanted = wanted
        if wanted is None:
            self._hurry.clear()
        else:
            self._hurry.set()

    def pick(self, wanted: Version, avoid: frozenset[str] = frozenset()) -> Replica | None:
        """Return the least loaded replica that serves `wanted` or newer; one of `avoid` only if there is no other."""
        fit = [each for each in self._replicas.values() if not each.why_not(wanted)]
        preferred = [each for each in fit if each.target not in avoid] or fit
        return min(preferred, key=lambda each: each.in_flight + each.status.queued, default=None)

    async def choose(self, wanted: Version, avoid: frozenset[str] = frozenset()) -> Replica:
        """Wait until `pick` finds a replica and return it; the caller sets the deadline."""
        while (replica := self.pick(wanted, avoid)) is None:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                # Cooldowns end without an announcement.
                async with asyncio.timeout(self._config.poll_s):
                    await self._changed.wait()
        return replica

    async def call(self, replica: Replica, samples: int, make: Callable[[Replica], Awaitable[_Answer]]) -> _Answer:
        """Make a call at a replica, which counts as so many samples under way there.

        Raises:
            SluiceError: what the replica answered, or UNAVAILABLE if it was evicted meanwhile.
        """
        call = asyncio.ensure_future(make(replica))
        replica.calls.add(call)
        replica.in_flight += samples
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise SluiceError.from_rpc(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            reason = f"replica {replica.name} was evicted ({replica.why_not()})"
            raise SluiceError.unavailable("REPLICA_EVICTED", reason) from None
        finally:
            replica.calls.discard(call)
            replica.in_flight -= samples

    def none_for(self, waited_s: float, setting: str) -> SluiceError:
        """Return the error after `waited_s` seconds, the value of `setting`, without a replica that gets work."""
        reasons = "; ".join(f"{each.name} {each.why_not()}" for each in self.replicas) or "no address resolves"
        return SluiceError.unavailable(
            "NO_REPLICA",
            f"no rollout replica for {waited_s:g} s (orchestrator.deadlines.{setting}): {reasons}; start one at an address of"
            " peers.rollout, then start the run again: it continues",
        )

    def tokenizer_digest(self) -> str:
        """Return the digest of tokenizer and template that the replicas share; empty until one answered.

        While none answers it is the last one: what was sampled can be trained without them.

        Raises:
            SluiceError: FAILED_PRECONDITION if they differ.
        """
        digests = {each.model.tokenizer_digest: each.name for each in self.replicas if each.model.tokenizer_digest}
        if len(digests) > 1:
            raise SluiceError.failed_precondition(
                "TOKENIZERS_DIFFER",
                f"replicas {' and '.join(digests.values())} have different tokenizers or templates: give all the same --model",
            )
        return next(iter(digests), self._last_digest)

    def sampler_dtype(self) -> str:
        """Return the precision of the replicas' weights, such as ``bfloat16``; empty if it is not known or they differ.

        While none answers it is the last one.
        """
        models = [each.model for each in self.replicas if each.model.tokenizer_digest]
        if not models:
            return self._last_dtype
        dtypes = {model.dtype for model in models if model.dtype}
        return dtypes.pop() if len(dtypes) == 1 else ""

    def update_metrics(self, newest: Version) -> dict[str, float]:
        """Return how long the slowest replica took for each part of its last update, and how many versions the last one lags."""
        ready = [each for each in self.replicas if not each.why_not()]
        timings = [each.status.last_update for each in ready if each.status.HasField("last_update")]
        if not timings:
            return {}
        behind = (newest.number - each.version.number for each in ready)
        return {"weights/replica_lag": float(max(0, *behind, 0))} | {
            f"weights/{part}_s": max(getattr(each, part).ToTimedelta().total_seconds() for each in timings)
            for part in ("pull", "stage", "pause", "apply", "total")
        }

    def generated_tokens(self) -> int:
        """Return the tokens that the replicas sampled since each of them started."""
        return sum(each.status.generated_tokens for each in self.replicas)


def check_address(address: str) -> None:
    """Check the form of an address.

    Raises:
        ValueError: if it is neither ``host:port``, with or without ``dns:///``, nor ``unix:PATH``.
    """
    host, _, port = address.removeprefix(_DNS).rpartition(":")
    if address.startswith(_UNIX):
        valid = len(address) > len(_UNIX)
    else:
        valid = port.isdecimal() and 0 < int(port) < 1 << 16 and (_is_literal(host) or _is_name(host))
    if not valid:
        raise ValueError(f"{address!r} is no address: give host:port or unix:PATH")


async def resolve_targets(addresses: Iterable[str]) -> list[str]:
    """Return the targets behind some addresses, in order, each once.

    ``unix:/path`` and literal addresses stand for themselves, names (with or without ``dns:///``) for every address that
    they resolve to now. A name that does not resolve is left out: it may later. So is what cannot be an address.
    """
    found: dict[str, None] = {}
    for address in addresses:
        host, _, port = address.removeprefix(_DNS).rpartition(":")
        try:
            check_address(address)
            if address.startswith(_UNIX) or _is_literal(host):
                found[address.removeprefix(_DNS)] = None
                continue
            async with asyncio.timeout(_LOOKUP_S):
                rows = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except (ValueError, OSError, TimeoutError) as error:
            log.debug("replica address skipped", address=address, error=str(error))
            continue
        hosts = [f"[{row[4][0]}]" if row[0] is socket.AF_INET6 else row[4][0] for row in rows]
        found |= dict.fromkeys(sorted(f"{each}:{port}" for each in hosts))
    return list(found)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def _is_name(host: str) -> bool:
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


class PolicyEngine:
    """Samples from the policy through the pool; what workflows are given.

    Args:
        run: Name of the run; empty leaves it unchecked.
        deadline_s: Seconds for one request at one replica.
        only: Use this replica alone, for an evaluation that is pinned to one version.

    Attributes:
        counts: What this process generated: "requests" that were answered, those of them with a sample of several policy
            versions ("spanning"), "tokens" sampled, attempts that failed and were made again elsewhere ("retried"), samples that
            were interrupted and "continued".
    """

    def __init__(self, pool: ReplicaPool, run: str, deadline_s: float, only: Replica | None = None) -> None:
        self.pool = pool
        self.counts: Counter[str] = Counter()
        self._run, self._deadline_s, self._only = run, deadline_s, only

    def pinned(self, replica: Replica) -> PolicyEngine:
        """Return the same engine restricted to one replica, with counts of its own."""
        return PolicyEngine(self.pool, self._run, self._deadline_s, replica)

    async def agenerate(self, request: rollout_pb2.GenerateRequest) -> rollout_pb2.GenerateResponse:
        """Sample all continuations of a prompt; the caller sets the deadline of the whole.

        Raises:
            SluiceError: if the request itself is at fault, or a sample was interrupted again and again.
        """
        request.run = f"runs/{self._run}" if self._run else ""
        response = await self._generate(request)
        for sample in response.samples:
            await self._continue(request, response.prompt_token_ids, sample)
        self.counts["requests"] += 1
        self.counts["tokens"] += sum(len(sample.token_ids) for sample in response.samples)
        self.counts["spanning"] += any(len(sample.version_spans) > 1 for sample in response.samples)
        return response

    async def tokenize(self, request: rollout_pb2.TokenizeRequest) -> list[int]:
        """Return the token ids of text or messages, by the model's own tokenizer and template."""
        answer = await self._anywhere(
            BASE, 0, lambda replica: replica.rollout.Tokenize(request, timeout=self._deadline_s)
        )
        return list(answer.token_ids)

    async def _generate(self, request: rollout_pb2.GenerateRequest) -> rollout_pb2.GenerateResponse:
        async def call(replica: Replica) -> rollout_pb2.GenerateResponse:
            answer: rollout_pb2.GenerateResponse = await replica.rollout.Generate(request, timeout=self._deadline_s)
            replica.work_succeeded(newest_version(answer.samples))
            return answer

        return await self._anywhere(Version.from_proto(request.min_policy_version), request.n or 1, call)

    async def _anywhere(self, wanted: Version, samples: int, call: Callable[[Replica], Awaitable[_Answer]]) -> _Answer:
        """Make a call at one replica after the other until one answers."""
        avoid: frozenset[str] = frozenset()
        while True:
            replica = self._only or await self.pool.choose(wanted, avoid)
            try:
                return await self.pool.call(replica, samples, call)
            except SluiceError as failure:
                if not _retryable(failure):
                    raise
                error = failure
            self.counts["retried"] += 1
            # One warning for a replica that fails, not one for each of its requests.
            tell = log.debug if replica.why_not() else log.warning
            tell("request is repeated at another replica", replica=replica.name, error=str(error))
            avoid = frozenset({replica.target})
            if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED or self._only is not None:
                await asyncio.sleep(error.retry_after_s or _BUSY_RETRY_S)
            else:
                replica.work_failed(error)

    async def _continue(
        self, request: rollout_pb2.GenerateRequest, prompt: Iterable[int], sample: rollout_pb2.GeneratedSample
    ) -> None:
        """Continue a sample in place until it ends by itself."""
        prompt_ids = list(prompt)
        for _ in range(_CONTINUATIONS):
            if sample.finish_reason not in _INTERRUPTED:
                return
            self.counts["continued"] += 1
            more = rollout_pb2.GenerateRequest()
            more.CopyFrom(request)
            more.n = 1
            more.request_id = (
                f"{request.request_id}/{sample.index}+{len(sample.token_ids)}" if request.request_id else ""
            )
            more.token_ids.ids[:] = [*prompt_ids, *sample.token_ids]
            more.continued_tokens = len(sample.token_ids)
            if request.sampling.HasField("seed"):
                # The samples of one request share its seed and differ by their index, which a request of one loses.
                more.sampling.seed = derived_seed(request.sampling.seed, sample.index, len(sample.token_ids))
            if request.sampling.HasField("max_tokens"):
                more.sampling.max_tokens = request.sampling.max_tokens - len(sample.token_ids)
                if more.sampling.max_tokens < 1:
                    sample.finish_reason = tokens_pb2.FINISH_REASON_LENGTH
                    return
            append_sample(sample, (await self._generate(more)).samples[0])
        raise SluiceError.aborted(
            "INTERRUPTED", f"a sample was interrupted {_CONTINUATIONS} times: look for the reason in the replicas' logs"
        )


def append_sample(sample: rollout_pb2.GeneratedSample, more: rollout_pb2.GeneratedSample) -> None:
    """Append the tokens of a continuation, with their log-probabilities and versions."""
    append_spans(sample.version_spans, more.version_spans, len(sample.token_ids))
    sample.token_ids.extend(more.token_ids)
    sample.logprobs.extend(more.logprobs)
    sample.text = more.text  # the replica has decoded all tokens together
    sample.finish_reason = more.finish_reason
    sample.stop_string = more.stop_string


def newest_version(samples: Iterable[rollout_pb2.GeneratedSample]) -> Version:
    """Return the newest version among the tokens of some samples; (0, 0) if there are none."""
    versions = [Version.from_proto(s.policy_version) for sample in samples for s in sample.version_spans]
    return max(versions, default=Version(0, 0))


def derived_seed(*parts: object) -> int:
    """Return a seed of 47 bits that the parts determine; seeds of different parts have nothing in common."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=6).digest()
    return int.from_bytes(digest) >> 1


def _retryable(error: SluiceError) -> bool:
    if error.code in _ELSEWHERE or error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return True
    # A replica that restarted serves an older version than it last said; another one will do, or the same one later.
    return error.code is grpc.StatusCode.FAILED_PRECONDITION and "VERSION" in error.reason
