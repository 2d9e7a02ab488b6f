"""What a run shows in TensorBoard: curves with descriptions, a layout in sections, its settings, some of its texts. Without torch.

The layout and the settings are written once, at the beginning of the first file. TensorBoard uses only one value of each, so a process
that continues a run does not write them again.
"""

from __future__ import annotations

import string
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.metric_names import BY_ENVIRONMENT, HELD_OUT, METRICS, SECTIONS, Metric, find

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

DIRECTORY = "tensorboard"
"""Folder in the run's directory. It has one folder with the run's name, which TensorBoard shows as the name of the curves."""

SAMPLES = 5
"""Samples that one text shows."""

_SAMPLES_EVERY = 25
"""Steps from one text to the next."""

_MOST_CHARACTERS = 4000
"""Most characters that are shown of a prompt or a completion. The middle of a longer one is left out."""

_MOST_SETTING = 80
"""Most characters that are shown of a setting that is a text. Only the end of a longer one, such as a path, is shown."""

_PLAIN = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), 127) if chr(code) != "\n"} | {
    ord(each): f"&#{ord(each)};" for each in f"{string.punctuation}\t"
}
"""Replacements of control characters, punctuation, and tabs, which Markdown would turn into spaces."""

SETTINGS = (
    "model",
    "seed",
    "max_staleness",
    "orchestrator.environment",
    "orchestrator.workflow",
    "orchestrator.batch_size",
    "orchestrator.group_size",
    "orchestrator.max_steps",
    "orchestrator.advantage",
    "orchestrator.on_stale",
    "orchestrator.sampling.temperature",
    "orchestrator.sampling.max_tokens",
    "orchestrator.filter.drop_degenerate",
    "trainer.objective.preset",
    "trainer.objective.kl_coef",
    "trainer.lr",
    "trainer.schedule",
    "trainer.warmup_steps",
    "trainer.optimizer",
    "trainer.weight_decay",
    "trainer.grad_clip",
    "trainer.epochs",
    "trainer.minibatches",
    "trainer.lora.rank",
    "trainer.dtype",
    "rollout.engine",
    "rollout.dtype",
)
"""Settings by which runs are compared: the columns of TensorBoard's table of runs. A run shows those that it has."""

_RESULTS = ("reward/mean", "eval/reward_mean", "eval/greedy_reward_mean", "time/step_s")
"""Metrics that stand beside the settings in that table."""


