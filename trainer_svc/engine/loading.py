"""Make a network ready for its forward pass: load it, check that packed training is exact for its architecture, lay it out, choose kernels.

`load_network` reads a Hugging Face directory, `distribute` lays the network out over the processes of a mesh, and `choose_kernels`
sets how its layers compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import structlog
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from trainer_svc.batch.attention_plan import AttentionPlan
from trainer_svc.compute_config import ParallelConfig, check_heads
from trainer_svc.engine.attention_choice import Attention, choose_attention, of_all_ranks
from trainer_svc.engine.cpu_kernels import onednn_is_faster, use_onednn
from trainer_svc.engine.finite import IncompleteWeightsError, UnfitWeightsError, some_of, unfit_weights
from trainer_svc.engine.network import PACKED_ATTENTION, Head, HeadShape, Network, Packing
from trainer_svc.engine.rounding import compute_as_served, store_frozen
from trainer_svc.engine.weight_files import WeightFiles, left_on_disk, read_weights, streaming
from trainer_svc.parallel.context import Context
from trainer_svc.parallel.mesh import Mesh, Ranks
from trainer_svc.parallel.sharding import Absent, Root, cut_stage, shard_weights, split_matrices

CPU = torch.device("cpu")

CHECK_LENGTHS = (7, 4)
"""Lengths in tokens of the two sequences of the packing check, which share their first two tokens."""

CHECK_TOLERANCE = 1e-3
"""Largest accepted difference of log-probabilities, in nats. float32 rounding stays below 1e-4; a missing feature is far above."""

log = structlog.get_logger(__name__)


class Checked(NamedTuple):
    """What `check_packing` has found.

    Attributes:
        own_head: Whether the logits are the output embedding times the last hidden state and nothing else.
        head_shapes: The heads of the attention layers that have run.
    """

    own_head: bool
    head_shapes: frozenset[HeadShape]


def resolve_device(name: str) -> torch.device:
    """Return the device that a setting names; raise ValueError if it names CUDA and there is no CUDA device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but PyTorch finds no CUDA device: set device to auto or cpu")
    return torch.device(name)


def load_network(
    path: str,
    device: torch.device,
    *,
    head: Head = "language",
    dtype: torch.dtype = torch.float32,
    logit_cells: int = 3 << 24,
    gradient_checkpointing: bool = False,
    lazy: tuple[int, int] | None = None,
) -> Network:
    """Load a causal transformer with float32 weights and check that packed training is exact for it.

    A value head that is not in the directory starts at 0.

    Args:
        path: A Hugging Face directory or hub id.
        device: Where to compute.
        head: What the network has on top. "value" loads transformers' sequence classifier with one label; "both" adds a module
            `value_head` to a language model.
        dtype: Precision of the forward pass.
        logit_cells: Most logits in memory at once.
        gradient_checkpointing: Recompute activations in the backward pass.
        lazy: None: read the weights. Otherwise this process's rank and the number of ranks that load the same model. If
            possible, the weights then stay in their files (`Network.files`) until the network is laid out, and each rank checks
            packing with its own share of the layers, which are read one by one.

    Raises:
        ValueError: if the architecture cannot be trained packed.
        UnfitWeightsError: if weights that were read are not finite.
    """
    unread = None if lazy is None else _unread(path, head, *lazy)
    if unread is None:
        model, files = _load(path, head).to(device), None
        model.eval()
        check_read(path, model)
        checked = check_packing(model, device, language=head != "value")
    else:
        model, files, checked = unread
    own_head = checked.own_head
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in model.modules():  # recomputing requires training mode; dropout stays off
            module.training = getattr(module, "gradient_checkpointing", False)
    if head == "both" and not own_head:
        raise ValueError(
            f"{type(model).__name__} makes its logits in its own way, which leaves no hidden states for a value head: give the critic a model of its own"
        )
    value_head = {"language": None, "value": getattr(model, "score", None), "both": getattr(model, "value_head", None)}
    longest_row = fix_frequencies(model)
    return Network(
        model,
        device,
        dtype,
        logit_cells,
        own_head,
        value_head[head],
        head,
        files=files,
        longest_row=longest_row,
        head_shapes=checked.head_shapes,
    )


