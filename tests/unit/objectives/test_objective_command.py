"""`sluice objective`: what it prints, what it accepts, and how it refuses; objectives of the user's own among them."""

from __future__ import annotations

import io
import json
import math

import pytest
from by_hand import BATCH, FORMULAS, as_case, clip_form, taken
from golden import expect, result_of

from sluice.cli.main import main
from sluice.config import ConfigError
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective

SIMPLE = {
    "preset": "grpo",
    "params": {"eps_low": 0.2, "eps_high": 0.2, "kl_coef": 0.04},
    "sequences": [
        {"logp": [-1.0, -0.5], "behaviour_logp": [-1.0, -0.5], "ref_logp": [-1.0, -0.5], "advantage": 1.0, "mask": [0, 1], "group_id": "a"},
        {"logp": [-2.0], "behaviour_logp": [-2.0], "ref_logp": [-2.0], "advantage": -2.0, "mask": [True], "group_id": 7},
    ],
}  # fmt: skip


@pytest.mark.parametrize("source", ["file", "-"])
def test_it_prints_one_json_object_with_loss_gradient_and_metrics(source, tmp_path, capsys, monkeypatch):
    text = json.dumps(SIMPLE)
    (tmp_path / "case.json").write_text(text)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["objective", "--case", str(tmp_path / "case.json") if source == "file" else "-"]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed)
    assert printed.count("\n") == 1
    assert result["loss"] == pytest.approx(-(1.0 - 2.0) / 2)
    assert result["grad"] == [[0.0, -0.5], [1.0]]
    assert result["metrics"]["loss_tokens"] == 2
    assert all(isinstance(value, float) for value in result["metrics"].values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preset": "gpro"}, "no objective 'gpro'"),
        ({"params": {"gamma_ray": 1}}, "gamma_ray: there is no such field; the fields are advantage, aggregation, cap"),
        ({"params": {"correction": {"C": 1}}}, "correction.C: there is no such field; the fields are kind, cap"),
        ({"sequences": [{"logp": [-1.0], "weight": 2}]}, "sequences.0.weight: there is no such field; the fields are logp"),
        ({"params": {"entropy_coef": 0.1}}, "give every sequence its entropy"),
        ({"sequences": []}, "sequences: List should have at least 1"),
        ({"sequences": [{"logp": [-1.0], "behaviour_logp": [-1.0, -2.0]}]}, "sequences.0: behaviour_logp has 2 entries and logp 1"),
        ({"sequences": [{"logp": [-1.0], "mask": [0]}]}, "no token has mask 1"),
        ({"sequences": [{"logp": [None], "behaviour_logp": [-1.0]}]}, "logp is null at a token whose mask is 1"),
        ({"sequences": [{"logp": [-1.0], "advantage": 1.0}]}, "has no behaviour_logp, which grpo reads"),
        ({"sequences": [{"logp": [-1.0], "behaviour_logp": [None], "ref_logp": [-1.0], "advantage": 1}]}, "no loss token is left"),
        ({"sequences": [{"logp": [-1.0], "behaviour_logp": [-1.0], "advantage": 1.0}]}, "no reference log-probabilities"),
        ({"sequences": [{"logp": [-1.0], "behaviour_logp": [-1.0]}]}, "an advantage, or every one a reward"),
        ({"params": {"correction": {"kind": "token_tis"}}}, "1 in the bypass form"),
        ({"params": {"proximal": "recompute", "correction.kind": "token_tis"}}, "has no proximal_logp"),
        ({"params": {"proximal": "loglinear", "correction": "token_tis"}}, "needs version, and versions"),
        ({"params": {"preset": "aipo"}}, "write preset beside params"),
        ({"params": {"kl_coef": 0.1, "kl_where": "reward"}}, "kl_where to loss"),
        ({"params": {"kl_coef": 0.1, "kl_kind": "k1"}}, "expected gradient is zero"),
        ({"sequences": [{"logp": [math.nan], "behaviour_logp": [-1.0], "advantage": 1.0}]}, "logp is nan at a token"),
        ({"sequences": [{"logp": [-1.0], "behaviour_logp": [-1.0], "proximal_logp": [None]}]}, "proximal_logp is null at a token"),
        ({"sequences": [{"logp": [-1.0], "proximal_logp": [-1.0]}, {"logp": [-1.0]}]}, "proximal_logp is missing in sequences[1]"),
        ({"preset": "ppo", "sequences": [{"logp": [-1.0], "behaviour_logp": [-1.0], "values": [0.0], "reward": math.nan}]}, "reward: Input should be a finite number"),
        ({"preset": "aipo", "params": {}, "sequences": [{"logp": [-1e308], "behaviour_logp": [-1e308], "advantage": 10}]}, "the result is not finite"),
    ],
)  # fmt: skip
def test_a_case_that_cannot_be_evaluated_is_refused_with_what_is_wrong(change, message, tmp_path, capsys):
    (tmp_path / "case.json").write_text(json.dumps(SIMPLE | change))
    assert main(["objective", "--case", str(tmp_path / "case.json")]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_case_is_refused(tmp_path, capsys):
    assert main(["objective", "--case", str(tmp_path / "absent.json")]) == 2
    (tmp_path / "broken.json").write_text("{")
    assert main(["objective", "--case", str(tmp_path / "broken.json")]) == 2
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert main(["objective", "--case", str(tmp_path / "deep.json")]) == 2
    errors = capsys.readouterr().err
    assert "cannot read the case" in errors
    assert errors.count("the case is not JSON") == 2


def test_parameters_of_tables_may_be_nested_or_dotted():
    nested = result_of(as_case("dapo", {"correction": {"kind": "token_tis", "cap": 1.1}}, proximal=True))
    dotted = result_of(as_case("dapo", {"correction.kind": "token_tis", "correction.cap": 1.1}, proximal=True))
    assert nested == dotted


def test_advantages_are_computed_from_rewards_where_none_are_given():
    case = as_case("grpo", {"aggregation": "token"})
    for sequence, reward in zip(case["sequences"], (1.0, 3.0, 5.0, 7.0), strict=True):
        del sequence["advantage"]
        sequence["reward"] = reward
    result = result_of(case)
    spread = 2.0**0.5 + 1e-6
    assert [row[0] for row in result["advantages"]] == pytest.approx([-1 / spread, 1 / spread, 0.0, 0.0])


def test_the_critic_is_evaluated_where_there_are_values():
    sequence = {
        "logp": [-1.0, -1.0],
        "behaviour_logp": [-1.0, -1.0],
        "old_values": [0.0, 0.5],
        "values": [0.1, 2.0],
        "reward": 1.0,
    }
    result = result_of({"preset": "ppo", "sequences": [sequence]})
    assert result["advantages"] == [[1.0, 0.5]]
    # Returns are 1 at both tokens; the second value moved by more than 0.5 to 2, clipped to 1.
    assert result["value_loss"] == pytest.approx(0.5 * (0.9**2 + 1.0) / 2)
    assert result["value_grad"] == [pytest.approx([-0.45, 0.5])]


def test_an_advantage_that_is_given_needs_no_reference_for_a_kl_in_the_reward():
    case = as_case("reinforce_pp")
    for sequence in case["sequences"]:
        del sequence["ref_logp"]
    assert result_of(case)["loss"] == result_of(as_case("ppo"))["loss"]


def test_golden_objective_by_import_path_with_its_own_parameters():
    def formula(token, row):
        return -3.0 * token.r**2 * token.a / 2, -3.0 * token.r**2 * token.a

    result = expect("my_objective:squared_ratio", formula, {"strength": 3.0})
    above = sum(token.q > 1 for row in BATCH for token in taken(row))
    assert result["metrics"]["above_one"] == pytest.approx(above / 13)
    corrected = {"strength": 3.0, "correction": {"kind": "token_tis"}, "aggregation": "sequence"}

    def weighted(token, row):
        value, slope = formula(token, row)
        return min(token.rho, 2.0) * value, min(token.rho, 2.0) * slope

    expect("my_objective:squared_ratio", weighted, corrected, aggregation="sequence", proximal=True)


def test_an_own_objective_is_configured_like_any_other():
    params = {"strength": 2.0, "side": "low", "hard": True}
    objective = Objective.of(ObjectiveConfig(preset="my_objective:with_options", params=params, aggregation="prompt"))
    assert objective.resolved.parameters == params
    assert objective.resolved.needs_behaviour
    assert not objective.resolved.vanishes_without_advantage


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("my_objective:cubed", "has no function 'cubed'"),
        ("my_objective:NOT_A_FUNCTION", "has no function"),
        ("my_objective:already_summed", "return one loss per token"),
        ("os:getcwd", "called with the terms of a micro-batch and params"),
    ],
)
def test_an_own_objective_that_cannot_be_used_is_refused(preset, message):
    with pytest.raises(ValueError, match=message):
        result_of(as_case(preset))


