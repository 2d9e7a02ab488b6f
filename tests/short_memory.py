"""Passes and optimizer steps that run out of memory where a test says."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer_svc.engine.engine import TrainEngine


def run_out(engine: TrainEngine, place: str, due: Callable[[], bool]) -> None:
    """Raise OutOfMemoryError in the middle of a place, once at the first time that it is due.

    Args:
        engine: Whose passes fail.
        place: `forward`, `backward` or `optimizer`.
        due: Asked in each pass of the second layer, or in each optimizer step.
    """
    failed: list[str] = []

    def fail() -> None:
        if not failed and due():
            failed.append(place)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore advice")

    if place == "optimizer":
        part = engine.optimizer.parts[-1]
        step = part.step

        def half_a_step() -> None:
            if not failed and due():
                with torch.no_grad():
                    part.param_groups[0]["params"][0].add_(1.0)
            fail()
            step()

        part.step = half_a_step
        return

    def watch(_: object, __: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if place == "forward":
            fail()
        elif states.requires_grad:
            states.register_hook(lambda _: fail())

    engine.network.model.base_model.layers[1].register_forward_hook(watch)


def hold(engine: TrainEngine, tokens: int) -> list[int]:
    """Let a forward pass run out of memory if it has more than `tokens` tokens. Return a list to which each pass appends its tokens."""
    passes: list[int] = []

    def check(_: object, __: object, arguments: dict[str, torch.Tensor]) -> None:
        passes.append(arguments["input_ids"].shape[-1])
        if passes[-1] > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    engine.network.model.base_model.register_forward_pre_hook(check, with_kwargs=True)
    return passes
