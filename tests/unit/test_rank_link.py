"""What stays in the store behind the commands, and what rank 0 hears of one that is not understood."""

from __future__ import annotations

import pytest
from lone_link import lone_link


def test_the_store_keeps_no_more_of_a_thousand_versions_than_of_four():
    with lone_link() as link:
        store = link._stores["publish"]
        kept = []
        for count in (4, 996):
            for _ in range(count):
                newest = link.post("publish", {"do": "publish"})
            kept.append(store.num_keys())
        assert kept[0] == kept[1]
        assert store.check([f"publish/{newest - 1}", f"publish/{newest}"]), "one rank may be one behind"


@pytest.mark.parametrize("text", ['["Dance", {}]', '["Stop", {"code": 0}]', '{"do": "load"}', "load"])
def test_rank_0_hears_of_a_command_that_another_rank_does_not_know(text: str):
    with lone_link() as link:
        link._stores["compute"].set("compute/1", text)
        with pytest.raises(RuntimeError, match="run the same release on every rank"):
            link.next("compute")
        assert "run the same release on every rank" in link.failure()
