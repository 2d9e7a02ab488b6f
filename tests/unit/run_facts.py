"""The facts of small runs, in few words."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator_svc.journal.ledger import Group
from orchestrator_svc.journal.records import SharedRecord, encode
from orchestrator_svc.journal.store import Journal
from sluice.digests import batch_digest, trajectory_digest
from sluice.v1 import journal_pb2 as pb
from sluice.v1 import orchestrator_pb2, rollout_pb2, tokens_pb2
from sluice.versions import BASE, Version

ENVIRONMENT = "letters"


def record(name: str, text: str = "hello") -> orchestrator_pb2.TrajectoryRecord:
    return orchestrator_pb2.TrajectoryRecord(
        trajectory=tokens_pb2.Trajectory(
            trajectory_id=name, episode_id=name, token_ids=[1, 2, 3], mask_runs=[1, 2], reward=0.5
        ),
        conversation=tokens_pb2.Conversation(messages=[tokens_pb2.ChatMessage(role="assistant", content=text)]),
    )


def drawn(number: int, position: int | None = None, *, floor: Version = BASE, attempt: int = 0, redraw: str = ""):
    position = number - 1 if position is None else position
    return pb.Fact(
        task_drawn=pb.TaskDrawn(
            environment=ENVIRONMENT,
            task_id=f"task-{position}",
            group=number,
            position=position,
            episodes=2,
            attempt=attempt,
            redraw_reason=redraw,
            policy_version=floor.to_proto(),
        )
    )


def dropped(number: int, reason: str, *, redraw: bool = False):
    return pb.Fact(group_dropped=pb.GroupDropped(group=number, reason=reason, redraw=redraw))


def generated(journal: Journal, number: int, text: str = "answer", attempt: int = 0):
    response = rollout_pb2.GenerateResponse(samples=[rollout_pb2.GeneratedSample(text=text)])
    return pb.Fact(
        generation_recorded=pb.GenerationRecorded(
            group=number, attempt=attempt, episodes=[0, 1], place=journal.keep(response)
        )
    )


def end(journal: Journal, number: int, versions: Sequence[Version] = (BASE,), count: int = 2) -> None:
    """Accept a running group."""
    end_with(journal, number, [SharedRecord(record(f"g{number}-{index}")) for index in range(count)], versions)


def end_with(
    journal: Journal, number: int, records: Sequence[SharedRecord], versions: Sequence[Version] = (BASE,)
) -> None:
    """Accept a running group, one trajectory an episode."""
    kept = journal.keep_trajectories(number, encode(records))
    episodes = [
        pb.EndedEpisode(episode=index, reward=0.5, trajectories=[each]) for index, each in enumerate(kept.trajectories)
    ]
    ended = pb.EpisodesEnded(group=number, episodes=episodes, beginnings=kept.beginnings)
    journal.record_fact(pb.Fact(episodes_ended=ended))
    sampled = [each.to_proto() for each in versions]
    journal.record_fact(pb.Fact(group_accepted=pb.GroupAccepted(group=number, policy_versions=sampled)))


async def wholes(journal: Journal, group: Group) -> list[orchestrator_pb2.TrajectoryRecord]:
    """The trajectories of a group, as they leave."""
    return [each.whole() for each in await journal.trajectories(group)]


def accept(journal: Journal, number: int, versions: Sequence[Version] = (BASE,), count: int = 2) -> None:
    """Draw and accept a group."""
    journal.record_fact(drawn(number))
    end(journal, number, versions, count)


def made(journal: Journal, *groups: int):
    """The next batch, of these groups."""
    ledger = journal.ledger
    ids = [each.trajectory_id for number in groups for each in ledger.groups[number].trajectories]
    digests = [trajectory_digest(record(each).trajectory) for each in ids]
    return pb.Fact(
        batch_made=pb.BatchMade(
            sequence_no=ledger.next_batch,
            batch_id=f"b{ledger.batches_made + 1}",
            groups=groups,
            trajectory_ids=ids,
            trajectory_digests=digests,
            content_digest=batch_digest(digests),
        )
    )


def applied(
    journal: Journal, number: int, *, redrawn: Sequence[int] = (), elapsed_s: float = 1.0, **late: Sequence[str]
):
    """Return the outcome of a batch: all trajectories are trained, except those in `late`, which has ids by reason."""
    lost = {each for ids in late.values() for each in ids}
    ids = [each for each in journal.ledger.batches[number].trajectory_ids if each not in lost]
    outcomes = {reason: pb.DroppedTrajectories(trajectory_ids=each) for reason, each in late.items()}
    return pb.Fact(
        batch_applied=pb.BatchApplied(
            sequence_no=number, trained=ids, dropped=outcomes, elapsed_s=elapsed_s, redrawn=redrawn
        )
    )


def unmade(number: int):
    return pb.Fact(batch_unmade=pb.BatchUnmade(sequence_no=number, reason="test"))


def begin_epoch(journal: Journal, origin: Version = BASE) -> int:
    """Allot and begin the next epoch."""
    epoch = journal.ledger.allotted + 1
    journal.record_fact(pb.Fact(epoch_allotted=pb.EpochAllotted(epoch=epoch)))
    journal.record_fact(pb.Fact(epoch_begun=pb.EpochBegun(epoch=epoch, origin=origin.to_proto())))
    return epoch


def covered(number: int, epoch: int = 1):
    version = Version(epoch, number).to_proto()
    return pb.Fact(checkpoint_covered=pb.CheckpointCovered(name=f"step_{number}", policy_version=version))
