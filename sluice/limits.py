"""The limits of the contracts, in one table. The service that receives data checks it against them before it samples or writes.

Every server reports the limits in GetServerInfo, and docs/limits.md lists them. A setting may lower a limit if there is one for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_MESSAGE_BYTES = 4 << 20
"""Largest message of the contracts; larger contents are sent in parts."""

MAX_SAMPLES = 256
"""Most samples of one Generate request."""

MAX_TEMPERATURE = 100.0
"""Highest temperature of a request."""

MIN_TEMPERATURE = 0.01
"""Lowest temperature of tokens that are trained. vLLM silently raises lower values to this one. Logits are divided by the temperature, and
with them their rounding errors: a float32 difference of 5e-5 between sampler and trainer becomes 5e-3 in a log-probability at 0.01, and
50 at 1e-6."""

MAX_TRAJECTORY_TOKENS = 262_144
"""Most tokens of a trajectory, prompt included."""

MAX_TRAJECTORIES = 16_384
"""Most trajectories of a batch."""

MAX_BATCH_BYTES = 1 << 30
"""Most bytes of a batch. Together with the length of the trainer's queue this bounds the memory of submissions."""

MAX_REPORT_BYTES = 3 << 20
"""Most bytes of the trainer's answers about a batch: one message holds them and the batch's metrics."""

MAX_NAME = 256
"""Most characters of the ids of a trajectory and of a batch, which reports repeat."""

MAX_BRANCHES = 1024
"""Most samples of one session of an external agent: each may end a branch, and each branch is a trajectory."""

MAX_REWARD = 1e6
"""Largest absolute value of a reward, unless `orchestrator.max_reward` says otherwise."""

HEAD_S = 15.0
"""Seconds for the head of a request over HTTP or the handshake of gRPC, from the opening of the connection or from the first byte."""

MAX_HEAD_BYTES = 64 << 10
"""Most bytes of the head of a request over HTTP."""

MAX_METADATA_BYTES = 64 << 10
"""Most bytes of the metadata of a call."""

BODY_S = 60.0
"""Seconds for the body of a request over HTTP, from the moment when the server begins to read it."""

REQUEST_S = 30.0
"""Seconds for the one message of a call, once the call has begun."""

SEND_DEADLINE_S = 60.0
"""Seconds for a client to read an event of a stream, or any bytes. A slower client is disconnected."""

IDLE_S = 600.0
"""Seconds without a call after which a gRPC connection is closed. The client's next call opens another one."""

MAX_CONNECTIONS = 8192
"""Connections of a port at once, unless `server.max_connections` says otherwise."""

MAX_METRICS_CONNECTIONS = 64
"""Connections of a port of metrics at once. Each has a thread."""

MAX_PROBE_CONNECTIONS = 256
"""Connections of a port of probes at once."""

MAX_BODIES_BYTES = 1 << 30
"""Bytes of the bodies of all requests over HTTP in progress, unless `capture.limits.max_bodies_mb` says otherwise."""

RESULT_BYTES = 66
"""Upper bound on the bytes of the trainer's answer about one trajectory, without the trajectory's id."""

FLOAT32_MAX = 3.4028234663852886e38
"""Largest finite float32. Advantages and rewards of tokens are sent and trained as float32."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One row of the table.

    Attributes:
        name: Name for programs and for error messages.
        value: The largest value that is accepted.
        unit: Unit of the value.
        meaning: A sentence for people: what is limited, and what happens to anything larger.
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
    """Return whether tokens that were sampled at a temperature may be trained. Temperatures are sent as float32: 0.01 is slightly less."""
    return MIN_TEMPERATURE <= round(temperature, 9) <= MAX_TEMPERATURE


def within(reward: float, most: float) -> bool:
    """Return whether a reward may be trained: finite, and its absolute value at most `most`."""
    return math.isfinite(reward) and abs(reward) <= most
