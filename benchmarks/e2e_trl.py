"""TRL's GRPOTrainer on given prompts: it generates by itself, scores and trains, one after the other.

Prints lines of JSON: when the first samples were asked for, then for each step when it ended, the mean reward of its samples,
and the CPU seconds of the process so far.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from sluice.environments.base import SingleTurnEnvironment, Task
from sluice.environments.loading import load_environment


class Reward:
    """Scores completions with the environment, as TRL calls a reward function.

    Attributes:
        mean: Mean reward of the samples that were scored last.
    """

    __name__ = "reward"

    def __init__(self, environment: SingleTurnEnvironment, tasks: Sequence[Task]) -> None:
        self._environment, self._tasks = environment, tasks
        self.mean = 0.0

    def __call__(self, completions: list[list[dict[str, str]]], place: list[int], **_: object) -> list[float]:
        """Return the rewards of completions. `place` has the index of each completion's task."""
        score = self._environment.score
        rewards = [
            float(score(self._tasks[at], each[0]["content"])) for each, at in zip(completions, place, strict=True)
        ]
        self.mean = sum(rewards) / len(rewards)
        return rewards


class Steps(TrainerCallback):  # type: ignore[misc]  # transformers is not type-checked here
    """Prints a line per step."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    def on_train_begin(self, _arguments: object, _state: object, *_: object, lr_scheduler: Any, **__: object) -> None:  # noqa: ANN401
        """Skip step 0 of the warm-up: its learning rate would be 0, while ours is not."""
        lr_scheduler.step()

    def on_step_begin(self, _arguments: object, state: Any, *_: object, **__: object) -> None:  # noqa: ANN401
        """Note when the trainer is about to generate for the first time."""
        if not state.global_step:
            _tell(first_request=time.time(), cpu_s=time.process_time())

    def on_step_end(self, _arguments: object, state: Any, *_: object, **__: object) -> None:  # noqa: ANN401
        """The optimizer has stepped."""
        _tell(step=state.global_step, time=time.time(), reward=self._reward.mean, cpu_s=time.process_time())


def _tell(**facts: float) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of the model to begin with")
    parser.add_argument("--environment", required=True, help="reference of the environment")
    parser.add_argument("--tasks", type=Path, required=True, help="JSON file with the tasks, in order")
    parser.add_argument("--batch", type=int, required=True, help="prompts per step")
    parser.add_argument("--group", type=int, required=True, help="samples per prompt")
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--warmup", type=int, required=True, help="steps until the learning rate is reached")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    environment = load_environment(options.environment, {})
    if not isinstance(environment, SingleTurnEnvironment):
        sys.exit(f"{options.environment} is no single-turn environment")
    tasks = [Task(**row) for row in json.loads(options.tasks.read_text())]
    reward = Reward(environment, tasks)
    prompts = [list(environment.messages(task)) for task in tasks]
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            reward_funcs=[reward],
            args=_config(scratch, options, len(tasks) // options.batch),
            train_dataset=Dataset.from_dict({"prompt": prompts, "place": list(range(len(tasks)))}),
            callbacks=[Steps(reward)],
        )
        trainer.train()


def _config(directory: str, options: argparse.Namespace, steps: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=directory,
        loss_type="grpo",
        beta=0.0,
        epsilon=0.2,
        scale_rewards="group",
        num_generations=options.group,
        per_device_train_batch_size=options.batch * options.group,
        gradient_accumulation_steps=1,
        max_completion_length=options.max_tokens,
        temperature=1.0,
        learning_rate=options.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=options.warmup,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        max_steps=steps,
        shuffle_dataset=False,
        seed=options.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


if __name__ == "__main__":
    main()
