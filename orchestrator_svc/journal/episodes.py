"""The episodes of one running group as the journal keeps them: what a start continues from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from orchestrator_svc.journal.facts import EndedTurn
from orchestrator_svc.journal.ledger import Group
from orchestrator_svc.journal.records import SharedRecord, note_sampled
from orchestrator_svc.journal.store import GroupDamagedError, Journal
from sluice.v1 import journal_pb2, orchestrator_pb2, rollout_pb2, tokens_pb2

log = structlog.get_logger(__name__)


class JournaledEpisodes:
    """What the journal keeps of a group's episodes while they run, so that a start continues them where a killed process stopped.

    Args:
        group: The group; it is running.
    """

    def __init__(self, journal: Journal, group: Group) -> None:
        self._journal, self._group = journal, group

    @property
    def lost(self) -> Mapping[int, str]:
        """Why episodes were lost, by number of the episode. They are not run again."""
        return self._group.lost

    def keep_loss(self, episode: int, reason: str) -> None:
        """Record that an episode is lost, so that no process runs it again during this attempt of the group."""
        lost = journal_pb2.EpisodesEnded(group=self._group.number, attempt=self._group.attempt)
        lost.episodes.add(episode=episode, reason=reason)
        self._journal.record_fact(journal_pb2.Fact(episodes_ended=lost))

    def attempt(self, episode: int) -> int:
        """Return the last attempt with a kept answer, or the group's attempt if there is none."""
        kept = [each.attempt for each in self._group.generations if episode in each.episodes]
        return max(kept, default=self._group.attempt)

    async def generation(self, attempt: int, turn: int, episodes: Sequence[int]) -> rollout_pb2.GenerateResponse | None:
        """Return the answer that was kept for a turn of these episodes; None if there is none, or the disk damaged it."""
        wanted = (attempt, turn, tuple(episodes))
        # The last one: if the first was damaged, a later one replaced it.
        for each in reversed(self._group.generations):
            if (each.attempt, each.turn, each.episodes) == wanted:
                try:
                    return (await self._journal.read([each.place], rollout_pb2.GenerateResponse))[0]
                except GroupDamagedError as error:
                    log.warning("a damaged generation is sampled again", group=self._group.name, error=str(error))
                    return None
        return None

    def keep_generation(
        self, attempt: int, turn: int, episodes: Sequence[int], request_id: str, response: rollout_pb2.GenerateResponse
    ) -> None:
        """Keep a replica's answer."""
        fact = journal_pb2.GenerationRecorded(
            group=self._group.number,
            attempt=attempt,
            turn=turn,
            episodes=episodes,
            request_id=request_id,
            place=self._journal.keep(response),
        )
        self._journal.record_fact(journal_pb2.Fact(generation_recorded=fact))

    def keep_turn(self, attempt: int, turn: int, episode: int, reward: float | None, messages_digest: bytes) -> bool:
        """Keep what the environment answered to a turn; return False if it answered otherwise before."""
        known = self._group.turns.get((episode, attempt, turn))
        if known is not None:
            return known == EndedTurn(reward, messages_digest)
        fact = journal_pb2.TurnEnded(
            group=self._group.number,
            attempt=attempt,
            turn=turn,
            episode=episode,
            reward=reward,
            messages_digest=messages_digest,
        )
        self._journal.record_fact(journal_pb2.Fact(turn_ended=fact))
        return True


async def unfinished(journal: Journal, group: Group) -> dict[int, SharedRecord]:
    """Return the samples of the last attempt at each episode of a running group, for people, by number of the episode.

    Only answers of replicas were kept. So there is one message per turn, the assistant's, and only the tokens of the last turn with its
    prompt.

    Raises:
        GroupDamagedError: if the disk damaged some of it.
    """
    last = {episode: each.attempt for each in group.generations for episode in each.episodes}
    kept = sorted(group.generations, key=lambda each: each.turn)
    answers = await journal.read([each.place for each in kept], rollout_pb2.GenerateResponse) if kept else []
    found: dict[int, SharedRecord] = {}
    for generation, answer in zip(kept, answers, strict=True):
        for episode, sample in zip(generation.episodes, answer.samples, strict=False):
            if generation.attempt != last[episode]:
                continue
            record = found.setdefault(episode, SharedRecord(orchestrator_pb2.TrajectoryRecord())).own
            trajectory = record.trajectory
            trajectory.trajectory_id = trajectory.episode_id = f"{group.name}-{episode}"
            trajectory.task_id, trajectory.group_id = group.task_id, group.name
            trajectory.token_ids[:] = [*answer.prompt_token_ids, *sample.token_ids]
            trajectory.mask_runs[:] = [len(answer.prompt_token_ids), len(sample.token_ids)]
            trajectory.logprobs[:] = sample.logprobs
            del trajectory.version_spans[:]
            trajectory.version_spans.extend(sample.version_spans)
            trajectory.finish_reason = sample.finish_reason
            said = sample.message if sample.HasField("message") else None
            record.conversation.messages.append(said or tokens_pb2.ChatMessage(role="assistant", content=sample.text))
            note_sampled(record, answer)
            record.environment = group.environment
            record.draw_time.FromMicroseconds(round(group.drawn_s * 1e6))
    return found