def test_an_own_objective_is_refused_where_it_does_not_take_its_params():
    with pytest.raises(ValueError, match="unexpected keyword argument 'strenth'; correct params"):
        Objective.of(ObjectiveConfig(preset="my_objective:squared_ratio", params={"strenth": 2.0}))


def test_a_token_without_behaviour_leaves_before_anything_is_computed_over_the_batch():
    dropped = {"logp": [-1.0, -1.0, -2.0], "behaviour_logp": [-1.0, -1.0, None], "proximal_logp": [-1.0, -1.1, -2.0]}
    short = {name: column[:2] for name, column in dropped.items()}
    selected = [result_of({"preset": "m2po", "sequences": [row | {"advantage": 1.0}]}) for row in (dropped, short)]
    assert selected[0]["loss"] == pytest.approx(selected[1]["loss"])
    assert selected[0]["grad"][0] == [*selected[1]["grad"][0], 0.0]
    assert selected[0]["metrics"]["deselect_fraction"] == 0.0
    # The reward stands at the last token that is trained, as it does in the trainer.
    judged = {"values": [0.0, 0.0, 0.0], "reward": 1.0}
    result = result_of({"preset": "ppo", "sequences": [dropped | judged | {"proximal_logp": None}]})
    assert result["advantages"] == [[1.0, 1.0, 0.0]]


def test_a_decoupled_default_falls_back_to_the_bypass_form_in_a_case_without_proximal_policy():
    expect("gspo", FORMULAS["gspo"], aggregation="sequence")
    expect("m2po", lambda token, row: clip_form(token.q, token.a, 0.2, 0.2))


def test_choices_that_contradict_each_other_are_a_configuration_error():
    with pytest.raises(ConfigError, match="would correct twice"):
        result_of(as_case("aipo", {"correction": {"kind": "token_tis"}}, proximal=True))
