"""Ages of tokens, also across restarts that retired the version that sampled them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sluice.versions import BASE, Lineage, Version, VersionSpan
from trainer_svc.service.batches import token_staleness

# Epoch 1 ran to 10, its checkpoint at 4 began epoch 2, whose checkpoint at 6 began epoch 3.
LINEAGE = Lineage().begin(1, BASE).begin(2, Version(1, 4)).begin(3, Version(2, 6))


def test_within_an_epoch_staleness_is_the_distance_of_the_numbers() -> None:
    assert LINEAGE.staleness(Version(3, 7), Version(3, 9)) == 2
    assert LINEAGE.staleness(Version(3, 9), Version(3, 9)) == 0


def test_a_version_that_the_restart_built_upon_counts_on_across_epochs() -> None:
    assert LINEAGE.staleness(Version(1, 3), Version(2, 6)) == 3
    assert LINEAGE.staleness(Version(2, 6), Version(3, 6)) == 0
    assert LINEAGE.staleness(BASE, Version(3, 9)) == 9


def test_a_retired_version_counts_the_way_back_and_the_way_forth() -> None:
    c, now, v = 4, 5, 8
    assert LINEAGE.staleness(Version(1, v), Version(2, now)) == (v - c) + (now - c)
    assert LINEAGE.staleness(Version(1, v), Version(3, 9)) == (v - c) + (9 - c)
    assert LINEAGE.is_retired(Version(1, v), Version(2, now))
    assert not LINEAGE.is_retired(Version(1, c), Version(2, now))


def test_an_unknown_epoch_never_makes_a_token_younger() -> None:
    forgetful = Lineage().begin(3, Version(2, 6))
    for token in (Version(1, 3), Version(1, 8), Version(2, 9), Version(2, 2)):
        assert forgetful.staleness(token, Version(3, 9)) >= LINEAGE.staleness(token, Version(3, 9))


@st.composite
def lineages(draw: st.DrawFn) -> tuple[Lineage, dict[int, int]]:
    """A history of restarts, and the highest version of each epoch."""
    lineage, heights = Lineage(), {0: 0}
    for epoch in range(1, draw(st.integers(2, 5))):
        parent = draw(st.sampled_from(sorted(heights)))
        low = lineage.origins[parent].number if parent else 0
        origin = draw(st.integers(low, heights[parent]))
        lineage = lineage.begin(epoch, Version(parent, origin))
        heights[epoch] = origin + draw(st.integers(0, 5))
    return lineage, heights


@given(lineages(), st.data())
def test_staleness_is_a_distance_in_the_tree_of_versions(
    history: tuple[Lineage, dict[int, int]], data: st.DataObject
) -> None:
    lineage, heights = history

    def version() -> Version:
        epoch = data.draw(st.sampled_from(sorted(heights)))
        low = lineage.origins[epoch].number if epoch else 0
        return Version(epoch, data.draw(st.integers(low, heights[epoch])))

    one, two, three = version(), version(), version()
    assert lineage.staleness(one, one) == 0
    assert lineage.staleness(one, two) == lineage.staleness(two, one) >= abs(one.number - two.number)
    assert lineage.staleness(one, three) <= lineage.staleness(one, two) + lineage.staleness(two, three)


def test_spans_spread_over_the_trained_tokens() -> None:
    spans = [VersionSpan(0, Version(3, 7)), VersionSpan(2, Version(3, 8)), VersionSpan(3, Version(3, 9))]
    assert token_staleness(spans, 6, LINEAGE, Version(3, 9)).tolist() == [2, 2, 1, 0, 0, 0]
    assert token_staleness([], 0, LINEAGE, Version(3, 9)).dtype == np.int64
