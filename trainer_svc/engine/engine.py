"""The training engine: rows and a loss in, one optimizer step out. A library; no service is needed around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Event

import torch

from trainer_svc.batch.rows import LossFn, LossWeight, MicroBatch, Outputs, Sequence
from trainer_svc.batch.shapes import Scalar
from trainer_svc.compute_config import ComputeConfig, Precision, frozen_precision, on_device
from trainer_svc.engine.adapter_export import export_adapter
from trainer_svc.engine.export import export_hf, live_tensors, named_tensors, whole_tensors
from trainer_svc.engine.kernels import choose_kernels
from trainer_svc.engine.layout import runner_of, shared_by_stages, spread
from trainer_svc.engine.loading import freeze, load_network
from trainer_svc.engine.lora import attach_adapter
from trainer_svc.engine.network import DTYPES, Entropy, Head, resolve_device
from trainer_svc.engine.optimizers import build_optimizers
from trainer_svc.engine.schedule import learning_rate
from trainer_svc.engine.shares import micro_batches
from trainer_svc.engine.state import state_room, state_tensors
from trainer_svc.engine.step_metrics import StepMetrics, StepRecord
from trainer_svc.engine.throughput import Meter
from trainer_svc.parallel.fsdp import clip, total_norm
from trainer_svc.parallel.mesh import SINGLE, Mesh
from trainer_svc.parallel.ranks import Ranks, agree
from trainer_svc.parallel.tensor import sum_partial_gradients

__all__ = ["TrainEngine"]


class TrainEngine:
    """A network and its optimizer.

    Not thread-safe: one caller at a time trains, reads weights or restores. Under torchrun every process makes the same calls;
    each data-parallel rank passes its own rows.

    Args:
        config: Where and how a step is computed.
        model_dir: Hugging Face directory or hub id of the base model.
        seed: Seed of PyTorch's generators.
        head: What the network has on top: "language", "value" or "both".
        mesh: The processes that train together, from `trainer_svc.parallel.mesh.join`.
        frozen: Precision in which the weights of a model are kept that only computes; None: the model is trained.
    """

    def __init__(
        self,
        config: ComputeConfig,
        model_dir: str | Path,
        seed: int = 0,
        *,
        head: Head = "language",
        mesh: Mesh = SINGLE,
        frozen: Precision | None = None,
    ) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        self.mesh = mesh
        self.ranks = mesh.ranks
        self.model_dir = str(model_dir)
        self.device = mesh.device or resolve_device(config.device)
        self.config = config = on_device(config, torch.device(self.device).type)
        load = partial(
            load_network,
            self.model_dir,
            self.device if mesh.weights is None else torch.device("cpu"),
            head=head,
            dtype=DTYPES[config.dtype],
            logit_cells=config.logit_cells,
            gradient_checkpointing=config.gradient_checkpointing is True and frozen is None,
            read=mesh.weights is None,
            rank=mesh.rank,
            ranks=mesh.dims.world_size,
        )
        network = agree(Ranks(mesh.everyone), load)  # each rank checks other layers: what one refuses, all refuse
        if frozen is not None:
            freeze(network, DTYPES[frozen_precision(frozen, config.dtype, torch.device(self.device).type)])
        network, self.adapter = attach_adapter(network, config.lora)
        laid_out = spread(network, mesh, config.parallel)
        self.network = choose_kernels(laid_out, config.attention, compiled=config.compile)
        self.optimizer = build_optimizers(config, self.network.model, self.device)
        self.runner = runner_of(self.network, mesh, reshard=config.parallel.reshard)
        self._in_two_stages = shared_by_stages(self.network, mesh)
        self.meter = Meter.of(
            self.network.model.config.get_text_config(),
            self.device,
            frozen=self.adapter is not None,
            devices=mesh.dims.world_size,
            peak_tflops=config.peak_tflops,
        )
        self.optimizer_steps = 0
        """Optimizer steps applied; skipped ones do not count."""

    def train_batch(
        self,
        sequences: Rows[Sequence],
        loss_fn: LossFn,
        loss_weight_fn: LossWeight,
        *,
        contributes: Callable[[Sequence], bool] | None = None,
        entropy: Entropy = "none",
        whole_groups: bool = False,
    ) -> StepMetrics:
        """One optimizer step on the global batch.

        The gradient does not depend on packing or on the number of ranks: losses are summed, divided by the weight of the
        whole batch, and gradients add up. If loss or gradient is not finite the weights and the optimizer stay as they were.

        Args:
            sequences: This rank's share of the batch.
            loss_fn: Sum of the losses of a micro-batch's loss tokens.
            loss_weight_fn: This share's part of the divisor.
            contributes: Whether a sequence can have a gradient; the others count in the divisor but are not forwarded.
            entropy: Whether the loss reads entropies, and with a gradient.
            whole_groups: Whether the loss compares the sequences of a group, which then share a micro-batch.

        Raises:
            ValueError: if a token id is outside of the vocabulary.
        """
        record = StepRecord(sequences, self.ranks, self.meter)
        with record.phase("pack"):
            batches, weight = micro_batches(self, sequences, loss_weight_fn, contributes, whole_groups=whole_groups)
        self.optimizer.zero_grad(set_to_none=True)
        with self.adapter.dropping() if self.adapter else nullcontext():
            self.runner.train(batches, partial(_share, loss_fn, weight, record), record, entropy=entropy)
        with record.phase("optimizer"):
            self.step(record)
        return record.finish()

    def eval_batch(
        self,
        sequences: Rows[Sequence],
        loss_fn: LossFn,
        loss_weight_fn: LossWeight,
        *,
        entropy: Entropy = "none",
        whole_groups: bool = False,
    ) -> StepMetrics:
        """The loss of the global batch under the current weights; nothing changes.

        Raises:
            ValueError: if a token id is outside of the vocabulary.
        """
        record = StepRecord(sequences, self.ranks)
        with record.phase("pack"):
            batches, weight = micro_batches(self, sequences, loss_weight_fn, whole_groups=whole_groups)
        with record.phase("forward"):
            self.runner.evaluate(batches, partial(_share, loss_fn, weight, record), entropy=entropy)
        return record.finish()

    def forward(self, sequences: Rows[Sequence], *, values: bool = False) -> list[torch.Tensor]:
        """What the current weights say about the loss tokens: log-probabilities after temperature, or values.

        Args:
            sequences: This rank's share of the batch.
            values: Read the value head of a network that has a language head as well.

        Returns:
            For each sequence a float32 CPU tensor of its length, NaN where `loss_mask` is not set.

        Raises:
            ValueError: if a token id is outside of the vocabulary.
        """
        batches, _ = micro_batches(self, sequences)
        read: list[torch.Tensor] = []

        def keep(outputs: Outputs, _: MicroBatch) -> None:
            read.append((outputs.values if values and outputs.values is not None else outputs.main).float())

        self.runner.evaluate(batches, keep)
        results = [torch.full((len(sequence),), torch.nan) for sequence in sequences]
        if read:
            found = [index for batch in batches for index in batch.order]
            counts = [int(sequences[index].loss_mask.sum()) for index in found]
            # One copy from the device, for which the host waits, and not one per micro-batch.
            for index, part in zip(found, torch.cat(read).cpu().split(counts), strict=True):
                results[index][sequences[index].loss_mask] = part
        return results

    def step(self, record: StepRecord) -> None:
        """Clip the gradient and apply it, unless it or the loss is not finite; then it is dropped and the record says so."""
        parameters = [parameter for parameter in self.network.model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                # A batch without gradient still lets AdamW's moments decay, as one with a zero gradient does.
                parameter.grad = torch.zeros_like(parameter)
        if self.mesh.tensor is not None:
            sum_partial_gradients(self.network.model, self.mesh.tensor.get_group())
        gradients = [parameter.grad for parameter in parameters]
        loss = record.totals()["step/loss"]
        twice = None if self._in_two_stages is None else self._in_two_stages.grad
        norm, finite = total_norm(gradients, self.mesh, refused=not math.isfinite(loss), in_two_stages=twice)
        record.gradient(norm, learning_rate(self.config, self.optimizer_steps), finite=finite)
        if record.skipped:
            self.optimizer.zero_grad(set_to_none=True)
            return
        if self.config.grad_clip > 0:
            clip(gradients, norm, self.config.grad_clip)
        self.optimizer.step(self.optimizer_steps)
        self.optimizer_steps += 1

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """The weights under their Hugging Face names, tied ones once, where they lie: the next step changes them."""
        return live_tensors(self.network.model, self._weights())

    def named_tensors(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """The weights under their Hugging Face names, tied ones once, as CPU copies that later steps do not touch.

        Args:
            dtype: Precision of floating-point tensors; None keeps float32.
        """
        return named_tensors(self.network.model, dtype, self._weights())

    def export_hf(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face model directory, or a PEFT adapter if one is trained; it appears whole or not at all.

        Every rank calls it, rank 0 writes, and the directory exists when it returns on rank 0.

        Raises:
            FileExistsError: if the directory exists.
            ValueError: if the layers lie in several stages.
        """
        if self.mesh.dims.pp > 1:
            raise ValueError(
                "the layers lie in several stages: save a checkpoint, whose directory `hf` has all of them"
            )
        tensors = self.network.model.state_dict()
        if self.adapter is not None:
            tensors = {name: each for name, each in self.network.model.named_parameters() if each.requires_grad}
        weights = whole_tensors(tensors, keep=self.mesh.rank == 0)
        if not self.mesh.rank:
            self.export_weights(weights, directory, dtype)

    def export_weights(
        self, weights: dict[str, torch.Tensor], directory: str | Path, dtype: torch.dtype | None = None
    ) -> None:
        """Write such a directory of whole tensors, under the names that the network gives them; any thread may call it."""
        if self.adapter is not None:
            export_adapter(self.adapter, self.model_dir, Path(directory), dtype, weights)
        else:
            export_hf(self.network.model, self.model_dir, Path(directory), dtype, weights)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint must hold, as flat names: ``model.<name>`` and ``optimizer.<moment>.<name>``.

        Tensors are the live ones: copy or write them before the next step.
        """
        return state_tensors(self.network.model, self.optimizer)

    def lend(self, read: Event) -> set[str]:
        """Leave the state that lies in host memory as it is until `read` is set.

        Returns:
            The names among those of `state_tensors`; the next step waits until `read` is set.
        """
        named = [each for each in self.network.model.named_parameters() if each[1].requires_grad]
        return {f"optimizer.{name}" for name in self.optimizer.lend(named, read)}

    def state_scalars(self) -> dict[str, int]:
        """The numbers that a checkpoint must hold."""
        return {"optimizer_steps": self.optimizer_steps}

    def state_room(self, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
        """The live tensors that a checkpoint is to be read into; the optimizer's state is zeros until that has happened.

        Args:
            shapes: Names and global shapes of what `state_tensors` gave when the checkpoint was written.

        Raises:
            ValueError: if names or shapes are not this model's and optimizer's; then nothing has changed.
        """
        return state_room(self.network.model, self.optimizer, shapes, stage=self.mesh.dims.pp > 1)

    def restore_scalars(self, scalars: Mapping[str, int]) -> None:
        """Put the numbers of a checkpoint back."""
        self.optimizer_steps = int(scalars["optimizer_steps"])

    def _weights(self) -> dict[str, torch.Tensor]:
        """The weights by their names in the model; those of the base with the adapter added, where one is trained."""
        state: dict[str, torch.Tensor] = self.network.model.state_dict()
        return state if self.adapter is None else self.adapter.merged(state)


def _share(loss_fn: LossFn, weight: float, record: StepRecord, outputs: Outputs, batch: MicroBatch) -> Scalar:
    """This micro-batch's share of the global loss, taken into the record."""
    total, sums = loss_fn(outputs, batch)
    loss = total / weight
    record.add(batch, loss, sums)
    return loss
