import contextlib
import html
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG
from tensorboard.plugins.hparams.metadata import (
    EXPERIMENT_TAG,
    SESSION_START_INFO_TAG,
    parse_experiment_plugin_data,
    parse_session_start_info_plugin_data,
)

from sluice.metric_names import BY_ENVIRONMENT, HELD_OUT, SECTIONS, find
from sluice.telemetry import MetricsWriter
from sluice.tensorboard_log import chosen_settings, layout, sample_text, shows_samples, spread

SETTINGS: dict[str, Any] = {
    "model": "/long/path/" * 10 + "tiny",
    "seed": 3,
    "chat_template": "never shown",
    "orchestrator": {"group_size": 8, "advantage": "grpo", "filter": {"drop_degenerate": True}},
    "trainer": {"lr": 1e-4, "objective": {"preset": ""}},
}


def events_of(run_dir: Path) -> EventAccumulator:
    events = EventAccumulator(str(run_dir / "tensorboard" / run_dir.name))
    events.Reload()
    return events


def write(run_dir: Path, step: int, **settings: Any) -> None:
    with contextlib.closing(MetricsWriter(run_dir, settings or SETTINGS)) as writer:
        writer.write(step, {"reward/mean": step / 4, "trainer/entropy": 1.0, "sluice's/own": 0.0})


def test_a_curve_says_what_it_shows_and_still_has_plain_values(tmp_path: Path) -> None:
    run_dir = tmp_path / "sums"
    with contextlib.closing(MetricsWriter(run_dir)) as writer:
        for step in (1, 2):
            writer.write(step, {"reward/mean": step / 4})
        writer.write(3, {"reward/mean": 0.75, "eval/reward_mean": 0.5})
    events = events_of(run_dir)
    assert [(each.step, each.value) for each in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    for name in ("reward/mean", "eval/reward_mean"):
        metric = find(name)
        assert metric is not None
        assert events.SummaryMetadata(name).data_class == DATA_CLASS_SCALAR, (
            "the fast reader needs it for the description"
        )
        assert events.SummaryMetadata(name).summary_description == f"{metric.text} ({metric.unit})"


def test_a_run_that_continues_has_one_layout_one_set_of_settings_and_one_curve(tmp_path: Path) -> None:
    run_dir = tmp_path / "sums"
    write(run_dir, 1)
    write(run_dir, 2, seed=4)
    events = events_of(run_dir)
    # Of two files of the same second TensorBoard may read either one first.
    assert sorted(each.step for each in events.Scalars("reward/mean")) == [1, 2]
    for tag in (CONFIG_SUMMARY_TAG, EXPERIMENT_TAG, SESSION_START_INFO_TAG):
        assert len(events.Tensors(tag)) == 1, tag


def test_a_start_that_wrote_no_step_is_no_reason_to_lack_a_layout_or_to_have_two(tmp_path: Path) -> None:
    run_dir = tmp_path / "sums"
    (run_dir / "tensorboard" / "sums").mkdir(parents=True)
    (run_dir / "tensorboard" / "sums" / "events.out.tfevents.1.host.1.0").touch()
    MetricsWriter(run_dir).close()
    write(run_dir, 1)
    assert len(events_of(run_dir).Tensors(CONFIG_SUMMARY_TAG)) == 1


def test_the_curves_of_an_earlier_release_get_the_name_of_the_run_when_it_continues(tmp_path: Path) -> None:
    run_dir = tmp_path / "old"
    write(run_dir, 1)
    (old,) = (run_dir / "tensorboard" / "old").iterdir()
    old.rename(run_dir / "tensorboard" / old.name)
    write(run_dir, 2)
    assert [each.name for each in (run_dir / "tensorboard").iterdir()] == ["old"]
    # Files of one second are read in any order.
    assert sorted(each.step for each in events_of(run_dir).Scalars("reward/mean")) == [1, 2]


def test_the_layout_has_the_sections_of_the_table_and_the_reward_first(tmp_path: Path) -> None:
    write(tmp_path / "run", 1)
    (value,) = events_of(tmp_path / "run").Tensors(CONFIG_SUMMARY_TAG)
    written = Layout.FromString(value.tensor_proto.string_val[0])
    assert [each.title for each in written.category] == list(SECTIONS)
    assert re.match(written.category[0].chart[0].multiline.tag[0], "reward/mean")
    tags = [tag for category in written.category for chart in category.chart for tag in chart.multiline.tag]

    def charts(name: str) -> list[str]:
        return [tag for tag in tags if re.match(tag, name)]

    assert charts("eval/reward_mean") == charts("eval/sums/reward_mean") != charts("eval/greedy_reward_mean")
    assert len(charts("staleness/tokens_at_12")) == len(charts("trainer/seconds/forward")) == 1
    assert charts("reward/mean_of_something") == []


@pytest.mark.parametrize(
    ("orchestrator", "missing"),
    [
        ({}, set()),
        ({"evaluation": {"every_steps": 0, "every_s": 0.0}}, {*HELD_OUT}),
        ({"evaluation": {"every_steps": 5, "every_s": 0.0}, "environments": []}, {BY_ENVIRONMENT}),
        ({"environments": [{"name": "a"}, {"name": "b"}]}, set()),
    ],
)
def test_charts_that_stay_empty_by_the_settings_are_left_out(orchestrator: dict[str, Any], missing: set[str]) -> None:
    def titles(settings: dict[str, Any]) -> set[str]:
        return {title for charts in layout(settings).values() for title in charts}

    assert titles({}) - titles({"orchestrator": orchestrator}) == missing


def test_the_settings_of_a_run_are_columns_of_the_table_of_runs(tmp_path: Path) -> None:
    write(tmp_path / "run", 1)
    events = events_of(tmp_path / "run")
    experiment = parse_experiment_plugin_data(events.SummaryMetadata(EXPERIMENT_TAG).plugin_data.content)
    session = parse_session_start_info_plugin_data(events.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content)
    assert {each.name for each in experiment.hparam_infos} == set(session.hparams) == set(chosen_settings(SETTINGS))
    assert "reward/mean" in {each.name.tag for each in experiment.metric_infos}
    values = {name: getattr(each, each.WhichOneof("kind")) for name, each in session.hparams.items()}
    assert values.pop("model").endswith("tiny")
    assert values == {
        "seed": 3,
        "orchestrator.group_size": 8,
        "orchestrator.advantage": "grpo",
        "orchestrator.filter.drop_degenerate": True,
        "trainer.lr": 1e-4,
    }


def row(completion: str, **values: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": "Reverse abc"}]
    return {"task_id": "abc", "prompt": prompt, "completion": completion, "reward": 0.5, "advantage": -1.0, **values}


def shown(text: str) -> str:
    """Return what TensorBoard makes of a text."""
    return str(markdown_to_safe_html(text))


def blocks(rendered: str) -> list[str]:
    return [html.unescape(each) for each in re.findall(r"<pre>(.*?)</pre>", rendered, re.DOTALL)]


HOSTILE = (
    "</pre><script>alert(1)</script>",
    "```\n</code></pre>\n# a heading\n```",
    "~~~\n~~~\n\n<img src=x onerror=alert(1)>",
    "[a link](https://example.com) ![picture](https://example.com/x.png)",
    "| a | b |\n|---|---|\n| c | d |",
    "text\n\n    code\n\n* point\n\nHeading\n=======",
    "&lt;b&gt; &#60;b&#62; <!-- never closed",
    "[name]: https://example.com\n\n[name]",
    "<div markdown=1>\n\n**bold**",
)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_of_a_model_leaves_its_block(hostile: str) -> None:
    rendered = shown(sample_text([row(hostile, task_id=hostile)]))
    assert blocks(rendered) == [hostile, "user: Reverse abc", hostile]
    outside = re.sub(r"<pre>.*?</pre>", "", rendered, flags=re.DOTALL)
    assert set(re.findall(r"<(\w+)", outside)) == {"h4", "p"}


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60), st.sampled_from(HOSTILE))
def test_every_text_comes_out_as_it_was_but_for_control_characters_and_spaces_at_ends_of_lines(
    drawn: str, hostile: str
) -> None:
    lines = "\n".join((drawn + hostile + drawn).splitlines())
    wanted = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", lines)
    found = blocks(shown(sample_text([row(drawn + hostile + drawn)])))[-1]
    assert [line.rstrip(" ") for line in found.split("\n")] == [line.rstrip(" ") for line in wanted.split("\n")]


