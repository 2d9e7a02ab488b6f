"""`sluice synthesize`: let a model attempt the tasks of an environment, and write its good attempts as data for `sluice sft`.

The model may be a directory, a running server, or one behind any OpenAI-compatible endpoint, as of `sluice eval`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from orchestrator_svc.commands.eval.command import check_evaluation, evaluations
from orchestrator_svc.commands.eval.config import EvalConfig
from sluice.config import Command, load_command
from sluice.host_files import write_whole
from sluice.telemetry import LEVEL_VARIABLE, configure_logging

if TYPE_CHECKING:
    from orchestrator_svc.run.evaluation import EvalSample


class SynthesizeConfig(EvalConfig):
    """Settings of `sluice synthesize`."""

    split: str = Field("train", description="Split of the environment whose tasks are attempted.")
    greedy: bool = Field(False, description="Also decode each task once without randomness.")
    data: Path = Field(
        Path("demonstrations.jsonl"), description="JSONL file for the conversations, as `sluice sft` reads them."
    )
    threshold: float = Field(1.0, description="Least reward of an attempt that is kept.")
    keep: int = Field(
        1, ge=1, description="Most attempts that are kept of a task: the best ones, each with other words."
    )


def run(argv: list[str]) -> int:
    """Attempt the tasks, and write what is good; return 0, or 1 if nothing is."""
    config = load_command(SynthesizeConfig, argv, "synthesize", check=check_evaluation)
    configure_logging("synthesize", os.environ.get(LEVEL_VARIABLE) or "warning", for_people=True)
    samples = [sample for _, outcome in evaluations(config) for sample in outcome.result.samples]
    kept = list(_kept(samples, config.threshold, config.keep))
    config.data.parent.mkdir(parents=True, exist_ok=True)
    write_whole(config.data, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))
    tasks, solved = {each.task_id for each in samples}, {row["task_id"] for row in kept}
    sys.stdout.write(
        f"{config.data}: {len(kept)} of {len(samples)} attempts have a reward of {config.threshold:g} or more and were kept,"
        f" of {len(solved)} of {len(tasks)} tasks\n"
    )
    return int(not kept)


def _kept(samples: Iterable[EvalSample], threshold: float, most: int) -> Iterator[dict[str, Any]]:
    """Yield the best attempts at each task as rows."""
    by_task: dict[str, list[EvalSample]] = {}
    for sample in samples:
        if sample.reward is not None and sample.reward >= threshold and not sample.truncated:
            by_task.setdefault(sample.task_id, []).append(sample)
    for task, good in sorted(by_task.items()):
        said: set[str] = set()
        for sample in sorted(good, key=lambda each: -(each.reward or 0.0)):
            words = json.dumps(sample.messages, sort_keys=True)
            if words in said or len(said) == most:
                continue
            said.add(words)
            tools = {"tools": list(sample.tools)} if sample.tools else {}
            yield {"messages": list(sample.messages), **tools, "task_id": task, "reward": sample.reward}


COMMAND = Command("synthesize", "let a model attempt tasks, and write its good attempts as data for sft", run)
