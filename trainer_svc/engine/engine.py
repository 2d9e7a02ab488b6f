"""The training engine: rows and a loss in, one optimizer step out. A library; it needs no service around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeVar

import structlog
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from sluice.chat_template import save_tokenizer
from sluice.config.footprint import USABLE
from sluice.decoder import Decoder
from sluice.host_files import whole_directory
from sluice.models import ModelSizes
from trainer_svc.batch.rows import (
    LossFn,
    LossWeight,
    MicroBatch,
    Outputs,
    TrainingRow,
    empty_batch,
    pack,
    tokens_to_forward,
)
from trainer_svc.batch.shapes import Scalar
from trainer_svc.compute_config import ComputeConfig, check_experts, on_device
from trainer_svc.engine.finite import UnfitWeightsError, describe_unfit, unfit_weights
from trainer_svc.engine.loading import check_read, choose_kernels, distribute, freeze, load_network, resolve_device
from trainer_svc.engine.logprob import Entropy
from trainer_svc.engine.lora import attach_adapter
from trainer_svc.engine.metrics import Meter, StepMetrics, StepRecord
from trainer_svc.engine.network import OWN_MODULES, Head, Network, connected
from trainer_svc.engine.optimizers import build_optimizers, clip, total_norm
from trainer_svc.engine.out_of_memory import (
    REMEDY,
    HalfAppliedError,
    MemoryShortError,
    TokenBudget,
    first_line,
    free_memory,
    is_out_of_memory,
)
from trainer_svc.engine.pipeline import LossOf, Pipeline
from trainer_svc.engine.rounding import DTYPES
from trainer_svc.memory import Decisions, estimate, fit
from trainer_svc.parallel.mesh import SINGLE, Mesh, Ranks, agree
from trainer_svc.parallel.sharding import cpu_copy, sum_partial_gradients
from trainer_svc.precision import Precision, frozen_precision

MODEL, OPTIMIZER = "model.", "optimizer."
"""Prefixes of a checkpoint's tensors."""

Result = TypeVar("Result")

