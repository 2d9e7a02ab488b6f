"""Compare four records of the same tokens: the samplers', the journal's, the agents', and the trainer's batches. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.capture.clients import Played
from benchmarks.capture.records import TRAINED, Generation, Run, Trajectory, ids_key
from benchmarks.capture.witness import Witness
from orchestrator_svc.journal.external import parse_session_name

MOST_SHOWN = 5
"""Most failures of one kind that are shown."""


@dataclass
class Findings:
    """The results of the comparison.

    Attributes:
        figures: Numbers for people.
        failures: Differences that must not exist.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def fail(self, problems: Sequence[str]) -> None:
        """Add problems of one kind: the first ones in full, the rest as a count."""
        self.failures += problems[:MOST_SHOWN]
        if len(problems) > MOST_SHOWN:
            self.failures.append(f"... and {len(problems) - MOST_SHOWN} more like the last one")


def captured_are_sampled(run: Run, witness: Witness, findings: Findings) -> None:
    """Check that a sampler drew each captured token with this log-probability after exactly the tokens before it."""
    problems, compared, two_replicas, within_one = [], 0, 0, 0
    for session, generations in run.sessions.items():
        by_generation = []
        for each in generations:
            found = witness.replicas(each.prompt, each.ids.tolist(), each.logprobs.tolist())
            compared += len(found)
            missing = sum(not replicas for replicas in found)
            if missing:
                problems.append(f"{session}: {missing} of {len(found)} tokens of {each.name} were drawn by no sampler")
            by_generation.append(set.intersection(*found) if found else set())
            within_one += bool(found) and not by_generation[-1] and not missing
        two_replicas += within_two(by_generation)
    findings.fail(problems)
    findings.figures |= {
        "generations": sum(map(len, run.sessions.values())),
        "generations_by_two_versions": sum(each.versions > 1 for all_of in run.sessions.values() for each in all_of),
        "ids_compared": compared,
        "tokens_sampled": witness.tokens,
        "tokens_thrown_away": witness.tokens - compared,
        "sessions_by_two_replicas": two_replicas,
        "generations_by_two_replicas": within_one,
    }


def within_two(replicas: Iterable[set[str]]) -> bool:
    """Return whether no single replica can have drawn all of these generations."""
    known = [each for each in replicas if each]
    return len(known) > 1 and not set.intersection(*known)


def given_are_captured(run: Run, played: Sequence[Played], findings: Findings) -> None:
    """Check that each reply that an agent read is in the journal, word for word and token for token."""
    problems, compared = [], 0
    for episode in played:
        known = {each.name: each for each in run.sessions.get(episode.id, ())}
        for turn in episode.given:
            kept = known.get(turn.generation_id)
            if kept is None:
                problems.append(
                    f"{episode.id} ({episode.kind}): {turn.generation_id} was given and is not in the journal"
                )
                continue
            compared += len(turn.ids or ())
            if turn.ids is not None and turn.ids != tuple(kept.ids.tolist()):
                problems.append(f"{episode.id} ({episode.kind}): {turn.generation_id} has other ids than were given")
            if turn.prompt_ids is not None and turn.prompt_ids != tuple(kept.prompt.tolist()):
                problems.append(
                    f"{episode.id} ({episode.kind}): {turn.generation_id} has another prompt than was given"
                )
            if kept.message.tool_calls and [call.id for call in kept.message.tool_calls] != [c.id for c in turn.calls]:
                problems.append(f"{episode.id} ({episode.kind}): {turn.generation_id} has other calls than were given")
    findings.fail(problems)
    findings.figures |= {"replies_given": sum(len(each.given) for each in played), "ids_given": compared}


