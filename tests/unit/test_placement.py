"""Which replica a request goes to, alone and in a simulated fleet."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from sluice.sampling.placement import Homes, Load, place

LOADS = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 64)), min_size=1, max_size=8).map(
    lambda rows: [Load(f"r{number}", samples, places) for number, (samples, places) in enumerate(rows)]
)


@given(LOADS, st.integers(0, 9), st.floats(0, 2))
def test_the_choice_is_never_busier_than_the_margin_allows(loads: list[Load], home: int, margin: float) -> None:
    chosen = next(each for each in loads if each.target == place(loads, f"r{home}", margin))
    least = min(each.share for each in loads)
    assert chosen.share <= least + margin
    assert chosen.target == f"r{home}" or chosen.share == least
    assert chosen.share < 1 or least >= 1 or chosen.share == least


def test_load_counts_by_the_places_of_a_replica() -> None:
    assert place([Load("small", 8, 8), Load("large", 30, 64)], "", 0.25) == "large"


def test_the_replica_with_the_prefix_is_left_when_it_has_much_more_to_do() -> None:
    assert place([Load("home", 26, 64), Load("other", 10, 64)], "home", 0.25) == "home"
    assert place([Load("home", 27, 64), Load("other", 10, 64)], "home", 0.25) == "other"


def test_a_replica_without_a_place_left_is_no_home_while_another_has_places() -> None:
    assert place([Load("home", 64, 64), Load("other", 60, 64)], "home", 0.25) == "other"
    assert place([Load("home", 70, 64), Load("other", 64, 64)], "home", 0.25) == "home", "both wait"


def test_the_most_specific_key_counts_first() -> None:
    homes = Homes()
    homes.remember(["group-1/0", "group"], "a")
    homes.remember(["group-1/1", "group"], "b")
    assert homes.find(["group-1/1", "group"]) == "b"
    assert homes.find(["group-1/2", "group"]) == "a", "where the group began"
    homes.remember(["group-1/0", "group"], "b")
    assert homes.find(["group-1/0"]) == "b", "where the episode is now"


def test_keys_are_bounded_and_forgotten_with_their_replica() -> None:
    homes = Homes(most=100)
    for number in range(1000):
        homes.remember([f"group-{number}"], "a" if number % 2 else "b")
    assert len(homes) == 100
    homes.forget("a")
    assert len(homes) == 50
    assert not homes.find(["group-999"])
    assert homes.find(["group-998"]) == "b"


def simulate(turns: int, group: int, *, affinity: bool) -> tuple[float, float]:
    """Run groups of episodes of several turns over four replicas; one of them is slow. Time is counted in ticks.

    Returns:
        The share of turns, after the first of a group, that went to a replica with their prefix; how much busier than the mean
        the busiest replica was, as a mean over time.
    """
    rng, homes = random.Random(3), Homes()
    places = {"r0": 64, "r1": 64, "r2": 64, "r3": 32}
    samples = dict.fromkeys(places, 0)
    prefixes: dict[str, str] = {}
    events: list[tuple[int, int, int, str]] = []  # end, group, episode, target; a turn ends and the next one begins
    hits = asked = 0
    excess: list[float] = []
    left: dict[tuple[int, int], int] = {}
    next_group = 0

    def ask(number: int, episode: int, now: int) -> None:
        nonlocal hits, asked
        keys = [f"{number}-{episode}", f"{number}"]
        loads = [Load(name, samples[name], places[name]) for name in places]
        target = place(loads, homes.find(keys) if affinity else "", 0.25)
        homes.remember(keys, target)
        known = prefixes.get(keys[0]) or prefixes.get(keys[1])  # of its own turns, or at first of its group
        if known:
            asked += 1
            hits += target == known
        prefixes[keys[0]] = target
        prefixes.setdefault(keys[1], target)
        samples[target] += 1
        slow = 2 if target == "r3" else 1
        events.append((now + slow * rng.randint(5, 60), number, episode, target))

    for now in range(600):
        while len(left) < 160:  # episodes at a time
            for episode in range(group):
                left[next_group, episode] = turns
                ask(next_group, episode, now)
            next_group += 1
        for each in [event for event in events if event[0] <= now]:
            events.remove(each)
            _, number, episode, target = each
            samples[target] -= 1
            left[number, episode] -= 1
            if left[number, episode]:
                ask(number, episode, now)
            else:
                del left[number, episode]
        if now > 60:
            shares = [samples[name] / places[name] for name in places]
            excess.append(max(shares) - sum(shares) / len(shares))
    return hits / max(1, asked), sum(excess) / len(excess)


def test_a_fleet_stays_balanced_and_most_turns_find_their_prefix() -> None:
    hits, excess = simulate(turns=4, group=8, affinity=True)
    hits_without, excess_without = simulate(turns=4, group=8, affinity=False)
    assert hits > 0.95
    assert hits_without < 0.8, "or the simulation shows nothing"
    assert excess < 0.1
    assert excess_without < 0.1