log = structlog.get_logger(__name__)


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
        frozen: Precision of the weights of a model that only computes and is never trained; None: the model is trained.
        chat_template: Chat template that exported models get; None: the base model's.
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
        chat_template: str | None = None,
    ) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        self.mesh = mesh
        self.ranks = mesh.ranks
        self._tensor_group = None if mesh.tensor is None else mesh.tensor.get_group()
        self.model_dir = str(model_dir)
        self.chat_template = chat_template
        self.device = mesh.device or resolve_device(config.device)
        self.config = config = on_device(config, self.device.type)
        sizes = ModelSizes.of(AutoConfig.from_pretrained(self.model_dir).get_text_config().to_dict())
        check_experts(sizes, mesh.dims.world_size, mesh.dims.tp, config.lora)  # the check of settings skips hub ids
        load = partial(
            load_network,
            self.model_dir,
            self.device if mesh.weights is None else torch.device("cpu"),
            head=head,
            dtype=DTYPES[config.dtype],
            logit_cells=config.logit_cells,
            gradient_checkpointing=config.gradient_checkpointing is True and frozen is None,
            lazy=None if mesh.weights is None else (mesh.rank, mesh.dims.world_size),
        )
        network = agree(Ranks(mesh.everyone), load)  # each rank checks different layers: if one refuses, all refuse
        if frozen is not None:
            freeze(network, DTYPES[frozen_precision(frozen, config.dtype, self.device.type)])
        network, self.adapter = attach_adapter(network, config.lora)
        if frozen is None:
            self.config = config = _fitted(config, network, mesh, self.device)
        unread = network.files is not None
        network = distribute(network, mesh, config.parallel)
        if unread:
            agree(Ranks(mesh.everyone), partial(check_read, self.model_dir, network.model))
        self.network = choose_kernels(network, config.attention, Ranks(mesh.everyone), compiled=config.compile)
        self.optimizer = build_optimizers(config, self.network.model, self.device)
        reshard = config.parallel.reshard
        self.pipeline = None if mesh.stages is None else Pipeline(self.network, mesh, reshard=reshard)
        self.meter = Meter.of(
            self.network.model.config.get_text_config(),
            self.device,
            frozen=self.adapter is not None,
            devices=mesh.dims.world_size,
            peak_tflops=config.peak_tflops,
        )
        self.optimizer_steps = 0
        """Optimizer steps applied; skipped ones do not count."""
        self.budget = TokenBudget(config.token_budget)
        """Halved if memory runs out. The caller restores it for the next batch."""

    def train_batch(
        self,
        sequences: Sequence[TrainingRow],
        loss_fn: LossFn,
        loss_weight_fn: LossWeight,
        *,
        contributes: Callable[[TrainingRow], bool] | None = None,
        entropy: Entropy = "none",
        whole_groups: bool = False,
    ) -> StepMetrics:
        """Make one optimizer step on the global batch.

        The gradient does not depend on packing or on the number of ranks: each loss is divided by the weight of the whole
        batch, and the gradients of all ranks are summed. If loss or gradient is not finite, weights and optimizer stay as they were.

        Args:
            sequences: This rank's rows of the batch.
            loss_fn: Returns the sum of the losses of a micro-batch's loss tokens.
            loss_weight_fn: Returns what this rank's rows contribute to the divisor.
            contributes: Returns whether a sequence can have a gradient; the others count in the divisor but are not forwarded.
            entropy: Whether to compute entropies, and whether they carry a gradient.
            whole_groups: Whether the loss compares the sequences of a group. Then they share a micro-batch.

        Raises:
            ValueError: if a token id is outside of the vocabulary.
            MemoryShortError: if memory runs out, see `_within_memory`.
        """

        def attempt() -> StepRecord:
            record = StepRecord(sequences, self.ranks, self.meter)
            self.optimizer.zero_grad(set_to_none=True)
            self.add_gradients(
                record,
                sequences,
                loss_fn,
                loss_weight_fn,
                contributes=contributes,
                entropy=entropy,
                whole_groups=whole_groups,
            )
            with record.phase("optimizer"):
                self.step(record)
            return record

        return self._within_memory(attempt).finish()

    def add_gradients(
        self,
        record: StepRecord,
        sequences: Sequence[TrainingRow],
        loss_fn: LossFn,
        loss_weight_fn: LossWeight,
        *,
        contributes: Callable[[TrainingRow], bool] | None = None,
        entropy: Entropy = "none",
        whole_groups: bool = False,
    ) -> None:
        """Add the gradient of the global batch's loss to the gradients that the parameters already have. Arguments as of `train_batch`.

        Raises:
            ValueError: if a token id is outside of the vocabulary.
        """
        with record.phase("pack"):
            batches, weight = self._micro_batches(sequences, loss_weight_fn, contributes, whole_groups=whole_groups)
        with self.adapter.dropping() if self.adapter else nullcontext():
            self._accumulate(batches, partial(_recorded_loss, loss_fn, weight, record), record, entropy)

    def eval_batch(
        self,
        sequences: Sequence[TrainingRow],
        loss_fn: LossFn,
        loss_weight_fn: LossWeight,
        *,
        entropy: Entropy = "none",
        whole_groups: bool = False,
    ) -> StepMetrics:
        """Compute the loss of the global batch without changing the weights. Arguments as of `train_batch`.

        Raises:
            ValueError: if a token id is outside of the vocabulary.
            MemoryShortError: if memory runs out, see `_within_memory`.
        """

        def attempt() -> StepRecord:
            record = StepRecord(sequences, self.ranks)
            with record.phase("pack"):
                batches, weight = self._micro_batches(sequences, loss_weight_fn, whole_groups=whole_groups)
            with record.phase("forward"):
                self._evaluate(batches, partial(_recorded_loss, loss_fn, weight, record), entropy)
            return record

        return self._within_memory(attempt).finish()

    def forward(self, sequences: Sequence[TrainingRow], *, values: bool = False) -> list[torch.Tensor]:
        """Compute log-probabilities (after temperature) or values of the loss tokens under the current weights.

        If the network has a language and a value head, `values` selects the value head.

        Returns:
            For each sequence a float32 CPU tensor of its length, NaN where `loss_mask` is not set.

        Raises:
            ValueError: if a token id is outside of the vocabulary.
            MemoryShortError: if memory runs out, see `_within_memory`.
        """
        return self._within_memory(lambda: self._forward(sequences, values=values))

    def _forward(self, sequences: Sequence[TrainingRow], *, values: bool) -> list[torch.Tensor]:
        batches, _ = self._micro_batches(sequences)
        columns: list[torch.Tensor] = []

        def keep(outputs: Outputs, _: MicroBatch) -> None:
            columns.append((outputs.values if values and outputs.values is not None else outputs.main).float())

        self._evaluate(batches, keep)
        results = [torch.full((len(sequence),), torch.nan) for sequence in sequences]
        if columns:
            packed = [index for batch in batches for index in batch.order]
            counts = [sequences[index].loss_tokens for index in packed]
            # One copy from the device instead of one per micro-batch: the host waits for each copy.
            for index, part in zip(packed, torch.cat(columns).cpu().split(counts), strict=True):
                results[index][sequences[index].loss_mask] = part
        return results

    def step(self, record: StepRecord) -> None:
        """Clip the gradient and apply it. If it or the loss is not finite, drop it and mark the record as skipped."""
        parameters = [parameter for parameter in self.network.model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                # Without a gradient AdamW skips the parameter. With a zero gradient it still decays the moments.
                parameter.grad = torch.zeros_like(parameter)
        if self._tensor_group is not None:
            sum_partial_gradients(self.network.model, self._tensor_group)
        gradients = [parameter.grad for parameter in parameters]
        loss = record.totals()["step/loss"]
        tied = None if self.pipeline is None or self.pipeline.tied is None else self.pipeline.tied.grad
        norm, finite = total_norm(gradients, self.mesh, refused=not math.isfinite(loss), in_two_stages=tied)
        record.gradient(norm, self.optimizer.learning_rate(self.optimizer_steps), finite=finite)
        if record.skipped:
            self.optimizer.zero_grad(set_to_none=True)
            return
        self.budget.row_tokens = 0  # from here on, no row is at fault if memory runs out
        if self.config.grad_clip > 0:
            clip(gradients, norm, self.config.grad_clip)
        self.optimizer.step(self.optimizer_steps)
        self.optimizer_steps += 1

    def _within_memory(self, work: Callable[[], Result]) -> Result:
        """Run a pass over rows. If memory runs out, halve the token budget for the rest of the batch and run the pass once more.

        With several ranks the pass is not repeated, because the other ranks wait in a collective of the pass that failed.

        Raises:
            MemoryShortError: if memory runs out a second time, while there are several ranks, or in the middle of an optimizer step.
        """
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            seen, half_applied = first_line(error), isinstance(error, HalfAppliedError)
        # Outside of the `except` block, because the exception holds the activations of the pass that failed.
        free_memory()
        budget = self.budget
        if half_applied or budget.halved or self.mesh.everyone is not None:
            half = ", half of token_budget" if budget.halved else ""
            raise MemoryShortError(
                f"memory ran out with micro-batches of up to {budget.tokens} tokens{half} ({seen}): {REMEDY}",
                at_half=budget.halved,
                row_tokens=0 if half_applied else budget.row_tokens,
            )
        budget.halved = True
        log.warning(
            "out of memory: the rest of the batch is trained with half the token budget",
            token_budget=budget.tokens,
            error=seen,
            remedy=REMEDY,
        )
        return self._within_memory(work)

    def _micro_batches(
        self,
        sequences: Sequence[TrainingRow],
        loss_weight_fn: LossWeight = lambda _: 0.0,
        contributes: Callable[[TrainingRow], bool] | None = None,
        *,
        whole_groups: bool = False,
    ) -> tuple[list[MicroBatch], float]:
        """Pack this rank's rows into micro-batches (every rank gets the same number), and return the weight of the global batch.

        If the weight is 0, return 1: there is no loss to divide then. Arguments as of `train_batch`.
        """
        if self.mesh.everyone is not None:
            self.mesh.check_same_rows(sequences)

        def packed() -> tuple[list[MicroBatch], float]:
            _check_rows(sequences, self.network)
            chosen = sequences if contributes is None else [each for each in sequences if contributes(each)]
            fold = self.config.fold_prompts
            batches = pack(chosen, self.budget.tokens, fold=fold, whole_groups=whole_groups)
            return batches, loss_weight_fn(sequences)

        batches, weight = agree(self.ranks, packed)
        largest = max(batches, key=lambda each: each.packed_tokens, default=None)
        alone = largest is not None and len(largest.sequences) == 1
        self.budget.row_tokens = largest.packed_tokens if largest is not None and alone else 0
        totals = self.ranks.total({"weight": weight, "max_batches": len(batches)})
        batches += [empty_batch(self.mesh.dims.cp) for _ in range(int(totals["max_batches"]) - len(batches))]
        return batches, totals["weight"] or 1.0

    def _accumulate(self, batches: Sequence[MicroBatch], loss_of: LossOf, record: StepRecord, entropy: Entropy) -> None:
        """Add the gradients of the micro-batches' losses to the parameters' gradients; at the end sum these over all ranks."""
        network = self.network
        if self.pipeline is not None:
            self.pipeline.train(batches, loss_of, record, entropy=entropy)
            return
        with network.reset_on_error():
            for number, batch in enumerate(batches, 1):
                if network.root is not None:
                    keep = not self.config.parallel.reshard
                    network.root.prepare_backward(last=number == len(batches), keep_gathered=keep)
                with record.phase("forward"):
                    moved = batch.to(network.device)
                    outputs = network.outputs(moved, entropy=entropy)
                    loss = loss_of(outputs, moved)
                with record.phase("backward"):
                    (loss if batch.sequences else connected(loss, outputs)).backward()

    def _evaluate(
        self, batches: Sequence[MicroBatch], consume: Callable[[Outputs, MicroBatch], object], entropy: Entropy = "none"
    ) -> None:
        """Pass the outputs of each micro-batch to `consume`, in order and without a gradient."""
        network = self.network
        if self.pipeline is not None:
            self.pipeline.evaluate(batches, consume, entropy=entropy)
        else:
            with network.reset_on_error(), torch.no_grad():
                for batch in batches:
                    moved = batch.to(network.device)
                    consume(network.outputs(moved, entropy=entropy), moved)
        if network.root is not None:
            network.root.free_gathered()

    def unfit_weights(self, dtype: torch.dtype | None = None) -> list[str]:
        """Return the names of weights that must be neither written nor published; every rank calls it and gets the same names.

        Weights of a frozen base are not checked again: they were checked when they were read.

        Args:
            dtype: Precision in which the weights will be stored; None keeps float32.
        """
        model = self.network.model
        named: dict[str, torch.Tensor] = {**self._trained()}
        if self.adapter is not None and self.adapter.config.merges:
            named |= self.adapter.merged(model.state_dict())  # the product of finite factors can be infinite
        found = unfit_weights(named.items(), dtype)
        ranks = Ranks(self.mesh.everyone)
        if not ranks.total({"unfit": len(found)})["unfit"]:
            return []
        return sorted({name for part in ranks.exchange("\n".join(found).encode()) for name in part.decode().split()})

    def require_fit(self, dtype: torch.dtype | None = None) -> None:
        """Raise if there are weights that must be neither written nor published; every rank calls it.

        Raises:
            UnfitWeightsError: on every rank, with some names and the remedy.
        """
        if found := self.unfit_weights(dtype):
            raise UnfitWeightsError(f"{describe_unfit(found, dtype)}; nothing was written")

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """Return the live weights (with an adapter: merged) under their Hugging Face names, tied weights once.

        The next step changes them. Tensors that transformers fused on loading (such as experts) are split again, which may copy them.
        """
        model = self.network.model
        state: dict[str, torch.Tensor] = model.state_dict()
        parameters = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
        once: dict[str, torch.Tensor] = {}
        seen: set[object] = set()
        for name, tensor in (state if self.adapter is None else self.adapter.merged(state)).items():
            # A process may hold no element of a DTensor. Then no address can tell which tensors are tied.
            place = (
                parameters.get(name, name)
                if isinstance(tensor, DTensor)
                else (tensor.data_ptr(), tensor.shape, tensor.stride())
            )
            if name.startswith(OWN_MODULES) or (tensor.numel() and place in seen):
                continue
            seen.add(place)
            once[name] = tensor
        # transformers fuses some modules on loading. Files and engines use the names from before the fusion.
        published: dict[str, torch.Tensor] = revert_weight_conversion(model, once)
        return published

    def named_tensors(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Return CPU copies of the weights under their Hugging Face names, tied weights once; `dtype` None keeps float32.

        DTensors are gathered one by one, so every rank has to call it.
        """
        return {name: cpu_copy(tensor, dtype) for name, tensor in self.live_tensors().items()}

    def export_hf(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a Hugging Face model directory, or a PEFT adapter if one is trained; it appears whole or not at all.

        Every rank calls it, rank 0 writes, and the directory exists when it returns on rank 0.

        Raises:
            FileExistsError: if the directory exists.
            ValueError: if the layers are distributed over several pipeline stages.
            UnfitWeightsError: if weights are not finite, or would not be finite in `dtype`.
        """
        if self.mesh.dims.pp > 1:
            raise ValueError(
                "no process has the layers of all pipeline stages: save a checkpoint, whose directory `hf` has all layers"
            )
        self.require_fit(dtype)
        tensors = self.network.model.state_dict() if self.adapter is None else self._trained()
        weights: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():  # one by one: ranks other than 0 hold one whole tensor at a time
            whole = tensor.detach().full_tensor().cpu() if isinstance(tensor, DTensor) else tensor.detach()
            if self.mesh.rank == 0:
                weights[name] = whole
        if self.mesh.rank == 0:
            self.export_weights(weights, directory, dtype)

    def export_weights(
        self, weights: dict[str, torch.Tensor], directory: str | Path, dtype: torch.dtype | None = None
    ) -> None:
        """Write the directory of `export_hf` from whole tensors, by their names in the network; any thread may call it."""
        if self.adapter is not None:
            self.adapter.export(self.model_dir, Path(directory), dtype, weights, self.chat_template)
            return
        model = self.network.model
        with whole_directory(Path(directory)) as staging:
            policy = {name: each for name, each in weights.items() if not name.startswith(OWN_MODULES)}
            model.save_pretrained(staging, state_dict={name: cpu_copy(each, dtype) for name, each in policy.items()})
            if dtype is not None:
                described = deepcopy(model.config)
                described.dtype = (
                    dtype  # transformers writes the model's dtype, and engines would widen the weights to that
                )
                described.save_pretrained(staging)
            save_tokenizer(self.model_dir, staging, self.chat_template)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors of a checkpoint as ``model.<name>`` and ``optimizer.<moment>.<name>``; tied weights once.

        The tensors are live, not copies: copy or write them before the next step.
        """
        moments = self.optimizer.tensors(self._trained().items())
        weights = {f"{MODEL}{name}": tensor.detach() for name, tensor in self._stored().items()}
        return weights | {f"{OPTIMIZER}{name}": tensor for name, tensor in moments.items()}

    def lend(self, read: Event) -> set[str]:
        """Keep the state in host memory unchanged until `read` is set; return its names, as in `state_tensors`."""
        return {f"{OPTIMIZER}{name}" for name in self.optimizer.lend(self._trained().items(), read)}

    def state_scalars(self) -> dict[str, int | float]:
        """Return all numbers of a checkpoint."""
        changed_lr = self.optimizer.changed_lr
        return {"optimizer_steps": self.optimizer_steps} | ({} if changed_lr is None else {"learning_rate": changed_lr})

    def state_room(self, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
        """Return the live tensors to read a checkpoint into. The optimizer's state is set to zeros.

        Args:
            shapes: Names and global shapes of the checkpoint's tensors.

        Raises:
            ValueError: if names or shapes do not fit this model and its optimizer; nothing has changed then.
        """
        trained, stored = self._trained(), self._stored()
        weights = {name.removeprefix(MODEL): shape for name, shape in shapes.items() if name.startswith(MODEL)}
        moments = {name.removeprefix(OPTIMIZER): shape for name, shape in shapes.items() if name.startswith(OPTIMIZER)}
        if self.mesh.stages is not None:  # the checkpoint has the tensors of all stages
            weights = {name: shape for name, shape in weights.items() if name in stored}
            moments = {name: shape for name, shape in moments.items() if name.partition(".")[2] in trained}
        if differing := sorted(weights.keys() ^ stored.keys()):
            raise ValueError(
                f"the checkpoint is of another model ({differing[0]!r} is on one side only): resume with the model it was made from"
            )
        for name, shape in weights.items():
            if shape != stored[name].shape:
                raise ValueError(
                    f"{name!r} has shape {tuple(shape)} in the checkpoint, {tuple(stored[name].shape)} in the model:"
                    " resume with the model it was made from"
                )
        room = self.optimizer.make_room(trained, moments)
        return {f"{MODEL}{name}": tensor.detach() for name, tensor in stored.items()} | {
            f"{OPTIMIZER}{name}": tensor for name, tensor in room.items()
        }

    def restore_scalars(self, scalars: Mapping[str, int | float]) -> None:
        """Restore the numbers of a checkpoint."""
        self.optimizer_steps = int(scalars["optimizer_steps"])
        self.optimizer.changed_lr = scalars.get("learning_rate")

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: each for name, each in self.network.model.named_parameters() if each.requires_grad}

    def _stored(self) -> dict[str, torch.Tensor]:
        """Return the model's tensors that go into a checkpoint: trained weights, and buffers if all weights are trained."""
        model, trained = self.network.model, self._trained()
        if not all(parameter.requires_grad for parameter in model.parameters()):
            return trained
        stored = model.state_dict().keys()
        return trained | {name: buffer for name, buffer in model.named_buffers() if name in stored}


def _fitted(config: ComputeConfig, network: Network, mesh: Mesh, device: torch.device) -> ComputeConfig:
    """Replace `accumulate` and `optimizer_offload` if they are still `auto`, by the memory of the devices. All ranks get the same values."""
    sizes = Decoder.of(network.model.config.get_text_config().to_dict())
    capacity, dims = None, mesh.dims
    if device.type == "cuda":
        given = config.device_memory_gb
        capacity = given * 1e9 if given else torch.cuda.get_device_properties(device).total_memory * USABLE
    decided: Decisions = {}
    if sizes is not None:
        needed = partial(estimate, sizes, device=device.type, processes=dims.world_size)
        decided = fit(config, needed, capacity, device=device.type, shards=dims.dp_shard * dims.cp)
    sums = decided.get("parallel.accumulate", (config.parallel.accumulate, ""))[0]
    offload = decided.get("optimizer_offload", (config.optimizer_offload, ""))[0]
    # Devices may differ. A saving that one rank needs is switched on for all, since they sum gradients together.
    found = Ranks(mesh.everyone).total({"sharded": sums == "sharded", "offload": offload is True})
    parallel = config.parallel.model_copy(update={"accumulate": "sharded" if found["sharded"] else "whole"})
    return config.model_copy(update={"parallel": parallel, "optimizer_offload": bool(found["offload"])})


def _recorded_loss(loss_fn: LossFn, weight: float, record: StepRecord, outputs: Outputs, batch: MicroBatch) -> Scalar:
    """Return a micro-batch's part of the global loss, and add it to the record."""
    total, sums = loss_fn(outputs, batch)
    loss = total / weight
    record.add(batch, loss, sums)
    return loss


def _check_rows(sequences: Sequence[TrainingRow], network: Network) -> None:
    vocabulary = network.vocabulary
    for sequence in sequences:
        low, high = (int(value) for value in sequence.input_ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"sequence {sequence.trajectory_id!r} has a token id outside of the vocabulary [0, {vocabulary}): was it made with another tokenizer?"
            )
        if network.longest_row is not None and len(tokens_to_forward(sequence)) > network.longest_row:
            kind = network.model.config.get_text_config().rope_parameters
            raise ValueError(
                f"sequence {sequence.trajectory_id!r} has {len(sequence)} tokens, and this model's RoPE ({kind.get('rope_type', 'per layer')}) has "
                f"other frequencies beyond {network.longest_row}, which would also change the sequences packed beside it: "
                "generate or keep shorter sequences (rollout.max_model_len, max_length), or choose another model"
            )
