"""A batch that runs out of memory is trained with half the token budget; what does not fit then is refused with its reason."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import count
from pathlib import Path

import grpc
import pytest
import torch
from short_memory import hold, run_out
from small_learner import assert_same, batch, learner, state, train
from structlog.testing import capture_logs
from tiny_policy import ragged_batch, row, tiny_model

from sluice.rows_at_fault import ROWS
from sluice.rpc import SluiceError
from trainer_svc.checkpoint.batch_record import MemoryShortages
from trainer_svc.engine import optimizers
from trainer_svc.engine.out_of_memory import MemoryShortError, is_out_of_memory
from trainer_svc.service.learner import Learner

BUDGET = 160
SETTINGS = {"token_budget": BUDGET, "minibatches": 2, "epochs": 2}
TOLERANCE = 1e-5
"""Largest difference of a float32 weight that another packing makes in four steps of AdamW."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def begun(model: Path, directory: Path, **settings: object) -> Learner:
    policy = learner(model, directory, **(SETTINGS | settings))
    policy.restore(1, "")
    return policy


def apply(policy: Learner, number: int, seed: int | None = None):
    return policy.apply(batch(policy, number, ragged_batch(seed=seed or number)))


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - tensor).abs().max()) for name, tensor in other.items() if name.startswith("model."))


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("passes_before", [0, 2])
def test_a_step_that_runs_out_of_memory_is_made_once_with_half_the_budget(model, tmp_path, place, passes_before):
    one, other = begun(model, tmp_path / "one"), begun(model, tmp_path / "other")
    passes = count()
    run_out(one.engine, place, lambda: next(passes) >= passes_before)
    with capture_logs() as logs:
        short, whole = apply(one, 1), apply(other, 1)
    assert short.metrics.measured["token_budget_halved"] == 1.0
    assert "token_budget_halved" not in whole.metrics.measured
    assert list(short.record.results) == list(whole.record.results), "no optimizer step was made twice or left out"
    assert one.optimizer_steps == other.optimizer_steps == 4
    assert 0 < distance(state(one), state(other)) < TOLERANCE
    (said,) = [each for each in logs if each["event"].startswith("out of memory")]
    assert (said["token_budget"], said["error"]) == (
        BUDGET // 2,
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    )
    assert "token_budget" in said["remedy"]
    assert "token_budget_halved" not in apply(one, 2).metrics.measured, "the next batch has the whole budget"


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_batch_that_runs_out_at_once_is_trained_as_with_half_the_budget_in_the_settings(model, tmp_path, place):
    one, other = begun(model, tmp_path / "one"), begun(model, tmp_path / "other", token_budget=BUDGET // 2)
    run_out(one.engine, place, lambda: True)
    apply(one, 1)
    apply(other, 1)
    assert_same(state(one), state(other))


def test_the_pass_that_failed_holds_no_memory_when_it_is_repeated(model, tmp_path):
    policy = begun(model, tmp_path)
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def watch(_: object, __: object, output: torch.Tensor) -> None:
        alive.extend(each() is not None for each in held)
        if not held:
            held.append(weakref.ref(output))
            raise torch.OutOfMemoryError("CUDA out of memory.")

    policy.engine.network.model.base_model.layers[1].register_forward_hook(watch)
    apply(policy, 1)
    assert alive
    assert not any(alive)


def test_moments_for_which_there_is_no_room_in_the_first_step_are_made_in_the_next_try(model, tmp_path, monkeypatch):
    one, other = begun(model, tmp_path / "one"), begun(model, tmp_path / "other", token_budget=BUDGET // 2)
    calls, room = count(), optimizers._room

    def short(*arguments: object) -> torch.Tensor:
        if next(calls) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return room(*arguments)

    apply(other, 1)
    monkeypatch.setattr(optimizers, "_room", short)
    apply(one, 1)
    assert_same(state(one), state(other))


@pytest.mark.parametrize("steps_before", [0, 2])
def test_after_half_an_optimizer_step_the_next_epoch_trains_the_batch_from_weights_before_it(
    model, tmp_path, steps_before
):
    one, other = begun(model, tmp_path / "one"), begun(model, tmp_path / "other")
    for policy in (one, other):
        train(policy, 1)
        policy.begin_save(0).result(30)
    steps = count()
    run_out(one.engine, "optimizer", lambda: next(steps) >= steps_before)
    with pytest.raises(SluiceError, match="in the middle of an optimizer step") as ended:
        apply(one, 2)
    assert (ended.value.reason, one.version.number) == ("OUT_OF_MEMORY", 1)

    one.restore(2, "")
    other.restore(2, "")
    assert_same(state(one), state(other))
    assert apply(one, 2).metrics.measured["token_budget_halved"] == 1.0
    other.update.engine.budget.whole //= 2
    apply(other, 2)
    assert_same(state(one), state(other))
    assert not list(one.common.run_dir.glob("trainer/out_of_memory*")), "an applied batch is forgotten"


def test_batches_before_the_one_that_ran_out_have_the_whole_budget_when_they_are_sent_again(model, tmp_path):
    policy = begun(model, tmp_path)
    apply(policy, 1)
    run_out(policy.engine, "optimizer", lambda: True)
    with pytest.raises(SluiceError):
        apply(policy, 2)
    policy.restore(2, "")
    halved = [apply(policy, number).metrics.measured.get("token_budget_halved", 0.0) for number in (1, 2, 3)]
    assert halved == [0.0, 1.0, 0.0]


def test_another_process_knows_what_ran_out_of_memory(model, tmp_path):
    policy = begun(model, tmp_path)
    run_out(policy.engine, "optimizer", lambda: True)
    with pytest.raises(SluiceError):
        apply(policy, 1)
    other = learner(model, tmp_path, **SETTINGS)
    other.restore(2, "")
    assert apply(other, 1).metrics.measured["token_budget_halved"] == 1.0


def test_a_row_that_does_not_fit_alone_is_refused_by_its_place_and_the_rest_is_trained(model, tmp_path):
    rows = ragged_batch(seed=1)
    rows[5] = row([1] * 100, [2] * 10, name="long")
    policy = begun(model, tmp_path, token_budget=200)
    passes = hold(policy.engine, 100)
    with pytest.raises(SluiceError, match="up to 100 tokens") as ended:
        policy.apply(batch(policy, 1, rows))
    assert (ended.value.reason, passes[-1]) == ("OUT_OF_MEMORY", 109)
    policy.restore(2, "")
    sent = [each.sequence for each in batch(policy, 1, rows).decisions]
    with pytest.raises(
        SluiceError, match="rows of 109 tokens or more do not fit in memory, 1 of this batch"
    ) as refused:
        policy.shortages.check("b1", sent)
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "OUT_OF_MEMORY")
    assert refused.value.metadata[ROWS] == "5"
    rest = [*rows[:5], *rows[6:]]
    applied = policy.apply(batch(policy, 1, rest, batch_id="again"))
    assert [each.reason for each in applied.record.results] == [""] * len(rest)


def test_a_batch_that_does_not_fit_although_no_row_is_long_is_refused_once_with_the_remedy(model, tmp_path):
    rows = [row([number] * 10, [2] * 10, name=f"t{number}") for number in range(12)]
    policy = begun(model, tmp_path)
    hold(policy.engine, 30)
    with pytest.raises(SluiceError):
        policy.apply(batch(policy, 1, rows))
    policy.restore(2, "")
    sent = [each.sequence for each in batch(policy, 1, rows).decisions]
    policy.shortages.check("other", sent)
    with pytest.raises(SluiceError, match="lower token_budget") as refused:
        policy.shortages.check("b1", sent)
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "OUT_OF_MEMORY")
    policy.shortages.check("b1", sent)


