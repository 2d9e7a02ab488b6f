"""What a run remembers of the episodes that external agents run, after its process was killed at any moment."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_facts import accept, applied, begin_epoch, covered, drawn, dropped, end, made
from session_facts import delivered, generation, given_up, granted, lease_ended, opened, recorded, rewarded, submitted

from orchestrator_svc.journal import ledger
from orchestrator_svc.journal.external import EPISODE, GROUP_ENDED, SUBMITTED, EndedSession
from orchestrator_svc.journal.facts import LedgerError
from orchestrator_svc.journal.ledger import folded
from orchestrator_svc.journal.segments import segment_numbers
from orchestrator_svc.journal.store import Journal, JournalLimits, read_facts
from sluice.v1 import session_pb2


def open_journal(directory: Path) -> Journal:
    return Journal(directory, {"run": "r"}, limits=JournalLimits(fsync_interval_s=0.0, segment_bytes=1))


def lived(journal: Journal, group: int) -> None:
    """Lend both episodes of a group: the first is sampled twice and submitted, the second is given up and opened again."""
    journal.record_fact(drawn(group))
    journal.record_fact(granted(group, 1, [0, 1]))
    journal.record_fact(opened(group, 0))
    journal.record_fact(opened(group, 1))
    journal.record_fact(recorded(journal, group, 0, generation("a", [1, 2], [3, 4], [5])))
    journal.record_fact(recorded(journal, group, 0, generation("b", [1, 2, 3, 4, 9], [6], parent="a/0")))
    for request in ("lost", "late"):
        journal.record_fact(recorded(journal, group, 0, generation(request, [7], [8]), undelivered=True))
    journal.record_fact(delivered(group, 0, "late"))
    journal.record_fact(rewarded(group, 0, 0.5))
    journal.record_fact(rewarded(group, 0, 0.25, generation_id="a/1"))
    journal.record_fact(submitted(group, 0, truncated=True))
    journal.record_fact(given_up(group, 1))
    journal.record_fact(granted(group, 2, [1], principal="bob"))
    journal.record_fact(opened(group, 1, attempt=1, lease=2))


async def test_a_start_finds_leases_sessions_and_rewards_as_they_were(tmp_path) -> None:
    journal = open_journal(tmp_path)
    lived(journal, 1)
    await journal.durable()
    assert folded(read_facts(tmp_path)) == journal.ledger
    await journal.close()
    again = open_journal(tmp_path)
    external = again.ledger.groups[1].external
    assert external is not None
    assert [(each.principal, each.episodes) for each in external.leases.values()] == [("ann", {0}), ("bob", {1})]
    first, second = external.sessions
    assert (first.name, second.name) == ("g1-0-0", "g1-1-1")
    assert first.branches() == [("a/1",), ("a/0", "b/0"), ("late/0",)]
    assert first.rewards[EPISODE] == 0.5
    assert first.trajectory_ids == ("g1-0.0", "g1-0.1", "g1-0.2")
    assert again.ledger.ended_sessions["g1-1-0"] == EndedSession("ann", "IDLE", (), None)
    found = await again.read([each.place for each in external.requests], session_pb2.RecordedGeneration)
    assert [each.request_id for each in found] == ["a", "b", "lost", "late"]
    await again.close()


async def test_payloads_of_sessions_are_kept_while_their_group_runs_and_deleted_when_a_checkpoint_covers_it(
    tmp_path,
) -> None:
    journal = open_journal(tmp_path)
    begin_epoch(journal)
    lived(journal, 1)
    await journal.durable()
    needed = journal.ledger.first_needed_segment()
    assert needed == min(each.place.segment for each in journal.ledger.groups[1].external.requests)
    end(journal, 1)
    assert journal.ledger.groups[1].external is None, "the trajectories have what was sampled"
    later = journal.ledger.first_needed_segment()
    assert later is not None
    assert later > needed
    for number in (1, 2, 3):
        if number > 1:
            accept(journal, number)
        journal.record_fact(made(journal, number))
        journal.record_fact(applied(journal, number))
        journal.record_fact(covered(number))
        await journal.durable()
    assert segment_numbers(tmp_path / "journal")[0] > later
    await journal.close()


async def test_a_group_that_ends_leaves_only_how_its_sessions_ended(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ledger, "KEPT_SESSIONS", 4)
    journal = open_journal(tmp_path)
    lived(journal, 1)
    journal.record_fact(dropped(1, "EPISODE_DEADLINE"))
    assert journal.ledger.groups == {}
    ended = journal.ledger.ended_sessions
    assert {name: (each.principal, each.reason) for name, each in ended.items()} == {
        "g1-1-0": ("ann", "IDLE"),
        "g1-0-0": ("ann", SUBMITTED),
        "g1-1-1": ("bob", GROUP_ENDED),
    }
    assert ended["g1-0-0"].trajectory_ids == ("g1-0.0", "g1-0.1", "g1-0.2")
    for number in (2, 3):
        journal.record_fact(drawn(number))
        journal.record_fact(granted(number, 1, [0, 1]))
        journal.record_fact(opened(number, 0))
        journal.record_fact(opened(number, 1))
        journal.record_fact(dropped(number, "EPISODE_DEADLINE"))
    assert list(journal.ledger.ended_sessions) == ["g2-0-0", "g2-1-0", "g3-0-0", "g3-1-0"], "the last ones alone"
    await journal.close()


async def test_a_group_that_is_drawn_again_keeps_what_was_lent_of_it(tmp_path) -> None:
    journal = open_journal(tmp_path)
    lived(journal, 1)
    journal.record_fact(drawn(1, attempt=1))
    assert [each.name for each in journal.ledger.groups[1].external.sessions] == ["g1-0-0", "g1-1-1"]
    await journal.close()


async def test_facts_of_external_episodes_that_cannot_be_true_are_not_written(tmp_path) -> None:
    journal = open_journal(tmp_path)
    lived(journal, 1)
    facts = journal.ledger.last_seq
    impossible = [
        granted(2, 1, [0]),  # no such group
        granted(1, 2, [1]),  # the number was given away
        granted(1, 3, [1]),  # it is lent
        granted(1, 3, []),
        opened(1, 0),  # it is open
        opened(1, 1, attempt=2, lease=2),
        opened(1, 0, attempt=0, lease=2),  # another lease has it
        recorded(journal, 1, 0, generation("c", [1], [2])),  # it was submitted
        recorded(journal, 1, 1, generation("c", [1], [2], parent="b/0"), attempt=1),  # of another session
        recorded(journal, 1, 1, generation("c", [1], [2]), attempt=0),  # it was given up
        rewarded(1, 0, 1.0, branch="c/0"),
        submitted(1, 0),
        submitted(1, 1, attempt=1, branches=[["a/0"]]),
        given_up(1, 0),
        given_up(1, 5),
        lease_ended(1, 2),  # its episode is open
        lease_ended(1, 7),
    ]
    for fact in impossible:
        with pytest.raises(LedgerError):
            journal.record_fact(fact)
    assert journal.ledger.last_seq == facts
    await journal.durable()
    assert folded(read_facts(tmp_path)) == journal.ledger
    await journal.close()


async def test_the_end_of_a_lease_gives_back_what_was_not_opened_and_ends_the_wait_for_a_reward(tmp_path) -> None:
    journal = open_journal(tmp_path)
    journal.record_fact(drawn(1))
    journal.record_fact(granted(1, 1, [0, 1]))
    journal.record_fact(opened(1, 0))
    journal.record_fact(recorded(journal, 1, 0, generation("a", [1], [2])))
    journal.record_fact(submitted(1, 0, reward_follows=True))
    external = journal.ledger.groups[1].external
    assert (external.on_offer, external.slots[0].settled) == ([], False)
    journal.record_fact(lease_ended(1, 1))
    assert (external.on_offer, external.slots[0].settled, external.complete) == ([1], True, False)
    await journal.close()


async def test_a_submission_that_waits_is_settled_by_the_reward_of_the_episode_or_of_all_its_branches(tmp_path) -> None:
    journal = open_journal(tmp_path)
    journal.record_fact(drawn(1))
    journal.record_fact(granted(1, 1, [0, 1]))
    for episode in (0, 1):
        journal.record_fact(opened(1, episode))
        journal.record_fact(recorded(journal, 1, episode, generation("a", [1], [2], [3])))
        journal.record_fact(submitted(1, episode, reward_follows=True))
    slots = journal.ledger.groups[1].external.slots
    journal.record_fact(rewarded(1, 0, 1.0))
    assert [each.settled for each in slots] == [True, False]
    journal.record_fact(rewarded(1, 1, 1.0, branch="a/0"))
    assert not slots[1].settled
    journal.record_fact(rewarded(1, 1, 0.0, branch="a/1"))
    assert journal.ledger.groups[1].external.complete
    await journal.close()
