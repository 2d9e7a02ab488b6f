import re

import pytest

from sluice.metric_names import METRICS, OWN_LOSS, SECTIONS, find


def test_every_row_says_what_it_is_in_one_sentence_and_stands_in_a_section() -> None:
    for each in METRICS:
        assert each.section in SECTIONS, each.name
        assert re.fullmatch(r"[A-Z0-9].*\.", each.text), each.name
        assert ". " not in each.text, each.name
    assert len({each.name for each in METRICS}) == len(METRICS)
    assert {each.section for each in METRICS} == set(SECTIONS)


def test_metrics_of_one_chart_stand_in_one_section_and_have_one_unit() -> None:
    charts = {each.chart: (each.section, each.unit) for each in METRICS if each.chart}
    assert {each.name for each in METRICS if each.chart and charts[each.chart] != (each.section, each.unit)} == set()


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("reward/mean", "reward/mean"),
        ("staleness/tokens_at_12", "staleness/tokens_at_N"),
        ("trainer/seconds/forward", "trainer/seconds/PHASE"),
        ("trainer/dropped_tokens/stale", "trainer/dropped_tokens/REASON"),
        ("eval/greedy_reward_mean", "eval[/ENVIRONMENT]/greedy_reward_mean"),
        ("eval/sums/reward_mean", "eval[/ENVIRONMENT]/reward_mean"),
        ("eval/a/b/pass_at_4_low", "eval[/ENVIRONMENT]/pass_at_K_low"),
        ("eval/sums/environment/right", "eval[/ENVIRONMENT]/environment/NAME"),
        ("environment/right", "environment/NAME"),
        ("environment/failed_calls", "environment/failed_calls"),
        ("environments/sums/reward_mean", "environments/ENVIRONMENT/reward_mean"),
        ("trainer/softened", OWN_LOSS.name),
    ],
)
def test_a_name_finds_its_row(name: str, row: str) -> None:
    found = find(name)
    assert found is not None
    assert found.name == row


@pytest.mark.parametrize("name", ["reward", "reward/mean/x", "staleness/tokens_at_", "weights/other_s", "loss"])
def test_a_name_that_no_release_writes_has_no_row(name: str) -> None:
    assert find(name) is None
