"""Adapters as directories: as PEFT loads them, or added to the weights of their base."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from sluice.host_files import whole_directory
from trainer_svc.engine.lora import Adapter

__all__ = ["export_adapter", "merge_adapter"]


def export_adapter(
    adapter: Adapter,
    source: str,
    directory: Path,
    dtype: torch.dtype | None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a PEFT adapter with its tokenizer, or the merged model if the settings say so; it appears whole or not at all.

    Args:
        adapter: The adapter.
        source: Directory or hub id of its base.
        directory: Where to write.
        dtype: Precision of the weights; None keeps float32.
        weights: The trained weights by their names in the model; None: those that it has now.

    Raises:
        FileExistsError: if the directory exists.
    """
    if adapter.config.merges:
        with tempfile.TemporaryDirectory(prefix="sluice-adapter-") as parts:
            adapter.save(Path(parts), weights=weights)
            merge_adapter(source, parts, directory, dtype or torch.float32)
        return
    with whole_directory(directory) as staging:
        adapter.save(staging, dtype, weights)
        AutoTokenizer.from_pretrained(source).save_pretrained(staging)


def merge_adapter(base: str, adapter: str, directory: Path, dtype: torch.dtype) -> None:
    """Write the model that computes what base and adapter compute together.

    Args:
        base: Directory or hub id of the base model.
        adapter: Directory or hub id of the adapter; one of a sequence classifier gives a classifier.
        directory: Where to write.
        dtype: Precision of the written weights; the factors are added in float32.

    Raises:
        FileExistsError: if the directory exists.
        ValueError: if there is no adapter, or it is none of this base.
    """
    # Seconds of import that training without it does not need.
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict, load_peft_weights  # noqa: PLC0415

    with whole_directory(directory) as staging:
        try:
            config = PeftConfig.from_pretrained(adapter)
        except KeyError as error:
            raise ValueError(f"{adapter} is of a kind that PEFT does not know: {error}") from error
        if config.task_type == "SEQ_CLS":
            model = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, num_labels=1)
        else:
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of names that are missing, which are compared below
                wrapped = PeftModel.from_pretrained(model, adapter)
        except RuntimeError as error:  # shapes that do not fit
            raise ValueError(f"it is no adapter of this base ({_mismatch(error)})") from error
        _check_names(set(load_peft_weights(adapter, device="cpu")), set(get_peft_model_state_dict(wrapped)))
        merged = wrapped.merge_and_unload(safe_merge=True)
        merged.to(dtype).save_pretrained(staging)
        AutoTokenizer.from_pretrained(base).save_pretrained(staging)


def _check_names(given: set[str], wanted: set[str]) -> None:
    """Refuse factors that belong to no layer of the base, and layers without any: PEFT leaves out the first and draws the second."""
    lacking, foreign = (
        sorted(name for name in names if ".lora_" in name) for names in (wanted - given, given - wanted)
    )
    if lacking:
        raise ValueError(f"it is no adapter of this base (it lacks {lacking[0]}, whose layer the base has)")
    if foreign:
        raise ValueError(f"it is no adapter of this base (it has {foreign[0]}, whose layer the base lacks)")


def _mismatch(error: RuntimeError) -> str:
    """The first of the shapes that PyTorch names below a heading, one a line."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line.rstrip(".") for line in lines if line.startswith("size mismatch")), lines[0])
