"""Loading a network from a Hugging Face directory: its weights are read, or stay in their files until it is laid out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import structlog
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from trainer_svc.engine.network import Head, Network
from trainer_svc.engine.probe import check_packing
from trainer_svc.engine.rope import fix_frequencies
from trainer_svc.engine.weight_files import WeightFiles, left_on_disk, read_weights, streaming

__all__ = ["freeze", "load_network"]

CPU = torch.device("cpu")

log = structlog.get_logger(__name__)


def load_network(
    path: str,
    device: torch.device,
    *,
    head: Head = "language",
    dtype: torch.dtype = torch.float32,
    logit_cells: int = 3 << 24,
    gradient_checkpointing: bool = False,
    read: bool = True,
    rank: int = 0,
    ranks: int = 1,
) -> Network:
    """Load a causal transformer with float32 weights and check that packed training is exact for it.

    A value head that the directory does not hold begins at 0.

    Args:
        path: A Hugging Face directory or hub id.
        device: Where to compute.
        head: What it has on top. "value" loads a sequence classifier with one label, as transformers names it; "both" puts
            a module `value_head` on a language model.
        dtype: Precision of the forward pass.
        logit_cells: Most logits alive at once.
        gradient_checkpointing: Recompute activations in the backward pass.
        read: Whether to read the weights. False leaves them in their files where that can be done: then `Network.files`
            says where they are, and the check reads them one by one.
        rank: This process, among those that load the same model.
        ranks: How many they are. Each checks its share of the layers of a model whose weights stay in their files.

    Raises:
        ValueError: if the architecture cannot be trained packed.
    """
    unread = None if read else _unread(path, head, rank, ranks)
    if unread is None:
        model, files = _load(path, head).to(device), None
        model.eval()
        own_head = check_packing(model, device, language=head != "value")
    else:
        model, files, own_head = unread
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in model.modules():  # recomputing asks for training mode; dropout stays off all the same
            module.training = getattr(module, "gradient_checkpointing", False)
    if head == "both" and not own_head:
        raise ValueError(f"{type(model).__name__} makes its logits in its own way: give the critic a model of its own")
    value_head = {"language": None, "value": getattr(model, "score", None), "both": getattr(model, "value_head", None)}
    longest_row = fix_frequencies(model)
    return Network(
        model, device, dtype, logit_cells, own_head, value_head[head], head, files=files, longest_row=longest_row
    )


def _unread(path: str, head: Head, rank: int, ranks: int) -> tuple[PreTrainedModel, WeightFiles, bool] | None:
    """A model on the "meta" device, where its weights are, and whether its output embedding alone makes the logits.

    None where the weights cannot stay in their files; then it is as if it had not been tried.
    """
    drawn = torch.get_rng_state()
    found = left_on_disk(partial(_load, path, head))
    if found is not None:
        model, files = found
        model.eval()
        if head == "value":
            read_weights(model.score, files, CPU, below="score")
        try:
            own_head = _checked(model, files, head, rank, ranks)
        except RuntimeError:  # a module computes with weights of another one, which are not there
            found = None
    if found is None:
        torch.set_rng_state(drawn)
        log.warning("weights cannot stay in their files: every process reads the whole model", model=path)
        return None
    return model, files, own_head


def _checked(model: PreTrainedModel, files: WeightFiles, head: Head, rank: int, ranks: int) -> bool:
    """Check packing with this process's share of the layers; where that fails, with all of them, which decides."""
    language = head != "value"
    layers = getattr(model.base_model, "layers", None)
    if ranks > 1 and isinstance(layers, torch.nn.ModuleList) and len(layers) > 1:
        original = model.config._attn_implementation  # noqa: SLF001 - the check sets the packed one
        try:
            with _only(layers, rank % len(layers), ranks), streaming(model, files):
                return bool(check_packing(model, CPU, language=language))
        except (ValueError, TypeError, IndexError, RuntimeError):
            model.set_attn_implementation(original)
    with streaming(model, files):
        return bool(check_packing(model, CPU, language=language))


class _Skipped(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Stands for a layer that another process checks."""

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return the hidden states unchanged."""
        return hidden_states


@contextmanager
def _only(layers: torch.nn.ModuleList, first: int, step: int) -> Iterator[None]:
    """Leave every `step`-th layer from `first` on, and put the others back in the end."""
    skipped = {place: layer for place, layer in enumerate(layers) if place % step != first % step}
    for place in skipped:
        layers[place] = _Skipped()
    try:
        yield
    finally:
        for place, layer in skipped.items():
            layers[place] = layer


def _load(path: str, head: Head, **options: Any) -> PreTrainedModel:  # noqa: ANN401  those of `from_pretrained`
    if head == "value":
        classifier, loading = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=torch.float32, num_labels=1, output_loading_info=True, **options
        )
        if not isinstance(getattr(classifier, "score", None), torch.nn.Linear):
            raise ValueError(
                f"{type(classifier).__name__} has no linear layer `score`: choose another model for values"
            )
        if "score.weight" in loading["missing_keys"]:
            torch.nn.init.zeros_(classifier.score.weight)  # a drawn one would begin with values far off all returns
        return classifier
    model, loading = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True, **options
    )
    if missing := sorted(loading["missing_keys"]):
        named = ", ".join(missing[:3])
        raise ValueError(f"{path} lacks {named}, which random weights would stand in for: name a whole language model")
    if head == "both":
        model.value_head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        torch.nn.init.zeros_(model.value_head.weight)
    return model


def freeze(network: Network, dtype: torch.dtype) -> None:
    """Make a network one that only ever computes, in place: its weights have no gradient.

    In bfloat16 its matrices are kept as they are computed anyhow; vectors stay float32, and so do hidden states between layers.

    Args:
        network: Not yet cut over processes.
        dtype: Precision in which matrices are kept.

    Raises:
        ValueError: if that is bfloat16 and the forward pass is not.
    """
    network.model.requires_grad_(requires_grad=False)
    if dtype == torch.float32:
        return
    if network.compute_dtype != dtype:
        raise ValueError(
            "a frozen model's dtype is bfloat16, but the forward pass is float32: set trainer.dtype to bfloat16"
        )
    for module in network.model.modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding) and module is not network.value_head:
            module.to(dtype)
    embedding = network.model.get_input_embeddings()
    embedding.register_forward_hook(lambda _, __, output: output.float())
