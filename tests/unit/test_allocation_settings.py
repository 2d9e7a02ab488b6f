"""`allocation_mode` and `backend` as settings: what they set, and what they refuse beside them."""

from __future__ import annotations

import pytest

from sluice.config import ConfigError, RunConfig, load_run


def loaded(*flags: str) -> RunConfig:
    return load_run(flags)


def sizes(run: RunConfig) -> tuple[int, ...]:
    parallel = run.trainer.parallel
    return tuple(getattr(parallel, name) for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp"))


def test_one_line_sets_the_dimensions_of_engines_and_trainer() -> None:
    run = loaded("--allocation-mode", "vllm:d3t2+fsdp:d4t2c2")
    assert sizes(run) == (1, 4, 2, 2, 1)
    assert run.rollout.engine_args["tensor_parallel_size"] == 2


def test_one_backend_per_role_sets_the_same_dimensions() -> None:
    run = loaded("--rollout.backend", "transformers:d2", "--trainer.backend", "fsdp:d4p2")
    assert sizes(run) == (1, 4, 1, 1, 2)
    assert run.rollout.engine == "transformers"
    assert run.rollout.engine_args == {}


def test_without_an_allocation_the_settings_stay_as_they_are() -> None:
    assert sizes(loaded("--trainer.parallel.tp", "2")) == (1, -1, 2, 1, 1)


def test_the_number_of_copies_may_be_set_beside_the_allocation() -> None:
    assert sizes(loaded("--trainer.backend", "fsdp:d8", "--trainer.parallel.dp-replicate", "2")) == (2, 4, 1, 1, 1)
    assert sizes(loaded("--trainer.backend", "fsdp:d8", "--trainer.parallel.dp-shard", "2")) == (4, 2, 1, 1, 1)


def test_resolved_settings_resolve_to_themselves() -> None:
    flags = ["--allocation-mode", "d2t2+d4p2"]
    written = ["--trainer.parallel", '{"dp_replicate": 1, "dp_shard": 4, "tp": 1, "cp": 1, "pp": 2}']
    arguments = ["--rollout.engine-args", '{"tensor_parallel_size": 2}']
    again = loaded(*flags, *written, *arguments)
    assert (sizes(again), again.rollout.engine_args) == (sizes(loaded(*flags)), {"tensor_parallel_size": 2})


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--trainer.parallel.tp", "4"], ("allocation_mode 'vllm:d2+fsdp:d4t2'", "trainer.parallel.tp is 4")),
        (["--trainer.parallel.dp-shard", "3"], ("d4", "dp_replicate x dp_shard is 1 x 3")),
        (["--trainer.parallel.dp-replicate", "3"], ("d4", "3 x the rest")),
        (["--rollout.engine", "transformers"], ("vllm", "rollout.engine is transformers")),
        (["--rollout.engine-args.tensor_parallel_size", "2"], ("tensor_parallel_size = 1", "is 2")),
        (["--trainer.backend", "fsdp:d2"], ("allocation_mode 'vllm:d2+fsdp:d4t2'", "trainer.backend 'fsdp:d2'")),
        (["--rollout.backend", "transformers:d2"], ("rollout.backend 'transformers:d2'",)),
        (["--trainer.backend", "megatron:d2"], ("trainer.backend", "megatron", "fsdp")),
        (["--rollout.backend", "fsdp:d2"], ("rollout.backend", "role rollout cannot run on fsdp")),
    ],
)
def test_a_setting_that_contradicts_the_allocation_is_refused_and_both_are_named(
    flags: list[str], named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        loaded("--allocation-mode", "vllm:d2+fsdp:d4t2", *flags)
    for part in named:
        assert part in str(error.value)


def test_an_engine_that_uses_one_device_cannot_be_assigned_two() -> None:
    with pytest.raises(ConfigError, match="one device per replica"):
        loaded("--allocation-mode", "d2t2+d4", "--rollout.engine", "transformers")
