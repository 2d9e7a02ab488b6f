"""Whether a model's sizes can be shared out over a mesh; known from its configuration alone. Pure: imports no torch."""

from __future__ import annotations

from sluice.models import ModelSizes
from trainer_svc.compute_config import ParallelConfig

__all__ = ["check_fits", "check_heads", "check_tensor", "layer_shares"]

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose modules have the names and meanings of the plan of `trainer_svc.parallel.tensor`."""


def check_fits(sizes: ModelSizes, parallel: ParallelConfig) -> None:
    """Refuse a model that the axes cannot share; a size that is not known refuses nothing.

    Raises:
        ValueError: with the remedy.
    """
    if parallel.tp > 1 and sizes.model_type:
        check_tensor(sizes, parallel.tp)
    if parallel.cp > 1 and sizes.heads is not None:
        check_heads(sizes.heads, parallel.tp, parallel.cp)
    if parallel.pp > 1 and sizes.layers is not None:
        layer_shares(sizes.layers, parallel.pp)


def check_tensor(sizes: ModelSizes, tp: int) -> None:
    """Refuse a model that tensor parallelism does not fit.

    Raises:
        ValueError: if the architecture is not known, or its sizes do not divide by `tp`.
    """
    if sizes.model_type not in MODEL_TYPES:
        raise ValueError(
            f"tensor parallelism knows {', '.join(MODEL_TYPES)}, not {sizes.model_type}: set trainer.parallel.tp to 1 and"
            " use dp_shard or cp instead"
        )
    named = {
        "attention heads": sizes.heads,
        "key-value heads": sizes.key_heads,
        "columns of the MLP": sizes.inner,
    }
    for name, size in named.items():
        if size is not None and size % tp:
            raise ValueError(
                f"tp is {tp}, which does not divide the model's {size} {name}: set trainer.parallel.tp to a divisor of it"
            )


def check_heads(heads: int, tp: int, cp: int) -> None:
    """Refuse what Ulysses cannot share out.

    Raises:
        ValueError: if the heads of one tensor-parallel process do not divide by `cp`.
    """
    if heads // tp % cp:
        fitting = [size for size in range(1, heads // tp + 1) if heads // tp % size == 0]
        raise ValueError(
            f"cp is {cp}, but a process has {heads // tp} attention heads to share out ({heads} over tp {tp}): set"
            f" trainer.parallel.cp to one of {', '.join(map(str, fitting))}"
        )


def layer_shares(layers: int, stages: int) -> list[range]:
    """Which layers each stage has, in order; the first stages have one more where they cannot share evenly.

    The last stage has the head besides, which is why it is never among those with one more.

    Raises:
        ValueError: if there are fewer layers than stages.
    """
    if layers < stages:
        raise ValueError(
            f"{layers} layers cannot be shared by {stages} stages: set trainer.parallel.pp to {layers} or less"
        )
    least, more = divmod(layers, stages)
    ends = [(stage + 1) * least + min(stage + 1, more) for stage in range(stages)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