def histories_continue(run: Run, played: Sequence[Played], findings: Findings) -> None:
    """Check that an agent that only appends never forks: each turn continues exactly the tokens of the previous one."""
    problems: list[str] = []
    forks: Counter[str] = Counter()
    for episode in played:
        known = {each.name: each for each in run.sessions.get(episode.id, ())}
        children = Counter(each.parent for each in known.values())
        forks[episode.kind] += sum(count - 1 for count in children.values())
        for before, after in zip(["", *episode.path], episode.path, strict=False):
            if after not in known or not episode.appends:
                continue
            if known[after].parent != before and not _same(known.get(known[after].parent), known.get(before)):
                problems.append(
                    f"{episode.id} ({episode.kind}): {after} continues {known[after].parent or 'nothing'}, not {before}"
                )
            elif (
                known[after].parent == before
                and before
                and ids_key(_whole(known[before])) != ids_key(known[after].prompt[: len(_whole(known[before]))])
            ):
                problems.append(f"{episode.id} ({episode.kind}): the prompt of {after} changes tokens of {before}")
    findings.fail(problems)
    findings.figures["forks"] = dict(forks)


def _same(one: Generation | None, other: Generation | None) -> bool:
    """Return whether a client's history cannot distinguish two samples, because their messages or their tokens are equal."""
    if one is None or other is None:
        return False
    calls = one.message.tool_calls or other.message.tool_calls
    said = not calls and one.message.content.strip() == other.message.content.strip()
    return one.parent == other.parent and (said or ids_key(_whole(one)) == ids_key(_whole(other)))


def _whole(generation: Generation) -> np.ndarray:
    return np.concatenate([generation.prompt, generation.ids])


def trained_once(run: Run, findings: Findings) -> None:
    """Check that each sampled token of a submitted session is trained in one branch, or that a reason is recorded why it is not."""
    problems: list[str] = []
    tokens: Counter[str] = Counter()
    by_episode: dict[str, list[Trajectory]] = {}
    for trajectory in run.trajectories.values():
        by_episode.setdefault(trajectory.episode, []).append(trajectory)
        if trajectory.times > 1:
            problems.append(f"{trajectory.name} was trained {trajectory.times} times")
    for session, generations in run.sessions.items():
        group, number, _ = parse_session_name(session) or (0, 0, 0)
        if session not in run.submitted:
            tokens["of sessions that were not submitted"] += _count(generations)
            continue
        branches = by_episode.get(f"g{group}-{number}", [])
        if not branches:
            reason = run.dropped_groups.get(group)
            tokens[f"dropped with their group: {reason}" if reason else "of groups that had not ended"] += _count(
                generations
            )
            continue
        held = _held(branches)
        # If two samples have the same tokens and one may not be trained, the other still may.
        for each in sorted(generations, key=lambda each: bool(each.not_trained)):
            places = held.get((ids_key(each.prompt), ids_key(each.ids)), [])
            why = places.pop() if places else ""
            if not why and len(each.ids):
                why = f"not trained: {each.not_trained or '?'}"
                if not each.not_trained:
                    problems.append(
                        f"{session}: {each.name} ({each.dialect}) is trained in no branch, without a reason"
                    )
            tokens[why] += len(each.ids)
        left = sum(map(len, held.values()))
        if left:
            problems.append(f"{session}: {left} stretches are trained that were not sampled, or were trained before")
    findings.fail(problems)
    findings.figures["tokens"] = {name: count for name, count in sorted(tokens.items()) if count}
    findings.figures["tokens_trained"] = tokens[TRAINED]


def _held(branches: Iterable[Trajectory]) -> dict[tuple[bytes, bytes], list[str]]:
    """Return the outcomes of each trained stretch, by the tokens before it and its own tokens."""
    held: dict[tuple[bytes, bytes], list[str]] = {}
    for branch in branches:
        for begin, length in branch.stretches:
            key = ids_key(branch.ids[:begin]), ids_key(branch.ids[begin : begin + length])
            held.setdefault(key, []).append(branch.outcome)
    return held


def _count(generations: Iterable[Generation]) -> int:
    return sum(len(each.ids) for each in generations)
