"""`agree`: if one rank raises, all ranks raise, so that none blocks in the next all-reduce."""

from __future__ import annotations

import pytest
from thread_ranks import on_ranks

from trainer_svc.parallel.mesh import ALONE, OtherRankError, OtherRankRefusedError, Ranks, agree


def raised(error: Exception | None, ranks: Ranks) -> BaseException | None:
    """What `agree` raises on a rank whose work raises `error`; the ranks then still meet in the next sum."""

    def work() -> None:
        if error is not None:
            raise error

    seen: BaseException | None = None
    try:
        agree(ranks, work)
    except Exception as caught:  # noqa: BLE001
        seen = caught
    assert ranks.total({"ranks": 1.0}) == {"ranks": float(ranks.size)}
    return seen


@pytest.mark.parametrize(
    "error",
    [ValueError("no reward"), OSError("disk full"), RuntimeError("CUDA out of memory"), MemoryError(), KeyError("x")],
)
def test_an_error_of_any_kind_on_one_rank_is_raised_on_all(error: Exception) -> None:
    first, own, last = on_ranks([None, error, None], raised)
    assert own is error
    for other in (first, last):
        assert isinstance(other, OtherRankError)
        assert str(other) == f"rank 1 raised {type(error).__name__}: {error}"


def test_the_other_ranks_refuse_a_batch_that_one_refuses() -> None:
    other, _ = on_ranks([None, ValueError("no reward")], raised)
    assert isinstance(other, ValueError)
    other, _ = on_ranks([None, OSError("disk full")], raised)
    assert not isinstance(other, OtherRankRefusedError)


def test_ranks_that_fail_together_raise_each_its_own_error() -> None:
    errors = [ValueError("of rank 0"), OSError("of rank 1")]
    assert on_ranks(errors, raised) == errors


def test_work_that_no_rank_fails_gives_each_rank_its_own_result() -> None:
    assert on_ranks([3, 4], lambda share, ranks: agree(ranks, lambda: share + 1)) == [4, 5]
    assert agree(ALONE, lambda: 7) == 7
