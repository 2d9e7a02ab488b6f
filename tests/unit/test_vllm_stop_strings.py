"""Stop strings that begin in the tokens which a request continues, where vLLM's stream of text begins in the middle of a character."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout_svc.engines.base import GenerationRequest, Sampling
from rollout_svc.engines.vllm.requests import prime

pytestmark = pytest.mark.slow
QUESTION = "Question: what is this? "


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that a character may be cut anywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("kept", range(1, len("né 🙂".encode()) + 1))
@pytest.mark.parametrize(("stop", "found"), [("Question:", None), ("🙂 E", "🙂 E"), ("é 🙂", "é 🙂")])
def test_text_before_the_joint_ends_no_sample_and_text_across_it_does(tokenizer, kept, stop, found) -> None:
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    prompt, answer = tokenizer.encode(QUESTION), tokenizer.encode("né 🙂 End")
    continued, new = answer[:kept], answer[kept:]
    request = GenerationRequest(
        request_id="r", prompt_ids=prompt + continued, continued=continued, sampling=Sampling(stop=(stop,))
    )
    params = SamplingParams(stop=[stop], include_stop_str_in_output=True)
    detokenizer = FastIncrementalDetokenizer(
        tokenizer, SimpleNamespace(sampling_params=params, prompt_token_ids=request.prompt_ids, request_id="r")
    )
    prime(detokenizer, tokenizer, request)
    stopped = next(filter(None, (detokenizer.update([each], stop_terminated=False) for each in new)), None)
    whole = found is not None and len(tokenizer.encode("né 🙂 End"[: "né 🙂 End".index(found) + len(found)])) <= kept
    assert stopped == (None if whole else found)