def test_long_texts_lose_their_middle_and_half_surrogates_do_no_harm() -> None:
    (*_, block) = blocks(shown(sample_text([row("a" * 5000 + "\ud800")])))
    assert "1,001 characters left out" in block
    assert len(block) < 4100
    assert block.endswith("a?")


def test_samples_are_a_text_of_their_step(tmp_path: Path) -> None:
    with contextlib.closing(MetricsWriter(tmp_path / "run")) as writer:
        writer.samples(25, [row("cba", staleness=None), row("abc", reward=None, advantage=[0.5, 1.0])])
    events = events_of(tmp_path / "run")
    assert events.SummaryMetadata("samples").plugin_data.plugin_name == "text"
    (value,) = events.Tensors("samples")
    text = value.tensor_proto.string_val[0].decode()
    assert value.step == 25
    assert blocks(shown(text)) == ["abc", "user: Reverse abc", "cba", "abc", "user: Reverse abc", "abc"]
    assert re.findall("#### .*", text) == [
        "#### reward 0.5, advantage -1, tokens -, staleness -",
        "#### reward -, advantage -, tokens -, staleness -",
    ]


def test_samples_reach_from_the_worst_to_the_best_reward() -> None:
    assert spread([0.5, None, 0.1, 0.9]) == [2, 0, 3], "one without a reward is left out"
    rewards = [index / 100 for index in range(101)]
    assert spread(rewards) == [0, 25, 50, 75, 100]
    assert spread([0.5, 0.25]) == [1, 0]
    assert spread([None, None]) == [0, 1]
    assert spread([]) == []


def test_the_first_step_and_each_25th_show_samples() -> None:
    assert [step for step in range(1, 80) if shows_samples(step)] == [1, 25, 50, 75]


def test_writing_for_tensorboard_imports_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from sluice.telemetry import MetricsWriter
writer = MetricsWriter(Path({str(tmp_path / "run")!r}), {{"seed": 3}})
writer.write(1, {{"reward/mean": 1.0}})
writer.samples(1, [])
writer.close()
print(sorted({{"torch", "tensorflow"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
