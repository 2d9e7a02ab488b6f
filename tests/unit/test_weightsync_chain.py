"""Ways to versions, and what has to stay, on random histories of anchors, deltas and adapters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.versions import Version
from weightsync.service.chain import (
    Form,
    Forms,
    VersionForm,
    chain_starts,
    delta_chain,
    find_path,
    is_reachable,
    keep,
    newest_dense,
    newest_model,
    next_dense,
    removal_order,
)

COPY_BYTES = 100

Versions = dict[Version, Forms]


def version(number: int) -> Version:
    return Version(1, number)


def anchor() -> Forms:
    return Forms("x", dense_bytes=COPY_BYTES, copy_bytes=COPY_BYTES)


def delta(base: int, size: int = 10, *, dense: bool = False) -> Forms:
    return Forms("x", COPY_BYTES if dense else None, size, base=version(base), copy_bytes=COPY_BYTES)


@st.composite
def histories(draw: st.DrawFn) -> Versions:
    """A trainer's history: an anchor first, then mostly deltas of the version before; some have dense forms too."""
    versions = {version(0): anchor()}
    latest = 0
    for number in range(1, draw(st.integers(1, 12)) + 1):
        kind = draw(st.sampled_from(["delta", "delta", "delta", "dense delta", "anchor", "adapter"]))
        if kind == "adapter":
            versions[version(number)] = Forms("x", adapter_bytes=1, base=version(latest))
            continue
        size = draw(st.integers(1, 60))
        versions[version(number)] = anchor() if kind == "anchor" else delta(latest, size, dense=kind == "dense delta")
        latest = number
    return versions


def subsets(versions: Versions) -> st.SearchStrategy[set[Version]]:
    return st.sets(st.sampled_from(sorted(versions)), max_size=3)


def way_bytes(versions: Versions, way: list[VersionForm]) -> int:
    sizes = {Form.DENSE: "dense_bytes", Form.DELTA: "delta_bytes", Form.ADAPTER: "adapter_bytes"}
    return sum(getattr(versions[step.version], sizes[step.form]) for step in way)


@given(histories(), st.data())
def test_a_way_leads_from_what_is_held_to_the_version_without_a_gap(versions: Versions, data: st.DataObject) -> None:
    target, held = data.draw(st.sampled_from(sorted(versions))), data.draw(st.sampled_from(sorted(versions)))
    way = find_path(versions, target, held)
    assert way is not None
    at = held
    for step in way:
        if step.form is Form.DELTA:
            assert versions[step.version].base == at
        at = step.version
    assert at == target
    from_nothing = find_path(versions, target)
    assert from_nothing is not None
    assert from_nothing[0].form is not Form.DELTA
    assert target == held or way_bytes(versions, way) <= way_bytes(versions, from_nothing)
    chain = None if versions[target].is_adapter else delta_chain(versions, held, target)
    if chain is not None:
        assert way_bytes(versions, way) <= sum(versions[each].delta_bytes or 0 for each in chain)


@given(histories(), st.data())
def test_what_is_kept_is_enough_for_everybody_who_counts(versions: Versions, data: st.DataObject) -> None:
    wanted, held, served = (data.draw(subsets(versions)) for _ in range(3))
    kept = keep(versions, wanted, held, served, data.draw(st.integers(1, 5)))
    left = {
        each: forms if each in kept.dense or forms.delta_bytes is None else replace(forms, dense_bytes=None)
        for each, forms in versions.items()
        if each in kept.versions
    }
    assert all(is_reachable(left, each) for each in left)
    assert wanted | held | served <= left.keys()
    assert all(left[each] == versions[each] for each in held)
    for each, forms in left.items():
        assert not forms.is_adapter or forms.base in left, each
    latest, target = newest_dense(versions), newest_model(versions)
    assert latest is not None
    assert left[latest].dense_bytes is not None
    for each in served:
        chain = None if target is None else delta_chain(versions, each, target)
        if chain and sum(versions[step].delta_bytes or 0 for step in chain) < COPY_BYTES:
            assert target is not None
            assert delta_chain(left, each, target) == chain


@given(histories(), st.data())
def test_nothing_is_removed_before_what_is_lost_without_it(versions: Versions, data: st.DataObject) -> None:
    kept = keep(versions, data.draw(subsets(versions)), data.draw(subsets(versions)), (), 3).versions
    left = dict(versions)
    order = removal_order(versions, versions.keys() - kept)
    assert sorted(order) == sorted(versions.keys() - kept)
    for each in order:
        del left[each]
        assert all(is_reachable(left, other) for other in left)
        assert all(forms.base in left for forms in left.values() if forms.is_adapter)


@given(histories(), st.integers(1, 4))
def test_chains_start_from_anchors_at_most_so_far_apart(versions: Versions, every: int) -> None:
    chosen = chain_starts(versions, every)
    assert all(versions[each].dense_bytes is not None for each in chosen)
    assert {each for each, forms in versions.items() if forms.dense_bytes and not forms.delta_bytes} <= chosen
    for each, forms in versions.items():
        if forms.dense_bytes is not None and each not in chosen:
            way = find_path(versions, each, dense=chosen)
            assert way is not None
            assert len(way) - 1 < every
            assert 2 * way_bytes(versions, way[1:]) <= COPY_BYTES


def test_dense_forms_between_anchors_are_given_up() -> None:
    versions = {version(0): anchor()} | {version(n): delta(n - 1, 1, dense=True) for n in range(1, 41)}
    assert chain_starts(versions, 16) == {version(0), version(16), version(32)}
    kept = keep(versions, [version(40), version(39), version(38)], (), (), 16)
    assert kept.dense == {version(32), version(40)}
    assert kept.versions == {version(n) for n in range(32, 41)}


def test_a_chain_that_outgrew_half_a_copy_has_an_anchor() -> None:
    versions = {version(0): anchor()} | {version(n): delta(n - 1, 20, dense=True) for n in range(1, 7)}
    assert chain_starts(versions, 16) == {version(0), version(3), version(6)}


@pytest.mark.parametrize(("size", "stays"), [(20, True), (60, False)])
def test_the_deltas_to_the_newest_stay_for_a_live_replica_while_they_are_smaller_than_a_copy(
    size: int, stays: bool
) -> None:
    versions = {version(0): anchor(), version(1): delta(0, size, dense=True), version(2): delta(1, size, dense=True)}
    kept = keep(versions, [version(2)], (), [version(0)], 1)
    assert (version(1) in kept.versions) == stays


def test_the_next_dense_form_is_that_of_the_newest_that_can_be_reached() -> None:
    versions = {version(0): anchor(), version(1): delta(0), version(2): delta(1), version(3): delta(2)}
    way = [VersionForm(version(0), Form.DENSE), *(VersionForm(version(n), Form.DELTA) for n in (1, 2, 3))]
    assert next_dense(versions) == way
    versions[version(2)] = replace(versions[version(2)], damaged=True)
    assert next_dense(versions) == way[:2]
    assert find_path(versions, version(3)) is None
    assert next_dense({version(0): anchor(), version(1): Forms("x", adapter_bytes=1, base=version(0))}) is None
