"""What a run recorded of its sessions and trajectories, read from its journal."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator_svc.journal.external import session_name
from orchestrator_svc.journal.facts import Place
from orchestrator_svc.journal.segments import read_payload
from orchestrator_svc.journal.store import read_facts
from orchestrator_svc.sessions.trajectories import UNDELIVERED
from sluice.openai.answers import visible_message
from sluice.v1 import journal_pb2, orchestrator_pb2, session_pb2, tokens_pb2
from sluice.versions import Version

Ids = NDArray[np.uint32]

TRAINED, IN_FLIGHT = "trained", "in flight"


@dataclass(frozen=True, slots=True)
class Generation:
    """One sample according to the journal.

    Attributes:
        parent: The generation that its prompt continues; empty if it continues none.
        message: The message as its agent got it.
        not_trained: Why it may not be trained; empty if it may.
        versions: How many versions sampled it.
    """

    name: str
    parent: str
    dialect: str
    prompt: Ids
    ids: Ids
    logprobs: NDArray[np.float32]
    message: tokens_pb2.ChatMessage
    not_trained: str
    versions: int = 1


@dataclass(slots=True)
class Trajectory:
    """One branch as it was accepted.

    Attributes:
        episode: Such as `g1-0`.
        ids: Token ids of the whole branch.
        stretches: Start and length of each stretch of trained tokens.
        versions: First token of each span, counted in trained tokens, and the version that sampled it.
        outcome: `TRAINED`, `IN_FLIGHT`, or why it was dropped.
        times: How often it was trained.
    """

    name: str
    episode: str
    ids: Ids
    stretches: list[tuple[int, int]]
    logprobs: NDArray[np.float32]
    versions: list[tuple[int, Version]]
    temperature: float
    reward: float | None
    outcome: str = IN_FLIGHT
    times: int = 0


@dataclass
class Run:
    """What a run recorded.

    Attributes:
        sessions: The generations of each session, in order.
        submitted: Sessions that were submitted.
        trajectories: All accepted trajectories, by name.
        dropped_groups: Groups that were given up, with the reason.
        given_up: Why sessions ended without a submission.
    """

    sessions: defaultdict[str, list[Generation]] = field(default_factory=lambda: defaultdict(list))
    submitted: set[str] = field(default_factory=set)
    trajectories: dict[str, Trajectory] = field(default_factory=dict)
    dropped_groups: dict[int, str] = field(default_factory=dict)
    given_up: Counter[str] = field(default_factory=Counter)


def kept_segments(directory: Path) -> Path:
    """Return the directory of links to a run's segments. The journal deletes a segment when it is not needed to continue."""
    return directory.with_name(f"{directory.name}-segments")


def keep_segments(directory: Path) -> None:
    """Hard-link the segments that a run has now. What is appended to them later is visible through the links."""
    kept = kept_segments(directory)
    kept.mkdir(exist_ok=True)
    for path in (directory / "journal").glob("segment-*.bin"):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            (kept / path.name).hardlink_to(path)


def read_run(directory: Path) -> Run:
    """Read the journal of a run.

    Raises:
        JournalError: if it cannot be read, or a payload is gone: `keep_segments` must be called while the run lasts.
    """
    run, segments = Run(), kept_segments(directory)
    for _, fact in read_facts(directory):
        kind = fact.WhichOneof("kind") or ""
        if kind.startswith("session_generation") or kind in {"episode_submitted", "episode_given_up"}:
            _take_session(run, segments, fact)
        elif kind in {"episodes_ended", "group_dropped", "batch_applied"}:
            _take_outcome(run, segments, fact)
    return run


def _take_session(run: Run, segments: Path, fact: journal_pb2.Fact) -> None:
    if fact.HasField("session_generation_recorded"):
        made = fact.session_generation_recorded
        payload = read_payload(segments, Place.from_proto(made.place))
        name = session_name(made.group, made.episode, made.attempt)
        run.sessions[name] += _generations(made, session_pb2.RecordedGeneration.FromString(payload))
    elif fact.HasField("session_generation_delivered"):
        given = fact.session_generation_delivered
        name = session_name(given.group, given.episode, given.attempt)
        run.sessions[name] = [
            replace(each, not_trained="") if each.name.rpartition("/")[0] == given.request_id else each
            for each in run.sessions[name]
        ]
    elif fact.HasField("episode_submitted"):
        each = fact.episode_submitted
        run.submitted.add(session_name(each.group, each.episode, each.attempt))
    else:
        run.given_up[fact.episode_given_up.reason] += 1


def _take_outcome(run: Run, segments: Path, fact: journal_pb2.Fact) -> None:
    if fact.HasField("episodes_ended"):
        run.trajectories |= {each.name: each for each in _accepted(segments, fact.episodes_ended)}
    elif fact.HasField("group_dropped"):
        run.dropped_groups[fact.group_dropped.group] = fact.group_dropped.reason
    else:
        for name in fact.batch_applied.trained:
            run.trajectories[name].times += 1
            run.trajectories[name].outcome = TRAINED
        for reason, names in fact.batch_applied.dropped.items():
            for name in names.trajectory_ids:
                run.trajectories[name].outcome = reason


def _generations(
    fact: journal_pb2.SessionGenerationRecorded, made: session_pb2.RecordedGeneration
) -> Iterator[Generation]:
    prompt = np.array(made.response.prompt_token_ids, np.uint32)
    for index, sample in enumerate(made.response.samples):
        name = f"{fact.request_id}/{index}"
        ids, logprobs = np.array(sample.token_ids, np.uint32), np.array(sample.logprobs, np.float32)
        message = visible_message(sample, name)
        why_not = made.not_trained or (UNDELIVERED if fact.undelivered else "")
        versions = len(sample.version_spans)
        yield Generation(name, fact.parent, made.dialect, prompt, ids, logprobs, message, why_not, versions)


def _accepted(segments: Path, fact: journal_pb2.EpisodesEnded) -> Iterator[Trajectory]:
    for episode in fact.episodes:
        for each in episode.trajectories:
            payload = read_payload(segments, Place.from_proto(each.place))
            yield _trajectory(orchestrator_pb2.TrajectoryRecord.FromString(payload).trajectory)


def _trajectory(made: tokens_pb2.Trajectory) -> Trajectory:
    stretches, at = [], 0
    for index, length in enumerate(made.mask_runs):
        if index % 2 and length:
            stretches.append((at, length))
        at += length
    return Trajectory(
        name=made.trajectory_id,
        episode=made.episode_id,
        ids=np.array(made.token_ids, np.uint32),
        stretches=stretches,
        logprobs=np.array(made.logprobs, np.float32),
        versions=[(each.start, Version.from_proto(each.policy_version)) for each in made.version_spans],
        temperature=made.temperature,
        reward=made.reward if made.HasField("reward") else None,
    )


def ids_key(ids: Ids | Any) -> bytes:  # noqa: ANN401 - any array of ids
    """Return a value that is equal for equal ids."""
    return np.asarray(ids, "<u4").tobytes()
