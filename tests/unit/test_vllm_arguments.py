"""What vLLM is started with."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch

from rollout_svc.engines.base import EngineError
from rollout_svc.engines.vllm.processes import (
    Parts,
    compared_with_tests,
    engine_arguments,
    prepare_environment,
    require_tested_version,
    threads_as_in_environment,
    workers_of,
)


@dataclass
class Known:
    """Stands for the names that vLLM knows."""

    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    dtype: str = "auto"
    tokenizer: str = ""
    logprobs_mode: str = ""
    quantization: str = ""
    hf_overrides: object = None


def arguments(model: str, *, on_cpu: bool = True, **given: object) -> dict[str, object]:
    return engine_arguments(model, given, on_cpu=on_cpu, arguments_class=Known)


def test_the_user_s_arguments_win_over_defaults(tmp_path):
    assert arguments(str(tmp_path))["enforce_eager"] is True
    assert arguments(str(tmp_path), enforce_eager=False)["enforce_eager"] is False
    assert "enforce_eager" not in arguments(str(tmp_path), on_cpu=False)


def test_an_unknown_argument_is_told_the_nearest_name(tmp_path):
    with pytest.raises(EngineError, match="did you mean 'tensor_parallel_size'"):
        arguments(str(tmp_path), tensor_paralel_size=2)


def test_arguments_that_the_contract_rests_on_are_ours(tmp_path):
    with pytest.raises(EngineError, match="logprobs_mode"):
        arguments(str(tmp_path), logprobs_mode="raw_logprobs")


def test_a_float32_model_stays_float32(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32"}))
    assert arguments(str(tmp_path))["dtype"] == "float32"


def test_logits_are_float32_unless_the_user_or_quantized_weights_say_otherwise(tmp_path):
    def overrides(**given: object) -> object:
        return arguments(str(tmp_path), **given).get("hf_overrides")

    def of_the_user(config: object) -> object:
        return config

    assert overrides() == {"head_dtype": "float32"}
    assert overrides(hf_overrides={"rope_theta": 1e6}) == {"head_dtype": "float32", "rope_theta": 1e6}
    assert overrides(hf_overrides={"head_dtype": "model"}) == {"head_dtype": "model"}
    assert overrides(hf_overrides=of_the_user) is of_the_user
    assert overrides(quantization="fp8") is None
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    assert overrides() is None


def test_an_untested_release_is_refused():
    require_tested_version("0.32.0+cpu")
    with pytest.raises(EngineError, match="was not tested"):
        require_tested_version("0.33.0")


def test_an_engine_on_a_gpu_says_which_of_its_parts_no_test_covers():
    def line(*parts: bool) -> str:
        return compared_with_tests("0.32.0", Parts(*parts))

    assert line(True, True) == (
        "vLLM 0.32.0 has Model Runner V2 with asynchronous scheduling; Sluice's tests cover Model Runner V1 with synchronous"
        " scheduling, on a CPU: to compare, set VLLM_USE_V2_MODEL_RUNNER=0 and rollout.engine_args.async_scheduling = false"
    )
    assert "has Model Runner V2 with synchronous scheduling;" in line(True, False)
    assert line(True, False).endswith("to compare, set VLLM_USE_V2_MODEL_RUNNER=0")
    assert line(False, True).endswith("to compare, set rollout.engine_args.async_scheduling = false")
    assert line(False, False) == (
        "vLLM 0.32.0 has Model Runner V1 with synchronous scheduling, as in Sluice's tests, which run on a CPU: its kernels"
        " here are not covered by them"
    )


def test_several_workers_need_their_own_processes():
    environment = {"OMP_NUM_THREADS": "3"}
    prepare_environment(environment, workers=workers_of({"tensor_parallel_size": 2}))
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert environment["OMP_NUM_THREADS"] == "3"
    prepare_environment(environment, workers=workers_of({}))
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize(("given", "threads"), [("1", 1), ("3,1", 3), ("", 2), ("0", 2), ("many", 2)])
def test_the_engine_is_forked_with_the_threads_that_the_environment_says(monkeypatch, given, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    had = torch.get_num_threads()
    torch.set_num_threads(2)  # loaded before the variable was set
    try:
        with threads_as_in_environment():
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(had)