def test_what_several_ranks_note_counts_as_one(tmp_path):
    first, second, third = (MemoryShortages(tmp_path, rank) for rank in range(3))
    first.note("b1", MemoryShortError("whole"))
    second.note("b1", MemoryShortError("half", at_half=True, row_tokens=40))
    third.note("b1", MemoryShortError("half", at_half=True, row_tokens=30))
    first.read()
    lengths = [20, 31, 32, 50]
    rows = [replace(row([1], [2] * length), trajectory_id=str(length)) for length in lengths]
    with pytest.raises(SluiceError, match="rows of 30 tokens or more do not fit in memory, 3 of") as refused:
        first.check("b1", rows)
    assert refused.value.metadata[ROWS] == "1-3"
    second.read()
    assert not second.halves("b1"), "a batch is refused once"


def test_a_damaged_note_is_ignored(tmp_path):
    (tmp_path / "out_of_memory.0.binpb").write_bytes(b"\xff\xff")
    noted = MemoryShortages(tmp_path, 0)
    noted.read()
    assert not noted.halves("b1")


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (torch.cuda.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Connection closed by peer"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_errors_that_say_that_memory_ran_out(error, is_one):
    assert is_out_of_memory(error) is is_one


def test_what_the_cpu_allocator_raises_is_known():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 58, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
