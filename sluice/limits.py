"""The limits of the contracts, in one table. Whoever lets data in checks it against them, before anything is sampled or written.

Every server says them in GetServerInfo, and docs/limits.md lists them. Settings may set lower ones where they name a limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message of the contracts; larger things travel in parts."""

MAX_SAMPLES = 256
"""Most samples of one Generate request."""

MAX_TEMPERATURE = 100.0
"""Highest temperature of a request."""

MIN_TEMPERATURE = 0.01
"""Lowest temperature of tokens that are trained. vLLM silently raises lower values to this one. Logits are divided by it, and so is what
rounding makes them differ by: 5e-5 between sampler and trainer, in float32, is 5e-3 in a log-probability here, and 50 at 1e-6."""

MAX_TRAJECTORY_TOKENS = 262_144
"""Most tokens of a trajectory, prompt included."""

MAX_TRAJECTORIES = 16_384
"""Most trajectories of a batch."""

MAX_BATCH_BYTES = 1 << 30
"""Most bytes of a batch; with the length of the trainer's queue this bounds the memory of submissions."""

MAX_REPORT_BYTES = 3 << 20
"""Most bytes of the trainer's answers about a batch: they travel in one message with its metrics."""

MAX_NAME = 256
"""Most characters of the ids of a trajectory and of a batch, which reports repeat."""

MAX_BRANCHES = 1024
"""Most samples of one session of an external agent: each may end a branch, and each branch is a trajectory."""

MAX_REWARD = 1e6
"""Largest absolute value of a reward, unless `orchestrator.max_reward` says otherwise."""

HEAD_S = 15.0
"""Seconds for the head of a request over HTTP, or the handshake of gRPC, once its connection is open or its first byte is there."""

MAX_HEAD_BYTES = 64 << 10
"""Most bytes of the head of a request over HTTP."""

MAX_METADATA_BYTES = 64 << 10
"""Most bytes of the metadata of a call."""

BODY_S = 60.0
"""Seconds for the body of a request over HTTP, once it is read."""

REQUEST_S = 30.0
"""Seconds for the one message of a call, once the call has begun."""

SEND_DEADLINE_S = 60.0
"""Seconds for a client to read an event of a stream, or any bytes, before it is disconnected."""

IDLE_S = 600.0
"""Seconds without a call after which a connection of gRPC is ended; the next call of its client makes another one."""

MAX_CONNECTIONS = 8192
"""Connections of a port at once, unless `server.max_connections` says otherwise."""

MAX_METRICS_CONNECTIONS = 64
"""Connections of a port of metrics at once, each of which has a thread."""

MAX_PROBE_CONNECTIONS = 256
"""Connections of a port of probes at once."""

MAX_BODIES_BYTES = 1 << 30
"""Bytes of the bodies of all requests over HTTP in progress, unless `capture.limits.max_bodies_mb` says otherwise."""

RESULT_BYTES = 66
"""Upper bound on the bytes of the trainer's answer about one trajectory, without its id."""

FLOAT32_MAX = 3.4028234663852886e38
"""Largest finite number of float32, as which advantages and rewards of tokens travel and are trained."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One row of the table.

    Attributes:
        name: For programs, and in refusals.
        value: The largest value that is let in.
        unit: What is counted.
        meaning: A sentence for people: of what, and what happens to what is larger.
    """

    name: str
    value: float
    unit: str
    meaning: str


LIMITS = (
    Limit(
        "message_bytes",
        MAX_MESSAGE_BYTES,
        "bytes",
        "One message of any RPC, and one body over HTTP. Trajectories and recordings that are larger travel in parts; anything else is refused: MESSAGE_TOO_LARGE.",
    ),
    Limit(
        "least_temperature",
        MIN_TEMPERATURE,
        "temperature",
        "The **least** of tokens that are trained, not the largest: 0 is greedy, and closer to it logits say more of rounding than of the policy."
        " Settings of runs refuse less; of an agent's request `capture.on_unsupported` decides. Evaluations may use any.",
    ),
    Limit("temperature", MAX_TEMPERATURE, "temperature", "The temperature of a request. A higher one is refused."),
    Limit("request_samples", MAX_SAMPLES, "samples", "`n` of one request. A larger one is refused."),
    Limit(
        "session_branches",
        MAX_BRANCHES,
        "samples",
        "Samples of one session of an external agent. A request that would exceed it is refused before it is sampled.",
    ),
    Limit(
        "trajectory_tokens",
        MAX_TRAJECTORY_TOKENS,
        "tokens",
        "One trajectory, its prompts included. A longer one is not trained: TOO_LONG.",
    ),
    Limit(
        "batch_trajectories",
        MAX_TRAJECTORIES,
        "trajectories",
        "One batch. The groups with the most trajectories are set aside until the rest fits: BATCH_TOO_LARGE.",
    ),
    Limit("batch_bytes", MAX_BATCH_BYTES, "bytes", "One batch, likewise."),
    Limit("report_bytes", MAX_REPORT_BYTES, "bytes", "The trainer's answers about one batch, likewise."),
    Limit("name_characters", MAX_NAME, "characters", "Ids of trajectories, groups, episodes and batches."),
    Limit(
        "head_bytes",
        MAX_HEAD_BYTES,
        "bytes",
        "The head of a request over HTTP. A larger one is answered 431, and its connection closed.",
    ),
    Limit(
        "head_s",
        HEAD_S,
        "seconds",
        "The arrival of a head over HTTP, or a handshake of gRPC. Then the connection is closed.",
    ),
    Limit("body_s", BODY_S, "seconds", "The arrival of a body over HTTP. Then it is answered 408."),
    Limit(
        "connections",
        MAX_CONNECTIONS,
        "connections",
        "One port at a time, unless `server.max_connections` sets another bound; see [security.md](security.md#before-anybody-is-known).",
    ),
    Limit(
        "bodies_bytes",
        MAX_BODIES_BYTES,
        "bytes",
        "The bodies of all requests over HTTP in progress, unless `capture.limits.max_bodies_mb` sets another bound. One more is answered 429.",
    ),
    Limit(
        "reward",
        MAX_REWARD,
        "absolute value",
        "A reward, unless `orchestrator.max_reward` sets another bound. A larger one is refused where it is given;"
        " of an environment it counts as missing: REWARD_TOO_LARGE.",
    ),
    Limit(
        "float32",
        FLOAT32_MAX,
        "absolute value",
        "Advantages, and whatever else is trained. What exceeds it is set aside: REWARDS_UNFIT.",
    ),
)


def report_bytes(trajectory_id: str) -> int:
    """Return an upper bound on the bytes of the trainer's answer about a trajectory."""
    return RESULT_BYTES + len(trajectory_id.encode())


def may_train_at(temperature: float) -> bool:
    """Return whether tokens that were sampled at a temperature may be trained. As float32, in which it travels, 0.01 is a little less."""
    return MIN_TEMPERATURE <= round(temperature, 9) <= MAX_TEMPERATURE


def within(reward: float, most: float) -> bool:
    """Return whether a reward is a number that may be trained: finite, and not beyond a bound."""
    return math.isfinite(reward) and abs(reward) <= most