def _unread(path: str, head: Head, rank: int, ranks: int) -> tuple[PreTrainedModel, WeightFiles, Checked] | None:
    """Load a model on the "meta" device; return it, the files of its weights, and the result of `check_packing`.

    Return None and restore PyTorch's generator if the weights cannot stay in their files.
    """
    drawn = torch.get_rng_state()
    found = left_on_disk(partial(_load, path, head))
    if found is not None:
        model, files = found
        model.eval()
        if head == "value":
            read_weights(model.score, files, CPU, below="score")
        try:
            checked = _checked(model, files, head, rank, ranks)
        except UnfitWeightsError:
            if names := files.unfit():
                raise _unfit(path, names) from None
            raise
        except RuntimeError:  # a module computes with weights of another module, which `streaming` does not read
            found = None
    if found is None:
        torch.set_rng_state(drawn)
        log.warning("weights cannot stay in their files: every process reads the whole model", model=path)
        return None
    return model, files, checked


def check_read(path: str, model: torch.nn.Module) -> None:
    """Refuse a model with weights that are not finite. Weights that are still in their files are not checked.

    Raises:
        UnfitWeightsError: with their names.
    """
    if names := unfit_weights(model.named_parameters()):
        raise _unfit(path, names)


def _unfit(path: str, names: list[str]) -> UnfitWeightsError:
    return UnfitWeightsError(
        f"{path} holds weights that are not finite, or too large to compute with: {some_of(names)}; get its files again, or name another model"
    )


def _checked(model: PreTrainedModel, files: WeightFiles, head: Head, rank: int, ranks: int) -> Checked:
    """Check packing with this rank's share of the layers. If that fails, check it with all layers."""
    language = head != "value"
    layers = getattr(model.base_model, "layers", None)
    if ranks > 1 and isinstance(layers, torch.nn.ModuleList) and len(layers) > 1:
        original = model.config._attn_implementation  # noqa: SLF001 - the check sets the packed one
        try:
            with _only(layers, rank % len(layers), ranks), streaming(model, files):
                return check_packing(model, CPU, language=language)
        except (ValueError, TypeError, IndexError, RuntimeError):
            model.set_attn_implementation(original)
    with streaming(model, files):
        return check_packing(model, CPU, language=language)


@contextmanager
def _only(layers: torch.nn.ModuleList, first: int, step: int) -> Iterator[None]:
    """Inside the block, keep only every `step`-th layer from `first` on; replace the others by stand-ins."""
    skipped = {place: layer for place, layer in enumerate(layers) if place % step != first % step}
    for place in skipped:
        layers[place] = Absent()
    try:
        yield
    finally:
        for place, layer in skipped.items():
            layers[place] = layer


def _load(path: str, head: Head, **options: Any) -> PreTrainedModel:  # noqa: ANN401  options of `from_pretrained`
    if head == "value":
        classifier, loading = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=torch.float32, num_labels=1, output_loading_info=True, **options
        )
        if not isinstance(getattr(classifier, "score", None), torch.nn.Linear):
            raise ValueError(
                f"{type(classifier).__name__} has no linear layer `score`: choose another model for values"
            )
        if "score.weight" in loading["missing_keys"]:
            torch.nn.init.zeros_(classifier.score.weight)  # with random weights the values would be far from any return
        return classifier
    model, loading = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True, **options
    )
    if missing := sorted(loading["missing_keys"]):
        named = ", ".join(missing[:3])
        raise IncompleteWeightsError(
            f"{path} lacks {named}, which transformers would fill with random weights: name a complete language model"
        )
    if head == "both":
        model.value_head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        torch.nn.init.zeros_(model.value_head.weight)
    return model


