"""The environments of a run: what an entry inherits, the short form, and what is refused."""

import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from orchestrator_svc.config import OrchestratorConfig
from sluice.config import ConfigError, check_tables_fit, dump_toml, load_run
from sluice.environments.processes import memory_look_s

TWO = """
[orchestrator]
group_size = 4
[orchestrator.sampling]
temperature = 0.7
max_tokens = 12
[[orchestrator.environments]]
environment = "examples/reverse_text/env.py:ReverseText"
ratio = 3
[[orchestrator.environments]]
name = "adding"
environment = "examples/sums/env.py:Sums"
group-size = 8
groups_per_s = "none"
[orchestrator.environments.sampling]
max_tokens = 20
"""


def test_an_entry_has_what_the_table_sets_and_it_does_not() -> None:
    reverse, adding = OrchestratorConfig(
        **tomllib.loads(TWO.replace("group-size", "group_size").replace('groups_per_s = "none"', ""))["orchestrator"]
    ).mix
    assert (reverse.name, reverse.ratio, reverse.group_size, reverse.sampling.max_tokens) == ("ReverseText", 3, 4, 12)
    assert (adding.name, adding.ratio, adding.group_size, adding.sampling.max_tokens) == ("adding", 1, 8, 20)
    assert adding.sampling.temperature == 0.7


def test_a_file_may_write_keys_with_dashes_and_unset_them_by_none(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(TWO)
    run = load_run(["@", str(tmp_path / "rl.toml")])
    assert [each.group_size for each in run.orchestrator.mix] == [4, 8]
    (tmp_path / "again.toml").write_text(dump_toml(run))
    assert load_run(["@", str(tmp_path / "again.toml")]).orchestrator.mix == run.orchestrator.mix


def test_the_short_form_is_a_list_of_one() -> None:
    (only,) = OrchestratorConfig(environment="a/b.py:Env", environment_args={"x": 1}, group_size=2).mix
    (listed,) = OrchestratorConfig(environments=[{"environment": "a/b.py:Env", "args": {"x": 1}}], group_size=2).mix
    assert only == listed
    assert only.name == "Env"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": "a", "environments": [{"environment": "b"}]}, "set one of them"),
        ({"environments": [{"environment": "m:E"}, {"environment": "n:E"}]}, "two environments are called 'E'"),
        ({"environments": [{"environment": "a", "rato": 3}]}, "rato"),
        ({"environments": [{"environment": "a", "ratio": 0}]}, "greater than 0"),
        (
            {"environments": [{"environment": "a"}, {"environment": "b", "advantage": "none"}]},
            "none must be that of all",
        ),
        ({"environments": [{"environment": "a", "group_size": 1}]}, "set group_size to 2"),
        ({"pools": {"easy_from": 0.1, "hard_to": 0.2}}, "must be below easy_from"),
        ({"pools": {"shares": dict.fromkeys(("new", "easy", "medium", "hard"), 0)}}, "no task could be drawn"),
    ],
)
def test_what_could_not_work_is_refused(settings, message) -> None:
    with pytest.raises(ValidationError, match=message):
        OrchestratorConfig(**settings)


def test_an_unknown_key_of_an_entry_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text('[[orchestrator.environments]]\nenvironment = "a"\nrato = 3\n')
    with pytest.raises(ConfigError, match="rato"):
        load_run(["@", str(tmp_path / "rl.toml")])


def test_the_example_of_the_page_can_be_loaded(tmp_path: Path) -> None:
    page = Path("docs/curriculum.md").read_text()
    (tmp_path / "rl.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    reverse, sums = load_run(["@", str(tmp_path / "rl.toml")]).orchestrator.mix
    assert (reverse.ratio, reverse.overlong.policy, reverse.sampling.max_tokens) == (3, "penalise", 12)
    assert (sums.group_size, sums.sampling.max_tokens, sums.pools.enabled, sums.groups_per_s) == (8, 20, True, 20)


def test_the_example_fits_together() -> None:
    run = load_run(["@", "examples/mixed/rl.toml"])
    check_tables_fit(run)
    assert [(each.name, each.ratio, each.objective) for each in run.orchestrator.mix] == [
        ("reverse_text", 3, ""),
        ("sums", 1, "sums"),
    ]


def test_memory_is_looked_at_more_often_the_less_room_is_left() -> None:
    assert memory_look_s(8192.0, 0.0) == memory_look_s(1e9, 0.0) == 1.0
    assert memory_look_s(4096.0, 0.0) == 0.5
    assert memory_look_s(100.0, 0.0) == memory_look_s(-1.0, 0.0) == 0.25
    assert memory_look_s(8192.0, 0.2) == 2.0, "looks take a tenth of a core at most"
