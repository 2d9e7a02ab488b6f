"""The network: a causal transformer that computes its outputs at the loss tokens of packed micro-batches.

`trainer_svc.engine.loading` reads it, `distribute` lays it out over the processes of a mesh, `choose_kernels` sets how its
layers compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from trainer_svc.batch.rows import MicroBatch, Outputs
from trainer_svc.batch.shapes import PerToken, Scalar
from trainer_svc.compute_config import ParallelConfig
from trainer_svc.engine.attention import Attention, Packing, uses_varlen
from trainer_svc.engine.logprob import Entropy, logprobs_of_logits, logprobs_of_states
from trainer_svc.engine.weight_files import WeightFiles, read_weights
from trainer_svc.parallel.context import Context
from trainer_svc.parallel.dims import check_heads
from trainer_svc.parallel.mesh import Mesh
from trainer_svc.parallel.sharding import Root, cut_stage, shard_weights, split_matrices

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""PyTorch's types by the names in the settings."""

Head = Literal["language", "value", "both"]
"""What a network has on top: logits of tokens, one value per token, or both on one trunk."""


def resolve_device(name: str) -> torch.device:
    """Return the device that a setting names.

    Raises:
        ValueError: if it names CUDA and there is no CUDA device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but PyTorch finds no CUDA device: set device to auto or cpu")
    return torch.device(name)


@dataclass(frozen=True, slots=True)
class Network:
    """A causal transformer that computes its outputs at the loss tokens of packed micro-batches.

    Attributes:
        model: The transformers model with float32 weights; a value head is one of its modules.
        device: Where it computes.
        compute_dtype: Precision of the forward pass.
        logit_cells: Most logits (tokens x vocabulary) in memory at once.
        own_head: Whether the logits are the output embedding times the last hidden state and nothing else. Otherwise the
            model's own forward computes all of them at once.
        value_head: The linear layer that turns a hidden state into a value; None if this process has none.
        head: What the whole network has on top.
        context: The processes that share each row of tokens; None if each has its rows alone.
        root: Gathers sharded weights around the forward pass; None in a single process.
        varlen: Whether attention uses the kernel for sequences of varying length.
        files: The files of weights that are still on the "meta" device; None once they are read.
        longest_row: Most tokens of a sequence (see `trainer_svc.engine.loading.fix_frequencies`); None means any number.
    """

    model: PreTrainedModel
    device: torch.device
    compute_dtype: torch.dtype
    logit_cells: int
    own_head: bool = True
    value_head: torch.nn.Linear | None = None
    head: Head = "language"
    context: Context | None = None
    root: Root | None = None
    varlen: bool = False
    files: WeightFiles | None = None
    longest_row: int | None = None

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model knows."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def width(self) -> int:
        """Size of a hidden state."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def language(self) -> bool:
        """Whether the network predicts tokens."""
        return self.head != "value"

    @property
    def has_values(self) -> bool:
        """Whether the network computes values."""
        return self.head != "language"

    def local_tokens(self, batch: MicroBatch) -> int:
        """Return the number of tokens of a micro-batch whose hidden states this process computes."""
        return batch.packed_tokens if self.context is None else self.context.width(batch)

    def outputs(self, batch: MicroBatch, *, entropy: Entropy = "none") -> Outputs:
        """Compute the outputs at each loss token under the current weights.

        Args:
            batch: A micro-batch on the network's device.
            entropy: Whether to compute the entropy of the distribution at each token, in nats, and with a gradient.
        """
        return Outputs(*self.under_root(self._outputs, batch, entropy))

    def under_root(self, compute: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401  what `compute` returns
        """Call a function that runs modules of the model, with sharded weights gathered around it.

        Args:
            compute: Returns a tensor, or a tuple of tensors and None.
            arguments: Its arguments.
        """
        return compute(*arguments) if self.root is None else self.root(compute, *arguments)

    @contextmanager
    def reset_on_error(self) -> Iterator[None]:
        """Reset the sharding's state if a pass fails, so that another pass can follow."""
        try:
            yield
        except BaseException:
            if self.root is not None:
                self.root.reset()
            raise

    def _outputs(self, batch: MicroBatch, entropy: Entropy) -> tuple[PerToken | None, ...]:
        if self.own_head:
            return self.read(self.hidden(batch), batch, entropy=entropy)
        part, own = self._own_slice(batch)
        with self._precision():
            logits = self._forward(self.model, part, input_ids=part.input_ids, logits_to_keep=part.predictors).logits[0]
            columns = logprobs_of_logits(logits, part.targets, part.temperatures, entropy=entropy)
        return self._gather(columns, own, batch)

    def hidden(self, batch: MicroBatch, states: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the hidden states after the last layer, shape [packed, width]; of this process's slice if a row is shared.

        Args:
            batch: A micro-batch on the network's device.
            states: Hidden states that the first layer of this process receives; None: the tokens' embeddings.
        """
        batch, _ = self._own_slice(batch)
        with self._precision():
            inputs = {"input_ids": batch.input_ids} if states is None else {"inputs_embeds": states.unsqueeze(0)}
            hidden: torch.Tensor = self._forward(self.model.base_model, batch, **inputs).last_hidden_state[0]
            return hidden

    def read(self, hidden: torch.Tensor, batch: MicroBatch, *, entropy: Entropy) -> tuple[PerToken | None, ...]:
        """Compute log-probabilities, entropies and values at each loss token from the hidden states after the last layer."""
        part, own = self._own_slice(batch)
        with self._precision():
            states = hidden.index_select(0, part.predictors)
            values = None if self.value_head is None else _values(self.value_head, states)
            columns: tuple[PerToken | None, PerToken | None] = (None, None)
            if self.language:
                columns = logprobs_of_states(
                    self.model.get_output_embeddings(),
                    states,
                    part.targets,
                    part.temperatures,
                    vocabulary=self.vocabulary,
                    entropy=entropy,
                    cells=self.logit_cells,
                )
        return self._gather((*columns, values), own, batch)

    def _own_slice(self, batch: MicroBatch) -> tuple[MicroBatch, torch.Tensor | None]:
        return (batch, None) if self.context is None else self.context.own_slice(batch)

    def _gather(
        self, columns: tuple[PerToken | None, ...], own: torch.Tensor | None, batch: MicroBatch
    ) -> tuple[PerToken | None, ...]:
        if self.context is None or own is None:
            return columns
        return tuple(self.context.gather(columns, own, len(batch.targets)))

    def _precision(self) -> torch.autocast:
        mixed = self.compute_dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=mixed)

    def _forward(self, module: torch.nn.Module, batch: MicroBatch, **options: Any) -> Any:  # noqa: ANN401  transformers' output classes
        packing = Packing(batch.attention, self.context, varlen=self.varlen)
        return module(position_ids=batch.position_ids, packing=packing, use_cache=False, **options)


def _values(head: torch.nn.Module, states: torch.Tensor) -> PerToken:
    # float32 or wider, whatever the layers compute in: a critic learns returns to more digits than bfloat16 has.
    with torch.autocast(states.device.type, enabled=False):
        return head(states if states.dtype == torch.float64 else states.float()).squeeze(-1)


def connected(loss: Scalar, outputs: Outputs) -> Scalar:
    """Return the loss of an empty micro-batch with a backward pass through all outputs, in which ranks exchange gradients."""
    columns = (outputs.logprobs, outputs.entropy, outputs.values)
    return loss + sum(column.sum() for column in columns if column is not None and column.requires_grad)


def distribute(network: Network, mesh: Mesh, config: ParallelConfig | None = None) -> Network:
    """Lay a network out over a mesh, in place. Every process passes the same whole network.

    Args:
        network: On the CPU. Weights that are still in their files are then read, each process only its own part.
        mesh: The processes; `SINGLE` changes nothing.
        config: What FSDP keeps, and when it sums gradients; None: the defaults.

    Raises:
        ValueError: if the model does not fit the mesh.
    """
    if mesh.weights is None or mesh.device is None:
        return network
    if network.language and not network.own_head and mesh.dims.tp * mesh.dims.pp > 1:
        raise ValueError(
            f"{type(network.model).__name__} does more than multiply by its output embedding to make logits, which tensor and"
            " pipeline parallelism cannot split: set trainer.parallel.tp and trainer.parallel.pp to 1"
        )
    if mesh.stages is not None:
        cut_stage(network.model, mesh.place["pp"], mesh.dims.pp)
        last = mesh.place["pp"] == mesh.dims.pp - 1
        network = replace(network, value_head=network.value_head if last else None)
    context = None
    if mesh.context is not None:
        check_heads(network.model.config.get_text_config().num_attention_heads, mesh.dims.tp, mesh.dims.cp)
        context = Context(mesh.context)
    if mesh.tensor is not None:
        split_matrices(network.model, mesh.tensor)
    config = config or ParallelConfig()
    root = Root(network.model, every_time=config.accumulate == "sharded")
    if mesh.data is not None:
        shard_weights(root, mesh.data, dtype=network.compute_dtype, reshard=config.reshard)
    if network.files is not None:
        read_weights(network.model, network.files, mesh.device)
    root.to(mesh.device)  # this also shows FSDP the weights that were read just now
    return replace(network, device=torch.device(mesh.device), context=context, root=root, files=None)


def choose_kernels(network: Network, attention: Attention, *, compiled: bool) -> Network:
    """Set which kernels a network's layers run on, after it was laid out.

    Args:
        network: With `compiled` its decoder layers are compiled in place, when each first runs.
        attention: auto, sdpa (PyTorch's kernels on blocks of similar length) or varlen (CUDA's flash kernel).
        compiled: Whether `torch.compile` makes kernels for the decoder layers. Attention is left as it is.

    Raises:
        ValueError: if the device has no varlen kernel and `attention` is varlen, or the model names no decoder layers.
    """
    config = network.model.config.get_text_config()
    heads = int(config.num_attention_heads)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    if compiled:
        compile_layers(network.model)
    varlen = uses_varlen(attention, network.device, network.compute_dtype, (heads, key_heads, head_dim))
    return replace(network, varlen=varlen)


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Have `torch.compile` compile each decoder layer when it first runs, in place and for any number of tokens.

    Raises:
        ValueError: if the model names no decoder layers.
    """
    names = set(model._no_split_modules or ())  # noqa: SLF001 - transformers' own list of decoder layers, as for FSDP
    layers = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]
    if not layers:
        raise ValueError(f"{type(model).__name__} names no decoder layers to compile: set compile to false")
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
