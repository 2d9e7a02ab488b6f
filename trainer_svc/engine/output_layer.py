"""Log-probabilities and entropies of loss tokens, by whatever makes the logits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard
from torch.utils.checkpoint import checkpoint

from trainer_svc.batch.shapes import Indices, PerToken, TokenStates
from trainer_svc.engine.fused_logprob import Entropy, fused_logprobs
from trainer_svc.engine.local_part import local_part

__all__ = ["logprobs_of_logits", "logprobs_of_states"]


def logprobs_of_states(
    head: torch.nn.Module,
    states: TokenStates,
    targets: Indices,
    temperatures: PerToken,
    *,
    vocabulary: int,
    entropy: Entropy,
    cells: int,
) -> tuple[PerToken, PerToken | None]:
    """Log-probability of each target and the entropy, in nats, after temperature.

    A linear layer is fused with the softmax; one whose weight is a DTensor over a tensor-parallel mesh holds a slice of
    the vocabulary. Any other module is called for some of the tokens at a time, and again in the backward pass.

    Args:
        head: The output layer.
        states: Hidden states that predict the targets.
        targets: Token ids.
        temperatures: Divisor of each token's logits.
        vocabulary: Token ids in all.
        entropy: Whether the entropy is computed, and with a gradient.
        cells: Most logits alive at once.

    Raises:
        ValueError: if the layer's weight is cut in a way that gives no slice of the vocabulary.
    """
    if type(head) is not torch.nn.Linear:  # an adapter's or FSDP's layer does more in its forward
        return _in_parts(head, states, targets, temperatures, entropy=entropy, rows=max(1, cells // vocabulary))
    weight, bias, group, start = _slice(head.weight, head.bias)
    return fused_logprobs(
        states,
        weight,
        targets,
        temperatures,
        bias=bias,
        entropy=entropy,
        cells=cells,
        group=group,
        vocabulary_start=start,
    )


def logprobs_of_logits(
    logits: torch.Tensor, targets: Indices, temperatures: PerToken, *, entropy: Entropy
) -> tuple[PerToken, PerToken | None]:
    """The same from logits of shape [tokens, vocabulary]."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scaled = torch.log_softmax(wide / temperatures.to(wide.dtype).unsqueeze(1), dim=-1)
    chosen = scaled.gather(1, targets.unsqueeze(1)).squeeze(1)
    if entropy == "none":
        return chosen, None
    spread = scaled if entropy == "train" else scaled.detach()
    return chosen, -(spread.exp() * spread).sum(-1)


def _slice(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, dist.ProcessGroup | None, int]:
    """This rank's rows of an output layer, who has the others, and the first token id."""
    if not isinstance(weight, DTensor):
        return weight, bias, None, 0
    mesh = weight.device_mesh
    if mesh.mesh_dim_names != ("tp",) or weight.placements != (Shard(0),):
        raise ValueError(
            f"the output layer's weight is {weight.placements} over {mesh.mesh_dim_names}: gather it over data-parallel "
            "ranks first, and cut it by rows over `tp` (ColwiseParallel)"
        )
    own = bias.to_local() if isinstance(bias, DTensor) else bias
    return weight.to_local(), own, mesh.get_group(), local_part(weight)[1][0]


def _in_parts(
    head: torch.nn.Module,
    states: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    entropy: Entropy,
    rows: int,
) -> tuple[PerToken, PerToken | None]:
    def part(some: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor) -> tuple[PerToken, PerToken | None]:
        return logprobs_of_logits(head(some), targets, temperatures, entropy=entropy)

    if len(states) <= rows:
        return part(states, targets, temperatures)
    pieces = zip(states.split(rows), targets.split(rows), temperatures.split(rows), strict=True)
    done = [checkpoint(part, *piece, use_reentrant=False) for piece in pieces]
    logprobs = torch.cat([logprob for logprob, _ in done])
    return logprobs, torch.cat([value for _, value in done]) if entropy != "none" else None