def check_packing(model: PreTrainedModel, device: torch.device, *, language: bool) -> Checked:
    """Compare packed outputs with the model's own outputs on single sequences, and set its attention to `packed_attention`.

    The model computes in float32. Without a language head hidden states are compared.

    Raises:
        ValueError: if they differ.
        UnfitWeightsError: if the model computes NaN.
    """
    seen: set[HeadShape] = set()
    with torch.no_grad():
        own_head = _check_packing(model, device, seen, language=language)
    return Checked(own_head, frozenset(seen))


def _check_packing(model: PreTrainedModel, device: torch.device, seen: set[HeadShape], *, language: bool) -> bool:
    body = model if language else model.base_model
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(vocabulary, (len(CHECK_LENGTHS), max(CHECK_LENGTHS)), generator=generator)
    rows[1, :2] = rows[0, :2]
    alone = _comparable(body(rows.to(device)))  # tokens after the end of the second row change no earlier output
    expected = torch.cat([row[1:length] for row, length in zip(alone, CHECK_LENGTHS, strict=True)])
    model.set_attn_implementation(PACKED_ATTENTION)
    arguments, keep = _packed(rows, device, seen)
    trunk: list[torch.Tensor] = []
    watching = model.base_model.register_forward_hook(lambda _, __, output: trunk.append(output.last_hidden_state[0]))
    try:
        packed = _comparable(body(**arguments))[0].index_select(0, keep)
    except TypeError as error:  # its forward does not pass keywords down
        raise ValueError(f"{type(model).__name__} cannot be trained packed ({error}): choose another model") from error
    finally:
        watching.remove()
    if expected.isnan().any():
        raise UnfitWeightsError(
            f"{type(model).__name__} computes values that are not numbers: look for damaged weights in its files"
        )
    gap = float((packed - expected).abs().max())
    if not gap <= CHECK_TOLERANCE:
        raise ValueError(
            f"{type(model).__name__} gives other log-probabilities when sequences are packed (by {gap:.3g} nats): its layers "
            "mix tokens outside of softmax attention, which packed training does not support; choose another model"
        )
    head = model.get_output_embeddings()
    if not language or head is None or not trunk:
        return not language
    logits = head(trunk[0].index_select(0, keep))
    return bool((torch.log_softmax(logits.float(), -1) - packed).abs().max() <= CHECK_TOLERANCE)


def _packed(rows: torch.Tensor, device: torch.device, seen: set[HeadShape]) -> tuple[dict[str, Any], torch.Tensor]:
    """Pack the two rows with their common beginning only once. Return the model's arguments, and the places of the compared tokens."""
    first, second = CHECK_LENGTHS
    plan = AttentionPlan.of([np.arange(first), np.r_[0, 1, first : first + second - 2]], first + second - 2).to(device)
    ids = torch.cat([rows[0], rows[1, 2:second]]).to(device).unsqueeze(0)
    positions = torch.cat([torch.arange(first), torch.arange(2, second)]).to(device).unsqueeze(0)
    keep = torch.tensor([*range(1, first), 1, *range(first, first + second - 2)], device=device)
    return {"input_ids": ids, "position_ids": positions, "packing": Packing(plan, seen=seen), "use_cache": False}, keep


def _comparable(output: Any) -> torch.Tensor:  # noqa: ANN401  transformers' output classes
    """Return the outputs that packing must not change: log-probabilities, or hidden states if there are no logits."""
    logits = getattr(output, "logits", None)
    return output.last_hidden_state.float() if logits is None else torch.log_softmax(logits.float(), -1)


