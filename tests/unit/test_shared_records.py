"""What trajectories of a group begin with lies in the journal once, and is read, kept, forked and audited with each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_facts import accept, applied, begin_epoch, covered, drawn, end_with, made, record, wholes

from orchestrator_svc.commands.audit import audit_run
from orchestrator_svc.commands.fork import _beginning, _link_segments
from orchestrator_svc.journal.facts import Place, Reason, Stage
from orchestrator_svc.journal.ledger import folded
from orchestrator_svc.journal.records import Beginning, Each, SharedRecord
from orchestrator_svc.journal.segments import segment_numbers, segment_path
from orchestrator_svc.journal.store import GroupDamagedError, Journal, JournalLimits, read_facts
from sluice.digests import trajectory_digest
from sluice.v1 import journal_pb2 as pb
from sluice.v1 import orchestrator_pb2, tokens_pb2
from sluice.versions import Version

IDENTITY = {"run": "test"}
PROMPT = 5000
"""Tokens of the prompt, which take two bytes each on disk."""


def whole(number: int, index: int) -> orchestrator_pb2.TrajectoryRecord:
    """A record that has the prompt itself, as an earlier release wrote it."""
    made = record(f"g{number}-{index}")
    trajectory = made.trajectory
    trajectory.token_ids[:] = [*range(1000, 1000 + PROMPT), index]
    trajectory.mask_runs[:] = [PROMPT, 1]
    asked = tokens_pb2.ChatMessage(role="user", content="a long question")
    said = made.conversation.messages.pop()
    made.conversation.MergeFrom(tokens_pb2.Conversation(messages=[asked, said], tools=[tokens_pb2.Tool(name="look")]))
    return made


def shared(number: int, count: int) -> list[SharedRecord]:
    """The same records, which have their prompt in common."""
    first = whole(number, 0)
    asked = tokens_pb2.Conversation(messages=first.conversation.messages[:1], tools=first.conversation.tools)
    prompt = Beginning.of(first.trajectory.token_ids[:PROMPT], asked)
    found = []
    for index in range(count):
        own = whole(number, index)
        del own.trajectory.token_ids[:PROMPT]
        del own.conversation.messages[0]
        own.conversation.ClearField("tools")
        found.append(SharedRecord(own, prompt))
    return found


def opened(directory: Path, **limits: int) -> Journal:
    return Journal(directory, IDENTITY, limits=JournalLimits(fsync_interval_s=0.0, **limits))


def stored(directory: Path) -> int:
    return sum(each.stat().st_size for each in (directory / "journal").iterdir())


async def test_a_prompt_is_on_disk_once_and_its_trajectories_are_whole_after_a_start(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.record_fact(drawn(1))
    before = stored(tmp_path)
    end_with(journal, 1, shared(1, 64))
    await journal.close()
    assert 2 * PROMPT < stored(tmp_path) - before < 3 * PROMPT + 64 * 200
    again = opened(tmp_path)
    group = again.ledger.groups[1]
    records = await again.trajectories(group)
    assert len({id(each.beginning) for each in records}) == 1, "in memory, too"
    assert await wholes(again, group) == [whole(1, index) for index in range(64)]
    await again.close()


async def test_digests_are_those_of_whole_trajectories() -> None:
    records = shared(1, 3)
    digests = [trajectory_digest(each) for each in Each(records, SharedRecord.whole_trajectory)]
    assert digests == [trajectory_digest(whole(1, index).trajectory) for index in range(3)]
    assert len(Each(records, SharedRecord.whole)[1:]) == 2
    assert [each.tokens for each in records] == [PROMPT + 1] * 3


async def test_a_journal_has_groups_of_both_kinds(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for number in (1, 2):
        journal.record_fact(drawn(number))
    end_with(journal, 1, [SharedRecord(whole(1, index)) for index in range(2)])
    end_with(journal, 2, [shared(2, 1)[0], SharedRecord(whole(2, 1))])
    await journal.close()
    again = opened(tmp_path)
    for number in (1, 2):
        assert await wholes(again, again.ledger.groups[number]) == [whole(number, index) for index in range(2)]
    await again.close()


async def test_a_chain_of_beginnings_is_put_together_in_order(tmp_path: Path) -> None:
    turns: list[Beginning] = []
    for turn in range(50):
        said = tokens_pb2.Conversation(messages=[tokens_pb2.ChatMessage(role="user", content=str(turn))])
        turns.append(Beginning.of([turn], said, turns[-1] if turns else None))
    own = [record(f"g1-{index}") for index in range(3)]
    records = [SharedRecord(each, turn) for each, turn in zip(own, (turns[49], None, turns[20]), strict=True)]
    journal = opened(tmp_path)
    journal.record_fact(drawn(1))
    end_with(journal, 1, records)
    await journal.close()
    again = opened(tmp_path)
    first, second, third = await wholes(again, again.ledger.groups[1])
    assert list(first.trajectory.token_ids) == [*range(50), *own[0].trajectory.token_ids]
    assert second == own[1]
    assert [each.content for each in third.conversation.messages] == [*map(str, range(21)), "hello"]
    assert len(again.ledger.groups[1].beginnings) == 50
    await again.close()


async def test_what_is_set_aside_takes_nothing_from_the_others(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.record_fact(drawn(1))
    end_with(journal, 1, shared(1, 3))
    aside = pb.TrajectoriesSetAside(group=1, trajectory_ids=["g1-0"], reason=Reason.TRAINER_REFUSES)
    journal.record_fact(pb.Fact(trajectories_set_aside=aside))
    assert await wholes(journal, journal.ledger.groups[1]) == [whole(1, 1), whole(1, 2)]
    await journal.close()
    again = opened(tmp_path)
    assert await wholes(again, again.ledger.groups[1]) == [whole(1, 1), whole(1, 2)]
    await again.close()


async def in_segments(directory: Path) -> Journal:
    """A group whose prompt lies in the segment before its records: each payload has one of its own."""
    journal = opened(directory, segment_bytes=1)
    begin_epoch(journal)
    accept(journal, 1, count=1)
    journal.record_fact(drawn(2))
    end_with(journal, 2, shared(2, 2))
    for number in (1, 2):
        journal.record_fact(made(journal, number))
        journal.record_fact(applied(journal, number))
    await journal.durable()
    return journal


async def test_the_segment_of_a_prompt_lives_as_long_as_those_of_its_trajectories(tmp_path: Path) -> None:
    journal = await in_segments(tmp_path)
    group = journal.ledger.applied_batches[2].groups[0]
    assert [each.place.segment for each in group.beginnings] == [2]
    assert [each.place.segment for each in group.trajectories] == [3, 4]
    accept(journal, 3, count=1)
    journal.record_fact(made(journal, 3))
    journal.record_fact(applied(journal, 3))
    journal.record_fact(covered(1))
    journal.record_fact(covered(3))
    await journal.durable()
    assert segment_numbers(tmp_path / "journal") == [2, 3, 4, 5], "a trainer that returns to batch 1 gets batch 2 again"
    await journal.close()
    again = opened(tmp_path, segment_bytes=1)
    assert again.ledger.last_segment == 5
    begin_epoch(again, Version(1, 1))
    (batch, _) = again.ledger.to_send
    assert await wholes(again, batch.groups[0]) == [whole(2, 0), whole(2, 1)]
    await again.close()


def place_of_prompt(directory: Path) -> Place:
    (fact,) = (each for _, each in read_facts(directory) if each.episodes_ended.beginnings)
    return Place.from_proto(fact.episodes_ended.beginnings[0].place)


async def test_a_damaged_prompt_is_noticed_and_the_audit_names_its_group(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.record_fact(drawn(1))
    end_with(journal, 1, shared(1, 2))
    await journal.close()
    assert not audit_run(tmp_path).differences
    place = place_of_prompt(tmp_path)
    path = segment_path(tmp_path / "journal", place.segment)
    content = bytearray(path.read_bytes())
    content[place.offset + 100] ^= 1
    path.write_bytes(content)
    assert [(each.side, each.trajectory) for each in audit_run(tmp_path).differences] == [("payloads", "g1")]
    again = opened(tmp_path)
    with pytest.raises(GroupDamagedError, match="damaged"):
        await again.trajectories(again.ledger.groups[1])
    await again.close()


async def test_the_audit_misses_the_segment_of_a_prompt(tmp_path: Path) -> None:
    journal = opened(tmp_path, segment_bytes=1)
    journal.record_fact(drawn(1))
    end_with(journal, 1, shared(1, 2))
    await journal.close()
    segment_path(tmp_path / "journal", place_of_prompt(tmp_path).segment).unlink()
    assert [each.trajectory for each in audit_run(tmp_path).differences] == ["g1"]


@pytest.mark.parametrize("lost", [False, True])
async def test_a_fork_takes_prompts_along_or_drops_their_groups(tmp_path: Path, lost: bool) -> None:
    journal = opened(tmp_path / "old", segment_bytes=1)
    journal.record_fact(drawn(1))
    end_with(journal, 1, shared(1, 2))
    await journal.close()
    if lost:
        segment_path(tmp_path / "old" / "journal", place_of_prompt(tmp_path / "old").segment).unlink()
    (tmp_path / "new" / "journal").mkdir(parents=True)
    ledger = folded(read_facts(tmp_path / "old"))
    linked = _link_segments(tmp_path / "old", ledger, tmp_path / "new")
    assert len(linked) == 3 - lost
    _, gone = _beginning(ledger, "new", "test/step_0@1", 0, linked)
    assert gone == lost
    assert ledger.count(Stage.READY) == 1 - lost
