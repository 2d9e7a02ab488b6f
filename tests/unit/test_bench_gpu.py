"""`sluice bench gpu`: its file, what becomes of parts that fail, hang or cannot run; and each part at a tiny size on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import run
from benchmarks.gpu import command
from benchmarks.gpu.case import TINY, Case
from benchmarks.gpu.command import Worker, measure
from benchmarks.gpu.parts import PARTS, NotRunError, Part
from benchmarks.gpu.record import FAILED, INCOMPLETE, MEASURED, NOT_RUN, Record, table
from benchmarks.gpu.suite import outcomes
from benchmarks.gpu.worker import run_part
from sluice.config import ConfigError

ROOT = Path(__file__).parents[2]
BY_NAME = {part.name: part for part in PARTS}
SPEED = {"fits", "tokens_per_s", "mfu", "peak_bytes", "estimate_bytes", "seconds_per_phase", "loss", "attention"}
ENGINE = {
    "start": {"start_s", "engine", "precision"},
    "log-probabilities": {"tokens", "mean_nats", "largest_nats", "bias_nats", "kl_nats", "clipped_fraction"},
    "update in flight": {"spans", "versions_in_one_request", "pause_s", "median_pause_s", "plain_copy_s", "wrong"},
}
EXPECTED = {
    "start": {
        "first update": {"load_s", "parameters", "loaded_bytes", "loss", "grad_norm", "finite"},
        "bfloat16 against float32": {"mean_nats", "largest_nats", "bias_nats"},
        "matrix product": {"tflops"},
        "copies": {"device_gb_s", "to_device_pageable_gb_s", "to_device_pinned_gb_s", "to_host_pinned_gb_s"},
    },
    "speed": {
        f"{tokens} tokens, activations {kind}": SPEED for tokens in TINY.lengths for kind in ("recomputed", "kept")
    },
    "memory": {
        name: {"peak_bytes", "loaded_bytes", "above_held_bytes", "estimate_bytes", "estimate", "estimate_over_peak"}
        for name in ("defaults", "muon", "a reference", "a critic of its own", "a row of twice the budget")
    },
    "transformers": ENGINE,
    "out-of-memory": {
        "the budget does not fit, half of it does": {"outcome", "micro_batches", "expected_loss", "trains_after"}
    },
    "output-layer": {"plain": {"forward_ms", "both_ms", "peak_bytes", "tflops"}},
    "attention": {
        "4/2 heads of 32, blocks, difference": {"output", "query_gradient", "key_gradient", "value_gradient"},
        "4/2 heads of 32, blocks, 2 x 24 tokens": {"forward_ms", "both_ms", "peak_bytes", "tflops"},
    },
    "publish": {
        **{
            name: {"seconds", "dense_bytes", "changed_fraction", "encoded_bytes"}
            for name in ("first version", "nothing changed", "after a step")
        },
        "copy to the host alone": {"converted_by_copy_gb_s", "converted_on_device_gb_s", "into_pinned_gb_s"},
    },
    "load": {name: {"bytes", "seconds", "gb_s", "wrong"} for name in ("from the staged file", "from the second copy")},
}
NEEDS_CUDA = {
    "attention": {"4/2 heads of 32, varlen, difference", "4/2 heads of 32, varlen, 2 x 24 tokens"},
    "load": {"from pinned memory to a second copy"},
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(TINY, torch.device("cpu"), tmp_path_factory.mktemp("gpu"))


def answers_of(part: Part, case: Case) -> tuple[str, dict[str, dict]]:
    answers: list[dict] = []
    reason = run_part(part, case, lambda answer: answers.append(json.loads(json.dumps(answer))))
    return reason, {answer.pop("measurement"): answer for answer in answers}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_a_part_finds_its_figures_and_names_what_a_cpu_cannot_do(case, name):
    reason, found = answers_of(BY_NAME[name], case)
    assert not reason
    failed = {measurement: each["reason"] for measurement, each in found.items() if each["outcome"] == FAILED}
    assert not failed
    assert {name for name, each in found.items() if each["outcome"] == NOT_RUN} == NEEDS_CUDA.get(name, set())
    for measurement, figures in EXPECTED[name].items():
        assert figures <= found[measurement]["figures"].keys(), measurement
    if name == "transformers":
        flight = found["update in flight"]["figures"]
        assert flight["wrong"] == []
        assert len(flight["pause_s"]) == TINY.updates
        assert flight["serves"] == f"1.{TINY.updates}"
        assert 0 < found["log-probabilities"]["figures"]["largest_nats"] < 0.1
    if name == "out-of-memory":
        [each] = found.values()
        assert each["figures"]["outcome"] == "trained"
        assert each["figures"]["loss"] == pytest.approx(each["figures"]["expected_loss"])
        assert each["figures"]["trains_after"]
    if name == "publish":
        assert found["nothing changed"]["figures"]["changed_fraction"] == 0
        assert 0 < found["after a step"]["figures"]["changed_fraction"] <= 1
    if name == "load":
        assert all(each["figures"]["wrong"] == [] for each in found.values() if "wrong" in each.get("figures", {}))


def test_every_part_is_a_function_that_is_there_without_vllm():
    """A part that needs vLLM can be asked for its measurements where it is not installed: only they need it."""
    case = Case(TINY, torch.device("cpu"), Path("/nowhere"))
    for part in PARTS:
        assert iter(Part(part.name, part.function, part.says).of(case)), part.name
    assert len(BY_NAME) == len(PARTS)


@pytest.mark.slow
def test_the_parts_import_nothing_that_a_machine_with_pytorch_may_lack():
    lacking = ("vllm", "datasets", "gguf", "math_verify", "fastapi", "uvicorn", "httptools", "obstore", "tensorboard")
    modules = sorted({part.function.partition(":")[0] for part in PARTS} | {"benchmarks.gpu.worker"})
    program = f"import sys; sys.modules.update(dict.fromkeys({lacking}))\nimport {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


# The handling of parts that fail; `broken` and the others below are made up for these tests.


def broken(_: Case):
    yield "raises", lambda: {"x": 1 / 0}
    yield "lacks", lambda: __import__("no_such_module")
    yield "cannot", cannot
    yield "measures", lambda: {"x": float("nan")}


def cannot():
    raise NotRunError("there is no device")


def unprepared(_: Case):
    yield "measures", lambda: {"x": 1}
    raise RuntimeError("no room")


def part(function: str, *needs: str) -> Part:
    return Part("start", f"{__name__}:{function}", "", needs)


def test_a_measurement_that_fails_stops_neither_the_next_one_nor_the_part(case):
    reason, found = answers_of(part("broken"), case)
    assert not reason
    assert {name: each["outcome"] for name, each in found.items()} == {
        "raises": FAILED,
        "lacks": FAILED,
        "cannot": NOT_RUN,
        "measures": MEASURED,
    }
    assert found["raises"]["reason"] == "ZeroDivisionError: division by zero"
    assert found["cannot"]["reason"] == "there is no device"
    reason, found = answers_of(part("unprepared"), case)
    assert found["measures"]["outcome"] == MEASURED
    assert found["preparation"]["reason"] == "RuntimeError: no room"


def test_a_part_without_a_package_that_it_needs_names_it(case):
    assert answers_of(part("broken", "no_such_module"), case) == ("no_such_module is not installed", {})


def test_the_file_is_whole_after_every_measurement_and_says_what_is_due(tmp_path):
    path = tmp_path / "new" / "gpu.json"
    first, second, third = PARTS[:3]
    record = Record.open(path, shape="tiny", device="cpu")
    assert record.due([]) == list(PARTS)
    record.begin(first)
    record.add(first, "one", {"outcome": MEASURED, "seconds": 1.0, "figures": {"x": float("inf"), "y": [1.0]}})
    half = Record.open(path, shape="tiny", device="cpu")
    assert half.outcome(first) == INCOMPLETE
    assert half.content["parts"][first.name]["measurements"]["one"]["figures"] == {"x": None, "y": [1.0]}
    assert half.due([]) == list(PARTS)
    record.add(first, "other", {"outcome": NOT_RUN, "seconds": 0.0, "reason": "no device"})
    record.end(first, seconds=2.0, machine={"torch": "1"})
    record.begin(second)
    record.end(second, seconds=0.1, machine={}, reason="vllm is not installed")
    record.begin(third)
    record.add(third, "one", {"outcome": FAILED, "seconds": 1.0, "reason": "Error: x"})
    record.end(third, seconds=1.0, machine={})
    again = Record.open(path, shape="tiny", device="cpu")
    assert [again.outcome(each) for each in PARTS[:4]] == [MEASURED, NOT_RUN, FAILED, None]
    assert again.due([]) == [second, *PARTS[3:]]  # one that could not run may be able to now
    assert again.due([third]) == [third]
    lines = table(again.content)
    assert any(first.name in line and MEASURED in line for line in lines)
    assert any("vllm is not installed" in line for line in lines)
    assert any("not yet" in line for line in lines)


def test_figures_of_two_devices_do_not_mix(tmp_path):
    path = tmp_path / "gpu.json"
    record = Record.open(path, shape="tiny", device="cpu")
    record.begin(PARTS[0])
    with pytest.raises(ConfigError, match="name another file with --into"):
        Record.open(path, shape="tiny", device="cuda")
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is no file of `sluice bench gpu`"):
        Record.open(path, shape="tiny", device="cpu")


def test_a_part_that_does_not_exist_is_named_with_those_that_do(tmp_path):
    with pytest.raises(ConfigError, match="there is no part '99': choose from 1 start"):
        run(["gpu", "--part", "99", "--into", str(tmp_path / "x.json")])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_nothing_passes(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    assert run(["gpu", "--part", "speed", "--part", "9", "--into", str(path)]) == 1
    parts = json.loads(path.read_text())["parts"]
    assert {name: (each["outcome"], each["reason"]) for name, each in parts.items()} == dict.fromkeys(
        ("speed", "publish"), (NOT_RUN, "PyTorch finds no CUDA device")
    )
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["failures"] == ["speed", "publish"]


@pytest.mark.slow
def test_parts_are_measured_into_one_file_by_one_process(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    words = ["gpu", "--device", "cpu", "--shape", "tiny", "--into", str(path)]
    assert run([*words, "--part", "output-layer", "--part", "tests"]) == 0
    assert run([*words, "--part", "8"]) == 0
    content = json.loads(path.read_text())
    assert {name: each["outcome"] for name, each in content["parts"].items()} == {
        "output-layer": MEASURED,
        "tests": NOT_RUN,
        "attention": MEASURED,
    }
    assert content["parts"]["attention"]["machine"]["torch"] == torch.__version__
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1])["parts"]["attention"] == MEASURED
    assert any(line.lstrip().startswith("plain") for line in printed)


@pytest.mark.slow
def test_a_whole_run_is_measured_by_its_report(case):
    name, measure_run = next(BY_NAME["run"].of(case))
    assert name == "transformers"
    figures = measure_run()
    assert (figures["state"], figures["steps"]) == ("succeeded", TINY.steps)
    assert figures["whole_s"] > 0


@pytest.mark.slow
def test_vllm_is_measured_as_the_transformers_engine_is(tmp_path):
    path = tmp_path / "gpu.json"
    assert run(["gpu", "--device", "cpu", "--shape", "tiny", "--into", str(path), "--part", "vllm"]) == 0
    part = json.loads(path.read_text())["parts"]["vllm"]
    assert part["machine"]["vllm"]
    assert {name: each["outcome"] for name, each in part["measurements"].items()} == dict.fromkeys(ENGINE, MEASURED)
    for name, figures in ENGINE.items():
        assert figures <= part["measurements"][name]["figures"].keys()
    assert part["measurements"]["start"]["figures"]["engine"] == "vllm"
    assert part["measurements"]["update in flight"]["figures"]["wrong"] == []


@pytest.mark.slow
def test_a_part_beyond_its_limit_is_ended_with_its_process_and_the_next_one_gets_another(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "START_S", 0.0)  # importing PyTorch is too long by itself
    record = Record.open(tmp_path / "gpu.json", shape="tiny", device="cpu")
    worker = Worker("cpu", "tiny", tmp_path)
    try:
        measure(BY_NAME["memory"], record, worker, 0.5)
        assert record.content["parts"]["memory"]["outcome"] == FAILED
        assert record.content["parts"]["memory"]["reason"] == "took longer than 0.5 s"
        measure(BY_NAME["tests"], record, worker, 120.0)
        assert record.content["parts"]["tests"]["outcome"] == NOT_RUN
    finally:
        worker.close()


@pytest.mark.slow
def test_a_process_that_ends_by_itself_fails_its_part(tmp_path):
    record = Record.open(tmp_path / "gpu.json", shape="tiny", device="cpu")
    worker = Worker("cpu", "no such shape", tmp_path)
    try:
        measure(BY_NAME["tests"], record, worker, 60.0)
    finally:
        worker.close()
    assert record.content["parts"]["tests"]["outcome"] == FAILED
    assert record.content["parts"]["tests"]["reason"] == "its process ended with code 2; see what it printed"


def test_the_report_of_pytest_is_read_and_a_failure_is_none_to_pass(tmp_path):
    report = tmp_path / "tests.xml"
    passed, skipped = '<testcase name="a"/>', '<testcase name="b"><skipped message="no device"/></testcase>'
    report.write_text(f"<testsuites><testsuite>{passed}{skipped}</testsuite></testsuites>")
    assert outcomes(report) == {"passed": 1, "skipped": ["b"]}
    report.write_text(f"<testsuites><testsuite>{skipped}</testsuite></testsuites>")
    with pytest.raises(AssertionError, match="1 tests, 1 skipped"):
        outcomes(report)
    wrong = '<testcase name="c"><failure message="assert 1 == 2&#10;more"/></testcase>'
    report.write_text(f"<testsuites><testsuite>{passed}{wrong}</testsuite></testsuites>")
    with pytest.raises(AssertionError, match="assert 1 == 2"):
        outcomes(report)