class TensorBoardLog:
    """Writes the event files of a run. For one thread.

    Args:
        run_dir: The run's directory; its name is the name of the run.
        settings: The run's settings, as in its ``config.toml``.
    """

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 - slow to import, as the imports below
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata  # noqa: PLC0415
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

        self._event, self._summary, self._metadata = Event, Summary, SummaryMetadata
        self._described: set[str] = set()
        directory = run_dir / DIRECTORY / run_dir.name
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.parent.glob("events.out.tfevents.*"):  # v0.1.0 wrote them here
            path.rename(directory / path.name)
        begun = any(map(_has_layout, sorted(directory.glob("events.out.tfevents.*"))))
        self._events = EventFileWriter(str(directory), flush_secs=10)
        if not begun:
            now = time.time()
            values = [_layout_value(settings), *_settings_values(settings, now)]
            self._events.add_event(Event(wall_time=now, summary=Summary(value=values)))
            self._events.flush()

    def scalars(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Write the scalars of one step; `time_s` is seconds since 1970."""
        summary = self._summary(
            value=[self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        if not values.keys() <= self._described:
            for value in summary.value:
                if value.tag not in self._described:
                    self._described.add(value.tag)
                    value.metadata.CopyFrom(self._description(value.tag))
        self._events.add_event(self._event(wall_time=time_s, step=step, summary=summary))

    def samples(self, step: int, time_s: float, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a text that shows trajectories; the rows are those of ``trajectories/``."""
        value = _text_value(
            "samples", sample_text(rows), "Some samples of the batch, from the worst to the best reward."
        )
        self._events.add_event(self._event(wall_time=time_s, step=step, summary=self._summary(value=[value])))

    def flush(self) -> None:
        """Make everything written readable by others."""
        self._events.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._events.close()

    def _description(self, name: str) -> SummaryMetadata:
        """Return the metadata of a curve with its description, which TensorBoard shows next to the title."""
        from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR  # noqa: PLC0415

        metric = find(name)
        described = self._metadata(
            plugin_data=self._metadata.PluginData(plugin_name="scalars"),
            data_class=DATA_CLASS_SCALAR,  # without it TensorBoard's fast reader drops the description
        )
        if metric is not None:
            described.summary_description = f"{metric.text} ({metric.unit})" if metric.unit else metric.text
        return described


def shows_samples(step: int) -> bool:
    """Return whether a text shows samples of this step."""
    return step == 1 or step % _SAMPLES_EVERY == 0


def spread(rewards: Sequence[float | None]) -> list[int]:
    """Return the indices of `SAMPLES` samples (of all if there are fewer), evenly spread from the worst to the best reward.

    Samples without a reward are taken only if none has one.
    """
    places = [place for place, reward in enumerate(rewards) if reward is not None] or list(range(len(rewards)))
    places.sort(key=lambda place: rewards[place] or 0.0)
    most = min(SAMPLES, len(places))
    return [places[round(index * (len(places) - 1) / max(1, most - 1))] for index in range(most)]


def sample_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return trajectories as Markdown: reward and other numbers, then task, prompt and completion as blocks of plain text."""
    parts = []
    for row in rows:
        numbers = [f"{name} {_number(row.get(name))}" for name in ("reward", "advantage", "tokens", "staleness")]
        prompt = "\n".join(f"{each.get('role', '')}: {each.get('content', '')}" for each in row.get("prompt") or ())
        parts += [
            f"#### {', '.join(numbers)}",
            "task",
            _block(str(row.get("task_id", ""))),
            "prompt",
            _block(prompt),
            "completion",
            _block(str(row.get("completion", ""))),
        ]
    return "\n\n".join(parts)


def _number(value: object) -> str:
    """Format a number for people. Return a dash for anything else, such as advantages by token."""
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def _block(text: str) -> str:
    """Return a block that shows a model's text unchanged. No text can end the block.

    Every character with a meaning in HTML or Markdown is written as a numeric entity, because TensorBoard parses Markdown fences before
    HTML.
    """
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"
    lines = "\n".join(text.encode("utf-8", "replace").decode("utf-8").splitlines())
    return f"<pre>\n{lines.translate(_PLAIN)}</pre>"  # HTML drops the first newline


def layout(settings: Mapping[str, Any]) -> dict[str, dict[str, list[Metric]]]:
    """Return the metrics of each chart by section and title, in the order of the table.

    Charts of evaluations and of several environments are left out if the settings say that the run has none.
    """
    orchestrator = settings.get("orchestrator") or {}
    evaluation = orchestrator.get("evaluation") or {}
    empty: set[str] = set()
    if evaluation and not (evaluation.get("every_steps") or evaluation.get("every_s")):
        empty |= {*HELD_OUT}
    if "environments" in orchestrator and len(orchestrator["environments"]) < 2:
        empty.add(BY_ENVIRONMENT)
    sections: dict[str, dict[str, list[Metric]]] = {section: {} for section in SECTIONS}
    for metric in METRICS:
        if metric.chart and metric.chart not in empty:
            sections[metric.section].setdefault(metric.chart, []).append(metric)
    return sections


def _layout_value(settings: Mapping[str, Any]) -> Summary.Value:
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata  # noqa: PLC0415

    categories = [
        layout_pb2.Category(
            title=section,
            chart=[
                layout_pb2.Chart(
                    title=title, multiline=layout_pb2.MultilineChartContent(tag=[f"^{each.regex}$" for each in metrics])
                )
                for title, metrics in charts.items()
            ],
        )
        for section, charts in layout(settings).items()
    ]
    content = layout_pb2.Layout(category=categories).SerializeToString()
    return _tensor_value(metadata.CONFIG_SUMMARY_TAG, metadata.create_summary_metadata(), content)


def _settings_values(settings: Mapping[str, Any], time_s: float) -> list[Summary.Value]:
    """Return the table of runs: which settings and metrics it has, and this run's settings."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2  # noqa: PLC0415

    chosen = chosen_settings(settings)
    if not chosen:
        return []
    kinds = {bool: api_pb2.DATA_TYPE_BOOL, float: api_pb2.DATA_TYPE_FLOAT64, str: api_pb2.DATA_TYPE_STRING}
    experiment = api_pb2.Experiment(
        hparam_infos=[api_pb2.HParamInfo(name=name, type=kinds[type(value)]) for name, value in chosen.items()],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=name)) for name in _RESULTS],
    )
    session = plugin_data_pb2.SessionStartInfo(start_time_secs=time_s)
    for name, value in chosen.items():
        if isinstance(value, bool):
            session.hparams[name].bool_value = value
        elif isinstance(value, float):
            session.hparams[name].number_value = value
        else:
            session.hparams[name].string_value = value
    found = {
        metadata.EXPERIMENT_TAG: plugin_data_pb2.HParamsPluginData(experiment=experiment),
        metadata.SESSION_START_INFO_TAG: plugin_data_pb2.HParamsPluginData(session_start_info=session),
    }
    values = []
    for tag, data in found.items():
        value = _tensor_value(tag, metadata.create_summary_metadata(data), b"")
        value.tensor.CopyFrom(metadata.NULL_TENSOR)
        values.append(value)
    return values


def chosen_settings(settings: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """Return the values of the `SETTINGS` that the run has, by dotted names. Unset settings are left out."""
    chosen: dict[str, bool | float | str] = {}
    for name in SETTINGS:
        value: Any = settings
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, bool):
            chosen[name] = value
        elif isinstance(value, int | float):
            chosen[name] = float(value)
        elif isinstance(value, str) and value:
            chosen[name] = value[-_MOST_SETTING:]
    return chosen


def _text_value(tag: str, text: str, description: str) -> Summary.Value:
    from tensorboard.plugins.text import metadata  # noqa: PLC0415

    return _tensor_value(tag, metadata.create_summary_metadata(tag, description), text.encode())


def _tensor_value(tag: str, metadata: SummaryMetadata, content: bytes) -> Summary.Value:
    from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary  # noqa: PLC0415
    from tensorboard.compat.proto.tensor_pb2 import TensorProto  # noqa: PLC0415
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # noqa: PLC0415
    from tensorboard.compat.proto.types_pb2 import DT_STRING  # noqa: PLC0415

    tensor = TensorProto(dtype=DT_STRING, tensor_shape=TensorShapeProto(), string_val=[content])
    value = Summary.Value(tag=tag, tensor=tensor, metadata=metadata)
    value.metadata.data_class = DATA_CLASS_TENSOR
    return value


def _has_layout(path: Path) -> bool:
    """Return whether an event file begins with a layout, after the first event, which is the file's version."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader  # noqa: PLC0415
    from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG  # noqa: PLC0415

    return any(CONFIG_SUMMARY_TAG.encode() in event for event in islice(RawEventFileLoader(str(path)).Load(), 2))
