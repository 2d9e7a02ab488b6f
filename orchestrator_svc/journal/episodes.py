"""The episodes of one running group as the journal keeps them: what a start continues from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog

from orchestrator_svc.journal.ledger import EndedTurn, Group
from orchestrator_svc.journal.store import GroupDamagedError, Journal
from sluice.v1 import journal_pb2, rollout_pb2

log = structlog.get_logger(__name__)


class JournaledEpisodes:
    """The `EpisodeLog` of a group that is trained.

    Args:
        group: The group; it is running.
    """

    def __init__(self, journal: Journal, group: Group) -> None:
        self._journal, self._group = journal, group

    @property
    def lost(self) -> Mapping[int, str]:
        """Why an episode was lost, by the number of each that was."""
        return self._group.lost

    def keep_loss(self, episode: int, reason: str) -> None:
        """Keep that an episode is lost: no process runs it again while the group is at this attempt."""
        lost = journal_pb2.EpisodesEnded(group=self._group.number, attempt=self._group.attempt)
        lost.episodes.add(episode=episode, reason=reason)
        self._journal.record(journal_pb2.Fact(episodes_ended=lost))

    def attempt(self, episode: int) -> int:
        """Return the last attempt of which something was kept; at least that of the group."""
        kept = [each.attempt for each in self._group.generations if episode in each.episodes]
        return max(kept, default=self._group.attempt)

    async def generation(self, attempt: int, turn: int, episodes: Sequence[int]) -> rollout_pb2.GenerateResponse | None:
        """Return the answer that was kept for a turn of these episodes; None if there is none, or the disk damaged it."""
        wanted = (attempt, turn, tuple(episodes))
        # The last one: where the first was damaged, another took its place.
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
        self._journal.record(journal_pb2.Fact(generation_recorded=fact))

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
        self._journal.record(journal_pb2.Fact(turn_ended=fact))
        return True
