"""The training engine: sequences in, one optimizer step out. A library; no service is needed around it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from pathlib import Path

import torch

from trainer_svc.config import ComputeConfig, ObjectiveConfig, TrainerConfig
from trainer_svc.engine.batch import MicroBatch, Sequence, pack
from trainer_svc.engine.export import export_hf, live_tensors, named_tensors
from trainer_svc.engine.network import load_policy, resolve_device
from trainer_svc.engine.optim import build_adamw, learning_rate, load_optimizer_tensors, optimizer_tensors
from trainer_svc.engine.step_metrics import StepMetrics, StepRecord
from trainer_svc.engine.trainable import keep_trainable
from trainer_svc.objectives.aggregation import sequence_weights
from trainer_svc.objectives.objective import Objective
from trainer_svc.objectives.terms import GlobalCounts, TokenTerms

__all__ = ["TrainEngine"]


class TrainEngine:
    """A policy, its optimizer and an objective on one device.

    Not thread-safe: one caller at a time trains, reads weights or restores.

    Args:
        config: The trainer's settings; `sluice sft` passes its own with `objective`.
        model_dir: Hugging Face directory or hub id of the base model.
        seed: Seed of PyTorch's generators.
        objective: What to minimise; by default what `config` names.
    """

    def __init__(
        self,
        config: TrainerConfig | ComputeConfig,
        model_dir: str | Path,
        seed: int = 0,
        objective: ObjectiveConfig | None = None,
    ) -> None:
        if objective is None:
            if not isinstance(config, TrainerConfig):
                raise ValueError("this config names no objective: pass one")
            objective = config.objective
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        self.config = config
        self.objective = Objective.of(objective)
        self.model_dir = str(model_dir)
        self.device = resolve_device(config.device)
        self.policy = load_policy(
            self.model_dir,
            self.device,
            dtype=config.dtype,
            logit_cells=config.logit_cells,
            gradient_checkpointing=config.gradient_checkpointing,
        )
        self.optimizer = build_adamw(config, self.policy.model.parameters())
        self.optimizer_steps = 0
        """Optimizer steps applied; skipped ones do not count."""

    def train_batch(self, sequences: Rows[Sequence]) -> StepMetrics:
        """One optimizer step on the global batch.

        The gradient does not depend on packing: losses are divided by counts of the whole batch, and micro-batches add
        up. Sequences whose advantages are all zero are counted and, where the objective gives them no gradient, not
        forwarded. If loss or gradient is not finite the weights and the optimizer stay as they were.

        Raises:
            ValueError: if a token id is outside of the vocabulary, or a KL term lacks its reference.
        """
        record = StepRecord(sequences)
        with record.phase("pack"):
            self._check_ids(sequences)
            kept, dropped = keep_trainable(sequences, self.objective)
            counts = GlobalCounts.of(kept)
            record.count(kept, counts, dropped)
            forwarded = [each for each in kept if not (self.objective.vanishes_without_advantage and _is_neutral(each))]
            batches = pack(forwarded, self.config.token_budget, fold=self.config.fold_prompts)
        self.optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            self._accumulate(batch.to(self.device), counts, record)
        with record.phase("optimizer"):
            self._step(record)
        return record.finish()

    def forward_logprobs(self, sequences: Rows[Sequence]) -> list[torch.Tensor]:
        """Log-probabilities of the loss tokens under the current weights, after temperature.

        Returns:
            For each sequence a float32 CPU tensor of its length, NaN where `loss_mask` is not set.
        """
        self._check_ids(sequences)
        results = [torch.full((len(sequence),), torch.nan) for sequence in sequences]
        with torch.no_grad():
            for batch in pack(sequences, self.config.token_budget, fold=self.config.fold_prompts):
                logprobs, _ = self.policy.logprobs(batch.to(self.device))
                counts = [int(sequence.loss_mask.sum()) for sequence in batch.sequences]
                for index, values in zip(batch.order, logprobs.float().cpu().split(counts), strict=True):
                    results[index][sequences[index].loss_mask] = values
        return results

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """The weights under their Hugging Face names, tied ones once, where they lie: the next step changes them."""
        return live_tensors(self.policy.model)

    def named_tensors(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """The weights under their Hugging Face names, tied ones once, as CPU copies that later steps do not touch.

        Args:
            dtype: Precision of floating-point tensors; None keeps float32.
        """
        return named_tensors(self.policy.model, dtype)

    def export_hf(self, directory: Path, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face model directory; it appears whole or not at all.

        Raises:
            FileExistsError: if the directory exists.
        """
        export_hf(self.policy.model, self.model_dir, directory, dtype)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """All float32 state that a checkpoint must hold, as flat names: ``model.<name>`` and ``optimizer.<moment>.<name>``.

        Tensors are the live ones: copy or write them before the next step.
        """
        named = dict(self.policy.model.named_parameters())
        model = {f"model.{name}": parameter.detach() for name, parameter in named.items()}
        optimizer = optimizer_tensors(self.optimizer, named.items())
        return model | {f"optimizer.{name}": tensor for name, tensor in optimizer.items()}

    def state_scalars(self) -> dict[str, int]:
        """The numbers that a checkpoint must hold."""
        return {"optimizer_steps": self.optimizer_steps}

    def load_state(self, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, int]) -> None:
        """Go back to what `state_tensors` and `state_scalars` gave.

        Raises:
            ValueError: if names or shapes are not this model's.
        """
        named = dict(self.policy.model.named_parameters())
        given = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
        if given.keys() != named.keys():
            differing = sorted(given.keys() ^ named.keys())
            raise ValueError(
                f"the checkpoint is of another model ({differing[0]!r} is on one side only): resume with the model it was made from"
            )
        moments = {
            name.removeprefix("optimizer."): tensor for name, tensor in tensors.items() if name.startswith("optimizer.")
        }
        for name, tensor in given.items():
            if tensor.shape != named[name].shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(tensor.shape)} in the checkpoint, {tuple(named[name].shape)} in the model"
                )
        load_optimizer_tensors(self.optimizer, named.items(), moments)
        with torch.no_grad():
            for name, tensor in given.items():
                named[name].copy_(tensor)
        self.optimizer_steps = int(scalars["optimizer_steps"])

    def _check_ids(self, sequences: Rows[Sequence]) -> None:
        vocabulary = self.policy.vocabulary
        for sequence in sequences:
            low, high = (int(value) for value in sequence.input_ids.aminmax())
            if low < 0 or high >= vocabulary:
                raise ValueError(
                    f"sequence {sequence.trajectory_id!r} has a token id outside of the vocabulary [0, {vocabulary}): was it made with another tokenizer?"
                )

    def _accumulate(self, batch: MicroBatch, counts: GlobalCounts, record: StepRecord) -> None:
        """Forward and backward of one micro-batch; gradients add up."""
        with record.phase("forward"):
            current, entropy = self.policy.logprobs(
                batch, entropy="train" if self.objective.entropy_coef > 0 else "measure"
            )
            weights = sequence_weights(self.objective.aggregation, counts, batch.sequences, self.objective.max_tokens)
            terms = TokenTerms(
                current=current,
                behaviour=batch.behaviour,
                proximal=batch.behaviour,
                reference=batch.reference,
                advantages=batch.advantages,
                owners=batch.owners,
                weights=weights.to(self.device, current.dtype)[batch.owners],
                entropy=entropy,
            )
            loss, sums = self.objective(terms)
        with record.phase("backward"):
            loss.backward()
        record.add(batch, loss.detach(), sums)

    def _step(self, record: StepRecord) -> None:
        parameters = [parameter for parameter in self.policy.model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                # A batch without gradient still lets AdamW's moments decay, as one with a zero gradient does.
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters], foreach=True)
        record.gradient(float(norm), learning_rate(self.config, self.optimizer_steps))
        if record.skipped:
            self.optimizer.zero_grad(set_to_none=True)
            return
        if self.config.grad_clip > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.config.grad_clip, norm, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = record.learning_rate
        self.optimizer.step()
        self.optimizer_steps += 1


def _is_neutral(sequence: Sequence) -> bool:
    return not bool(sequence.advantages[sequence.loss_mask].any())
