"""What stays in the store behind the commands."""

from __future__ import annotations

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
