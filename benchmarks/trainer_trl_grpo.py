"""TRL's GRPOTrainer on given samples: its own padding, forward, loss, backward, clipping and optimizer step.

Samples and rewards come through `rollout_func` and a reward function; advantages are TRL's own. The one thing added is
`old_per_token_logps`, under the name that TRL itself uses when samples are older than the weights: without it the
ratio would be 1 everywhere. Turning samples into padded tensors, rewards and logging are outside of the measured time.
"""

from __future__ import annotations

import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.children import PeakMemory
from benchmarks.trainer_workload import (
    ADAM_EPS,
    BETAS,
    CLIP,
    GRAD_CLIP,
    GROUP_SIZE,
    LEARNING_RATE,
    Commands,
    UpdateBatch,
    side_arguments,
)

MOST_UPDATES = 100_000
"""The trainer needs a number of steps; the commands end it earlier."""


class _NoMoreCommands(Exception):  # noqa: N818 - the end of the work, not an error
    pass


class GivenSamplesTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """GRPOTrainer whose old log-probabilities are those that came with the samples."""

    def __init__(self, commands: Commands, batch: UpdateBatch, **arguments: Any) -> None:  # noqa: ANN401
        self.commands = commands
        self.samples = list(batch.rows())
        self.preparing = (0.0, 0.0)
        self.losses: list[torch.Tensor] = []
        self.forward_tokens = 0
        super().__init__(reward_funcs=[_given_reward], rollout_func=self._roll_out, **arguments)

    def _roll_out(self, prompts: list[str], _: GRPOTrainer) -> dict[str, Any]:
        samples = [self.samples[int(prompt) * GROUP_SIZE + i % GROUP_SIZE] for i, prompt in enumerate(prompts)]
        return {
            "prompt_ids": [sample.prompt.tolist() for sample in samples],
            "completion_ids": [sample.completion.tolist() for sample in samples],
            "logprobs": [sample.behaviour.tolist() for sample in samples],
            "given_reward": [sample.reward for sample in samples],
        }

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        start, busy = time.perf_counter(), time.process_time()
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        output["old_per_token_logps"] = output["sampling_per_token_logps"]
        self.forward_tokens = output["prompt_ids"].numel() + output["completion_ids"].numel()
        self.preparing = (time.perf_counter() - start, time.process_time() - busy)
        return output

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401
        """One micro-batch; its loss is kept."""
        loss: torch.Tensor = super().training_step(*arguments, **options)
        self.losses.append(loss)
        return loss


class Stopwatch(TrainerCallback):  # type: ignore[misc]  # transformers is not type-checked here
    """Waits for the command before each optimizer step and answers after it."""

    def __init__(self, commands: Commands, memory: PeakMemory) -> None:
        self.commands, self.memory = commands, memory
        self.start = self.busy = 0.0
        self.trainer: GivenSamplesTrainer | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """The trainer is about to fetch its micro-batches."""
        if not self.commands.wait():
            raise _NoMoreCommands
        if self.trainer is not None:
            self.trainer.losses.clear()
        self.memory.restart()
        self.start, self.busy = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """The optimizer has stepped and gradients are cleared."""
        seconds, busy = time.perf_counter() - self.start, time.process_time() - self.busy
        trainer = self.trainer
        if trainer is None:
            raise RuntimeError("the stopwatch was given no trainer")
        self.commands.answer(
            seconds=seconds - trainer.preparing[0],
            cpu_seconds=busy - trainer.preparing[1],
            loss=float(torch.stack(trainer.losses).sum()),
            forward_tokens=trainer.forward_tokens,
            peak_bytes=self.memory.bytes,
        )


def _given_reward(given_reward: list[float], **_: Any) -> list[float]:  # noqa: ANN401
    return given_reward


def main() -> None:
    """Update on command."""
    arguments = side_arguments(__doc__).parse_args()
    commands = Commands()
    torch.set_num_threads(arguments.threads)
    memory = PeakMemory()
    batch = UpdateBatch.load(arguments.batch)
    watch = Stopwatch(commands, memory)
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as scratch:
        trainer = GivenSamplesTrainer(
            commands,
            batch,
            model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            args=_config(scratch, batch, arguments.micro_batch),
            train_dataset=Dataset.from_dict({"prompt": [str(group) for group in range(len(batch.prompt_lengths))]}),
            callbacks=[watch],
        )
        watch.trainer = trainer
        commands.answer(ready=True)
        try:
            trainer.train()
        except _NoMoreCommands:
            return


def _config(directory: str, batch: UpdateBatch, micro_batch: int) -> GRPOConfig:
    samples = len(batch.groups)
    return GRPOConfig(
        output_dir=directory,
        loss_type="grpo",
        beta=0.0,
        epsilon=CLIP,
        scale_rewards="group",
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=samples // micro_batch,
        max_completion_length=int(batch.completion_lengths.max()),
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=ADAM_EPS,
        weight_decay=0.0,
        max_grad_norm=GRAD_CLIP,
        optim="adamw_torch_fused",
        max_steps=MOST_UPDATES,
        shuffle_dataset=False,
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
