"""The order of batches as a state machine: whatever is sent, batches are trained once, in order, within the bound."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice.versions import Version
from trainer_svc.service.admission import Admission, Known, RefusedError, Ticket

DIGEST = "d"


def ticket(
    number: int,
    *,
    epoch: int = 1,
    batch_id: str = "",
    target: int | None = None,
    digest: str = DIGEST,
    content: str = "c",
) -> Ticket:
    target_number = number if target is None else target
    return Ticket(batch_id or f"b{number}", number, Version(epoch, target_number), digest, content)


def opened(capacity: int = 2, number: int = 0, **held: Known) -> Admission[int]:
    admission: Admission[int] = Admission(capacity, DIGEST)
    admission.open(Version(1, number), held)
    return admission


def reason(admission: Admission[int], wrong: Ticket) -> str:
    with pytest.raises(RefusedError) as refused:
        admission.admit(wrong, 0)
    return refused.value.reason


def test_nothing_enters_before_an_epoch_is_open() -> None:
    assert reason(Admission(2, DIGEST), ticket(1)) == "NO_EPOCH"


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (ticket(1, epoch=2), "WRONG_EPOCH"),
        (ticket(1, digest="other"), "WRONG_TOKENIZER"),
        (ticket(2), "WRONG_SEQUENCE_NO"),
        (ticket(0), "WRONG_SEQUENCE_NO"),
        (ticket(1, target=2), "WRONG_TARGET_VERSION"),
    ],
)
def test_a_batch_in_the_wrong_place_is_refused(wrong: Ticket, expected: str) -> None:
    assert reason(opened(), wrong) == expected


def test_the_refusal_of_a_wrong_number_names_the_right_one() -> None:
    with pytest.raises(RefusedError, match="the next one is 5"):
        opened(number=4).admit(ticket(9), 0)


def test_only_a_full_queue_asks_to_retry() -> None:
    admission = opened()
    admission.admit(ticket(1), 1)
    admission.admit(ticket(2), 2)
    with pytest.raises(RefusedError) as full:
        admission.admit(ticket(3), 3)
    assert full.value.retry
    assert admission.take() == 1
    assert not admission.admit(ticket(3), 3), "a batch in training leaves room in the queue"


def test_a_repeat_is_recognised_while_queued_training_and_applied() -> None:
    admission = opened()
    admission.admit(ticket(1), 1)
    assert admission.admit(ticket(1), 99)
    assert admission.take() == 1
    assert admission.admit(ticket(1), 99)
    admission.finish()
    assert admission.admit(ticket(1), 99)
    assert admission.take() is None


def test_a_batch_that_a_checkpoint_holds_is_recognised() -> None:
    assert opened(number=7, b6=Known(6, "c"), b7=Known(7)).admit(ticket(7), 0)
    assert opened(number=7, b6=Known(6, "c"), b7=Known(7)).admit(ticket(6), 0)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [(ticket(2, batch_id="b1"), "BATCH_ID_REUSED"), (ticket(1, content="other"), "BATCH_CONTENT_DIFFERS")],
)
def test_an_id_cannot_name_two_batches(wrong: Ticket, expected: str) -> None:
    admission = opened()
    admission.admit(ticket(1), 1)
    with pytest.raises(RefusedError) as refused:
        admission.admit(wrong, 0)
    assert (refused.value.reason, refused.value.exists, refused.value.retry) == (expected, True, False)


def test_before_its_trajectories_arrive_a_repeat_is_known_by_id_and_number() -> None:
    admission = opened()
    admission.admit(ticket(1), 1)
    assert admission.check(ticket(1, content=""))


def test_a_new_epoch_forgets_the_batches_of_the_old_one() -> None:
    admission = opened()
    admission.admit(ticket(1), 1)
    admission.open(Version(2, 0), {})
    assert admission.take() is None
    assert not admission.admit(ticket(1, epoch=2), 1)


class Batches(RuleBasedStateMachine):
    """A client that sends anything, a trainer that takes and finishes, restarts in between; against a plain list."""

    @initialize(capacity=st.integers(1, 3))
    def begin(self, capacity: int) -> None:
        self.capacity = capacity
        self.admission: Admission[str] = Admission(capacity, DIGEST)
        self.epoch = 0
        self.accepted: list[str] = []
        self.taken: list[str] = []
        self.base = 0
        self.reopen(0)

    @rule(number=st.integers(0, 4))
    def reopen(self, number: int) -> None:
        self.epoch += 1
        self.base = number
        self.accepted, self.taken, self.training = [], [], False
        self.admission.open(Version(self.epoch, number), {})

    @rule(offset=st.integers(-2, 2), repeat=st.booleans())
    def send(self, offset: int, repeat: bool) -> None:
        number = self.base + len(self.accepted) + 1 + offset
        if repeat and self.accepted:
            number = self.base + len(self.accepted)
        sent = ticket(number, epoch=self.epoch, batch_id=f"e{self.epoch}b{number}")
        waiting = len(self.accepted) - len(self.taken)
        expected = number == self.base + len(self.accepted) + 1
        if sent.batch_id not in self.accepted and not (expected and waiting < self.capacity):
            with pytest.raises(RefusedError) as refused:
                self.admission.admit(sent, sent.batch_id)
            assert refused.value.retry == expected, "only a full queue asks to retry"
            return
        assert self.admission.admit(sent, sent.batch_id) == (sent.batch_id in self.accepted)
        if sent.batch_id not in self.accepted:
            self.accepted.append(sent.batch_id)

    @precondition(lambda self: not self.training)
    @rule()
    def take(self) -> None:
        batch_id = self.admission.take()
        if batch_id is None:
            assert len(self.taken) == len(self.accepted)
        else:
            self.taken.append(batch_id)
            self.training = True

    @precondition(lambda self: self.training)
    @rule()
    def finish(self) -> None:
        assert self.admission.finish() == Version(self.epoch, self.base + len(self.taken))
        self.training = False

    @invariant()
    def batches_are_taken_in_the_order_they_entered(self) -> None:
        assert self.taken == self.accepted[: len(self.taken)]

    @invariant()
    def the_queue_is_bounded(self) -> None:
        assert len(self.accepted) - len(self.taken) <= self.capacity
        assert self.admission.next_sequence_no == self.base + len(self.accepted) + 1


TestBatches = Batches.TestCase