def fix_frequencies(model: PreTrainedModel) -> int | None:
    """Keep a model's RoPE at the frequencies of short sequences.

    transformers computes `dynamic` and `longrope` frequencies from the largest position in the whole forward pass: one long
    sequence would change the log-probabilities of all sequences packed beside it. Up to the length of the model's original
    training the frequencies are constant, so such sequences can be packed; longer ones are refused. Fixed frequencies also save
    a wait for the device: transformers would read the positions in each forward pass.

    Returns:
        The longest sequence, in tokens, for which these frequencies are right; None means any length.
    """
    limits: list[int] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if not kinds or not hasattr(module, "original_max_seq_len"):
            continue
        by_layer = kinds if isinstance(kinds, Mapping) else {None: kinds}
        for layer_type, kind in by_layer.items():
            if kind == "longrope":
                limits.append(int(_parameters(module.config, layer_type)["original_max_position_embeddings"]))
            elif "dynamic" in kind:
                limits.append(int(module.original_max_seq_len))
        module.rope_type = dict.fromkeys(kinds, "fixed") if isinstance(kinds, Mapping) else "fixed"
    return min(limits, default=None)


def _parameters(config: Any, layer_type: str | None) -> Mapping[str, Any]:  # noqa: ANN401  transformers' configurations
    parameters: Mapping[str, Any] = config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]


def freeze(network: Network, dtype: torch.dtype) -> None:
    """Switch off the gradients of a network that is never trained, in place, and store its matrices in `dtype`.

    Call it before the network is laid out over processes.

    Raises:
        ValueError: if `dtype` is bfloat16 and the forward pass is float32.
    """
    network.model.requires_grad_(requires_grad=False)
    if dtype == torch.float32:
        return
    if network.compute_dtype != dtype:
        raise ValueError(
            "a frozen model's dtype is bfloat16, but the forward pass is float32: set trainer.dtype to bfloat16"
        )
    store_frozen(network.model, dtype)


def distribute(network: Network, mesh: Mesh, config: ParallelConfig | None = None) -> Network:
    """Lay a network out over a mesh, in place. Every process passes the same whole network.

    Args:
        network: On the CPU. Of weights that are still in their files, each process reads its own part.
        mesh: The processes; `SINGLE` changes nothing.
        config: Which gathered weights FSDP keeps, and when it sums gradients; None: the defaults.

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
    root.to(mesh.device)  # this also makes FSDP see the weights that were just read
    return replace(network, device=torch.device(mesh.device), context=context, root=root, files=None)


def choose_kernels(network: Network, attention: Attention, ranks: Ranks, *, compiled: bool) -> Network:
    """Set which kernels a network's layers use and how they round their weights. Call it after `distribute`.

    All processes of the network (`ranks`) call this.

    With `compiled` each decoder layer is compiled in place when it first runs, except for its attention.

    Raises:
        ValueError: if the device has no varlen kernel and `attention` is varlen, or the model names no decoder layers.
    """
    compute_as_served(network.model, network.compute_dtype, whole_logits=network.language and not network.own_head)
    if compiled:
        compile_layers(network.model)
    # oneDNN's kernels do not take DTensors (sharded weights), and compiled layers bring their own kernels for products.
    alone = network.root is None and network.context is None and not compiled
    onednn = alone and network.device.type == "cpu" and network.compute_dtype == torch.float32 and onednn_is_faster()
    if onednn:
        use_onednn(network.model, leave_out=(network.model.get_output_embeddings(), network.value_head))
    shapes = of_all_ranks(network.head_shapes, ranks)
    choice = choose_attention(attention, network.device, network.compute_dtype, shapes)
    if network.device.type != "cpu":  # a CPU leaves no choice
        log.info(str(choice), model=type(network.model).__name__)
    return replace(network, varlen=choice.varlen, few_lengths=onednn)


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Have `torch.compile` compile each decoder layer when it first runs, in place and for any number of tokens."""
    names = set(model._no_split_modules or ())  # noqa: SLF001 - transformers' own list of decoder layers, as for FSDP
    layers = [module for module in model.modules() if type(module).__name__.removeprefix("FSDP") in names]
    if not layers:
        raise ValueError(f"{type(model).__name__} names no decoder layers to compile: set compile to false")
    for layer in layers:
        layer.compile(dynamic=True, backend=backend)
