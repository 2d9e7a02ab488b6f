"""A request that continues at one replica after the other ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.rpc import SluiceError
from sluice.sampling.generation import MAX_REQUEST_ID, Generation, Part, bounded_id
from sluice.v1 import rollout_pb2, tokens_pb2
from sluice.versions import BASE, Version, append_spans

PROMPT = [11, 12, 13]
STOP, LENGTH, ABORT = tokens_pb2.FINISH_REASON_STOP, tokens_pb2.FINISH_REASON_LENGTH, tokens_pb2.FINISH_REASON_ABORT
EOS = 1
MODEL = rollout_pb2.GetModelResponse(max_model_len=1000, eos_token_ids=[EOS])


def token(sample: int, place: int, lengths: list[int]) -> int:
    """The one token that every replica samples at this place."""
    return EOS if place == lengths[sample] - 1 else 100 + 50 * sample + place % 50


def version(place: int) -> Version:
    return Version(1, place // 3)


def logprob(sample: int, place: int) -> float:
    return -float(sample + 1) - place / 64


def deltas(part: Part, index: int, lengths: list[int], sizes: list[int]):
    """Yield the deltas of one sample of a part, as a replica would send them."""
    begun, sample = part.request.continued_tokens, part.samples[index].sample.index
    most = begun + part.request.sampling.max_tokens
    end = min(lengths[sample], most)
    done, first = begun, True
    for size in [*sizes, 10_000]:
        places = range(done, min(done + size, end))
        done += len(places)
        spans, last = [], None
        for place in places:
            if version(place) != last:
                last = version(place)
                spans.append(tokens_pb2.VersionSpan(start=place - begun, policy_version=last.to_proto()))
        text = "".join(chr(token(sample, place, lengths)) for place in (range(done) if first else places))
        first = False
        yield rollout_pb2.SampleDelta(
            offset=places.start - begun,
            tokens=rollout_pb2.GeneratedSample(
                index=index,
                token_ids=[token(sample, place, lengths) for place in places],
                logprobs=[logprob(sample, place) for place in places],
                version_spans=spans,
                text=text,
                finish_reason=0 if done < end else STOP if lengths[sample] <= most else LENGTH,
            ),
        )
        if done >= end:
            return


def opening(part: Part) -> rollout_pb2.GenerateStreamResponse:
    prompt = part.request.token_ids.ids or PROMPT
    return rollout_pb2.GenerateStreamResponse(opening={"prompt_token_ids": prompt})


def messages(data, part: Part, lengths: list[int], *, calm: bool):
    """Yield the messages of a replica until it dies, gives samples up, or is done. Some tokens lack their version."""
    if not calm and not data.draw(st.booleans(), label="opens"):
        return
    yield opening(part)
    left = 1000 if calm else data.draw(st.integers(0, 12), label="deltas before it dies")
    for index in range(len(part.samples)):
        for each in deltas(part, index, lengths, data.draw(st.lists(st.integers(1, 4), max_size=5))):
            left -= 1
            if left < 0:
                return
            if not calm and data.draw(st.integers(0, 9)) == 0:
                del each.tokens.version_spans[:]
            if not calm and data.draw(st.integers(0, 9)) == 0:
                each.tokens.finish_reason, left = ABORT, 0
            yield rollout_pb2.GenerateStreamResponse(chunk={"deltas": [each]})


@given(st.data(), st.integers(1, 4), st.integers(1, 12), st.booleans())
def test_whatever_breaks_the_answer_is_whole(data, n: int, most: int, seeded: bool) -> None:
    lengths = data.draw(st.lists(st.integers(1, 15), min_size=n, max_size=n))
    sampling = tokens_pb2.SamplingParams(max_tokens=most, **({"seed": 7} if seeded else {}))
    request = rollout_pb2.GenerateRequest(request_id="r", text="x", n=n, sampling=sampling, return_text=True)
    generation = Generation(request)
    left, ids, lost, received = [generation.whole()], set(), 0, 0
    for attempt in range(100):
        if not left:
            break
        part = left.pop(0)
        assert part.request.request_id not in ids, "a replica would answer from memory"
        ids.add(part.request.request_id)
        assert part.request.sampling.max_tokens == most - part.request.continued_tokens
        for message in messages(data, part, lengths, calm=attempt > 20):
            received += sum(len(each.tokens.token_ids) for each in message.chunk.deltas)
            part.receive(message)
        left += generation.rest(part, MODEL, "a", interrupted=True)
        lost += part.unusable
    assert not left
    answered = generation.response
    assert list(answered.prompt_token_ids) == PROMPT
    for index, sample in enumerate(answered.samples):
        assert_true(sample, index, lengths[index], most)
    assert received - lost == sum(len(sample.token_ids) for sample in answered.samples), "each token is kept or counted"


class Reader:
    """A client that gets final tokens and cannot forget them."""

    def __init__(self, n: int) -> None:
        self.samples = [rollout_pb2.GeneratedSample(index=index) for index in range(n)]
        self.said = [tokens_pb2.ChatMessage() for _ in range(n)]

    def read(self, generation: Generation, part: Part) -> None:
        for delta in generation.final_deltas(part, MODEL):
            mine, more = self.samples[delta.tokens.index], delta.tokens
            assert not mine.finish_reason, "nothing follows the end"
            assert delta.offset == len(mine.token_ids), "nothing is given twice, nothing is left out"
            assert len(more.logprobs) == len(more.token_ids)
            assert [span.start for span in more.version_spans[:1]] == [delta.offset] * bool(more.token_ids)
            append_spans(mine.version_spans, more.version_spans, 0)
            mine.token_ids.extend(more.token_ids)
            mine.logprobs.extend(more.logprobs)
            mine.text += more.text
            self.said[more.index].reasoning += delta.reasoning
            self.said[more.index].content += delta.content
            mine.finish_reason = more.finish_reason
            if more.HasField("message"):
                mine.message.CopyFrom(more.message)

    def assert_prefix(self, answered: rollout_pb2.GenerateResponse) -> None:
        for mine, whole in zip(self.samples, answered.samples, strict=True):
            assert list(mine.token_ids) == list(whole.token_ids[: len(mine.token_ids)])


def letters(ids: list[int], *, last: bool) -> str:
    """The text of tokens that are bytes; an incomplete character at the end is held back, as replicas do, until the last one."""
    text = bytes(each for each in ids if each != EOS).decode(errors="replace")
    return text if last else text.removesuffix("\ufffd")


def message_of(text: str) -> tokens_pb2.ChatMessage:
    """Parse a text into a message: everything before its first a is reasoning."""
    reasoning, _, content = text.partition("a")
    return tokens_pb2.ChatMessage(reasoning=reasoning, content=content)


def unruly(data, draw: random.Random, part: Part, *, calm: bool):
    """Yield the messages of a replica that samples other bytes each time: it dies, gives up, forgets the end, or sends invalid messages."""
    prompt = list(part.request.rendered.ids or part.request.token_ids.ids) or PROMPT
    yield rollout_pb2.GenerateStreamResponse(opening={"prompt_token_ids": prompt, "continued": True})
    begun, most = part.request.continued_tokens, part.request.sampling.max_tokens
    for index in range(len(part.samples)):
        before, ids, told = prompt[len(prompt) - begun :], [], ""
        while True:
            fate = (
                "calm" if calm else data.draw(st.sampled_from(["calm"] * 4 + ["dies", "aborts", "spanless", "damaged"]))
            )
            piece = draw.choice(["a", "é", "€", "😀"]).encode() + bytes([EOS] * (draw.random() < 0.2))
            piece = [*piece][draw.randrange(2) :][: most - len(ids)]  # some characters lack their first byte
            offset = len(ids) + (fate == "damaged")
            ids += piece
            ended = EOS in piece or len(ids) == most
            text = letters([*before, *ids], last=ended or fate == "aborts")
            finish = (STOP if EOS in piece else LENGTH) if ended else 0
            version = tokens_pb2.VersionSpan(start=offset, policy_version=Version(1, draw.randrange(2)).to_proto())
            delta = rollout_pb2.SampleDelta(
                offset=offset,
                tokens=rollout_pb2.GeneratedSample(
                    index=index,
                    token_ids=piece,
                    logprobs=[-1.0] * len(piece),
                    version_spans=[version] if piece and fate != "spanless" else [],
                    text=text.removeprefix(told),
                    finish_reason=ABORT if fate == "aborts" and not ended else 0 if fate == "dies" else finish,
                ),
            )
            if part.request.return_message:
                said, said_before = message_of(text), message_of(told)
                delta.reasoning = said.reasoning.removeprefix(said_before.reasoning)
                delta.content = said.content.removeprefix(said_before.content)
                if delta.tokens.finish_reason:
                    delta.tokens.message.CopyFrom(said)
            told = text
            yield rollout_pb2.GenerateStreamResponse(chunk={"deltas": [delta]})
            if fate in ("dies", "aborts", "spanless"):
                return
            if ended:
                break


@pytest.mark.slow
@given(st.data(), st.integers(1, 3), st.integers(1, 12), st.booleans())
def test_what_was_given_away_is_never_taken_back(data, n: int, most: int, return_message: bool) -> None:
    request = rollout_pb2.GenerateRequest(
        request_id="r",
        conversation={"messages": [{"role": "user", "content": "x"}]},
        continues={"token_ids": PROMPT[:1], "messages": 1},
        n=n,
        sampling={"max_tokens": most},
        return_message=return_message,
    )
    draw = random.Random(data.draw(st.integers(0, 1 << 30)))
    generation, reader = Generation(request), Reader(n)
    left = [generation.whole()]
    for attempt in range(100):
        if not left:
            break
        part = left.pop(0)
        with contextlib.suppress(SluiceError):
            for message in unruly(data, draw, part, calm=attempt > 10):
                part.receive(message)
                reader.read(generation, part)
                reader.assert_prefix(generation.response)
        left += generation.rest(part, MODEL, "a", interrupted=True)
        reader.read(generation, part)
        reader.assert_prefix(generation.response)
    assert not left
    assert generation.response.continued
    for mine, said, whole in zip(reader.samples, reader.said, generation.response.samples, strict=True):
        whole.ClearField("stop_string")
        assert mine == whole, "all of it was given away"
        assert said == whole.message, "and all that it says"
        assert (whole.finish_reason == STOP) == (whole.token_ids[-1] == EOS)
        assert whole.text == letters(list(whole.token_ids), last=True)
        assert whole.message == (message_of(whole.text) if return_message else tokens_pb2.ChatMessage())


def test_what_a_sample_says_is_given_with_its_tokens() -> None:
    generation = Generation(rollout_pb2.GenerateRequest(request_id="r", text="x", return_message=True))
    part, given = generation.whole(), []
    for offset, delta in enumerate([{"reasoning": "so"}, {"content": "ye"}, {}, {"content": "s"}]):
        span = tokens_pb2.VersionSpan(start=offset, policy_version=Version(1, 0).to_proto())
        tokens = rollout_pb2.GeneratedSample(token_ids=[11], logprobs=[-1.0], version_spans=[span])
        chunk = rollout_pb2.StreamChunk(deltas=[rollout_pb2.SampleDelta(offset=offset, tokens=tokens, **delta)])
        part.receive(rollout_pb2.GenerateStreamResponse(chunk=chunk))
        given += [(each.reasoning, each.content) for each in generation.final_deltas(part, MODEL)]
    assert given == [("so", ""), ("", "ye"), ("", ""), ("", "s")]


def test_a_continuation_that_is_to_tell_the_message_keeps_the_conversation_and_its_exact_ids() -> None:
    conversation = {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "search"}]}
    request = rollout_pb2.GenerateRequest(
        request_id="r", conversation=conversation, continues={"token_ids": [11], "messages": 1}, return_message=True
    )
    generation = Generation(request)
    part = generation.whole()
    part.receive(opening(part))
    part.receive(some(0, 0, [7, 8]))
    (more,) = generation.rest(part, MODEL, "a", interrupted=True)
    assert more.request.conversation == request.conversation
    assert list(more.request.rendered.ids) == [*PROMPT, 7, 8]
    assert (more.request.continued_tokens, more.request.HasField("continues")) == (2, False)


def test_a_continuation_without_a_message_is_token_ids_alone() -> None:
    conversation = {"messages": [{"role": "user", "content": "x"}]}
    request = rollout_pb2.GenerateRequest(conversation=conversation, continues={"token_ids": [11], "messages": 1})
    generation = Generation(request)
    part = generation.whole()
    part.receive(opening(part))
    part.receive(some(0, 0, [7, 8]))
    (more,) = generation.rest(part, MODEL, "a", interrupted=True)
    assert list(more.request.token_ids.ids) == [*PROMPT, 7, 8]
    assert not more.request.HasField("continues"), "it goes with a conversation alone"


def test_the_message_of_an_end_token_without_its_reason_is_asked_for_again() -> None:
    request = rollout_pb2.GenerateRequest(request_id="r", text="x", return_message=True)
    generation = Generation(request)
    part = generation.whole()
    part.receive(opening(part))
    part.receive(some(0, 0, [7, EOS]))
    assert not list(generation.final_deltas(part, MODEL)), "the end token may have to be sampled again"
    (more,) = generation.rest(part, MODEL, "a", interrupted=False)
    assert list(more.request.token_ids.ids) == [*PROMPT, 7]
    assert [list(each.tokens.token_ids) for each in generation.final_deltas(part, MODEL)] == [[7]]


def test_what_was_given_away_of_a_damaged_stream_stays() -> None:
    generation, part = begun(2)
    part.receive(some(0, 0, [7, 8]))
    part.receive(some(1, 0, [7], STOP))
    assert [each.tokens.index for each in generation.final_deltas(part, MODEL)] == [0, 1]
    part.receive(some(0, 2, [9]))
    with pytest.raises(SluiceError):
        part.receive(WRONG["gap"])
    (more,) = generation.rest(part, MODEL, "a", interrupted=True)
    assert list(more.request.token_ids.ids) == [*PROMPT, 7, 8]
    assert part.unusable == 1
    assert generation.response.samples[1].finish_reason == STOP


def test_replicas_of_other_tokenizers_are_not_continued_with() -> None:
    generation = Generation(rollout_pb2.GenerateRequest(text="x"))
    part = generation.whole()
    part.receive(rollout_pb2.GenerateStreamResponse(opening={"prompt_token_ids": PROMPT, "tokenizer_digest": "a"}))
    part.receive(some(0, 0, [7]))
    (more,) = generation.rest(part, MODEL, "a", interrupted=False)
    other = rollout_pb2.GenerateStreamResponse(opening={"prompt_token_ids": [*PROMPT, 7], "tokenizer_digest": "b"})
    with pytest.raises(SluiceError, match="give all replicas the same --model"):
        more.receive(other)


def assert_true(sample: rollout_pb2.GeneratedSample, index: int, length: int, most: int) -> None:
    """Check that the sample equals the answer of an undisturbed replica."""
    places = range(min(length, most))
    lengths = [length] * (index + 1)
    assert sample.index == index
    assert list(sample.token_ids) == [token(index, place, lengths) for place in places]
    assert list(sample.logprobs) == [logprob(index, place) for place in places]
    starts = [span.start for span in sample.version_spans]
    assert starts == [0, *(place for place in places[1:] if version(place) != version(place - 1))]
    assert all(Version.from_proto(span.policy_version) == version(span.start) for span in sample.version_spans)
    assert sample.finish_reason == (STOP if length <= most else LENGTH)
    assert sample.text == "".join(chr(each) for each in sample.token_ids)


def begun(n: int = 2, **sampling) -> tuple[Generation, Part]:
    request = rollout_pb2.GenerateRequest(request_id="r", text="x", n=n, sampling=tokens_pb2.SamplingParams(**sampling))
    generation = Generation(request)
    part = generation.whole()
    part.receive(opening(part))
    return generation, part


def some(index: int, offset: int, ids: list[int], finish: int = 0, **fields) -> rollout_pb2.GenerateStreamResponse:
    span = [tokens_pb2.VersionSpan(start=offset, policy_version=Version(1, 0).to_proto())] if ids else []
    fields = {"version_spans": span, "logprobs": [-1.0] * len(ids), **fields}
    tokens = rollout_pb2.GeneratedSample(index=index, token_ids=ids, finish_reason=finish, **fields)
    return rollout_pb2.GenerateStreamResponse(chunk={"deltas": [{"tokens": tokens, "offset": offset}]})


WRONG = {
    "gap": some(0, 4, [9]),
    "duplicate": some(0, 0, [7, 8, 9]),
    "log-probabilities missing": some(0, 3, [9], logprobs=[]),
    "another sample": some(2, 0, [9]),
    "span before the tokens": some(0, 3, [9], version_spans=[tokens_pb2.VersionSpan(start=0)]),
    "span after the tokens": some(
        0, 3, [9], version_spans=[tokens_pb2.VersionSpan(start=3), tokens_pb2.VersionSpan(start=4)]
    ),
    "after the end": some(1, 1, [9]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_nothing_of_a_stream_is_kept_that_sends_what_does_not_follow(wrong: str) -> None:
    generation, part = begun()
    part.receive(some(0, 0, [7, 8, 9]))
    part.receive(some(1, 0, [7], STOP))
    with pytest.raises(SluiceError) as refused:
        part.receive(WRONG[wrong])
    assert refused.value.code.name == "DATA_LOSS"
    (again,) = generation.rest(part, MODEL, "a", interrupted=True)
    assert (again.request.n, again.request.continued_tokens, again.tries, part.unusable) == (2, 0, 1, 4)
    assert all(not each.token_ids and not each.finish_reason for each in generation.response.samples)


def test_a_replica_that_reads_the_prompt_otherwise_is_not_continued_with() -> None:
    generation, part = begun()
    part.receive(some(0, 0, [7]))
    left = generation.rest(part, MODEL, "a", interrupted=False)
    for each in left:
        with pytest.raises(SluiceError, match="other tokens"):
            each.receive(rollout_pb2.GenerateStreamResponse(opening={"prompt_token_ids": [11, 99, 13]}))


def test_samples_with_tokens_continue_each_alone_and_the_others_together() -> None:
    generation, part = begun(4, max_tokens=10, min_tokens=3)
    part.receive(some(1, 0, [7, 8]))
    part.receive(some(2, 0, [7], STOP))
    left = generation.rest(part, MODEL, "a", interrupted=False)
    assert [(each.request.request_id.split(".")[0], each.request.n) for each in left] == [("r/1+2", 1), ("r/0x2", 2)]
    continued, again = (each.request for each in left)
    assert list(continued.token_ids.ids) == [*PROMPT, 7, 8]
    assert (continued.continued_tokens, continued.sampling.max_tokens, continued.sampling.min_tokens) == (2, 8, 1)
    assert (again.text, again.continued_tokens, again.sampling.max_tokens) == ("x", 0, 10)
    assert [each.avoid for each in left] == ["a", "a"]


def test_seeds_stay_those_of_each_sample() -> None:
    generation, part = begun(6, seed=40)
    part.receive(some(2, 0, [7]))
    part.receive(some(4, 0, [7], STOP))
    left = generation.rest(part, MODEL, "a", interrupted=False)
    assert [(each.request.n, each.request.sampling.seed) for each in left[1:]] == [(2, 40), (1, 43), (1, 45)]
    assert left[0].request.sampling.seed not in range(40, 46), "it would draw the numbers of its first tokens again"


def test_an_end_token_that_came_without_its_reason_ends_the_sample() -> None:
    generation, part = begun(2, stop_token_ids=[5])
    part.receive(some(0, 0, [7, EOS]))
    part.receive(some(1, 0, [7, 5]))
    assert not generation.rest(part, MODEL, "a", interrupted=False)
    assert [each.finish_reason for each in generation.response.samples] == [STOP, STOP]


@pytest.mark.parametrize("limits", [{"max_tokens": 3}, {"context": len(PROMPT) + 3}])
def test_the_last_token_of_a_full_sample_without_its_end_is_sampled_again(limits) -> None:
    """Only its replica can say why it ended, and decode all its tokens."""
    model = rollout_pb2.GetModelResponse(max_model_len=limits.pop("context", 1000))
    generation, part = begun(1, **limits)
    part.receive(some(0, 0, [7, 8, 9]))
    (last,) = generation.rest(part, model, "a", interrupted=False)
    assert list(last.request.token_ids.ids) == [*PROMPT, 7, 8]
    assert part.unusable == 1


def test_no_id_is_too_long_for_a_replica_or_that_of_another_request() -> None:
    """A custom workflow may name its requests as it likes."""
    ids = set()
    for last in "ab":
        request = rollout_pb2.GenerateRequest(request_id="w" * 127 + last, text="x", n=3)
        generation = Generation(request)
        part = generation.whole()
        part.receive(opening(part))
        part.receive(some(0, 0, [7, 8]))
        left = generation.rest(part, MODEL, "a", interrupted=True)
        ids |= {each.request.request_id for each in left}
        for each in left:
            left_again = generation.rest(each, MODEL, "a", interrupted=True)
            ids |= {again.request.request_id for again in left_again}
    assert len(ids) == 8
    assert max(map(len, ids)) <= MAX_REQUEST_ID
    assert len(bounded_id("w" * 500)) == MAX_REQUEST_ID
    assert bounded_id("w" * 500) != bounded_id("w" * 501)
    assert bounded_id("w" * 128) == "w" * 128


def test_stalls_count_until_a_token_comes() -> None:
    generation, part = begun(2)
    part.receive(some(0, 0, [7]))
    left = generation.rest(part, MODEL, "a", interrupted=True, stalled=True)
    assert [(each.tries, each.stalls) for each in left] == [(0, 1), (1, 1)]
    (again,) = generation.rest(left[1], MODEL, "b", interrupted=True, stalled=True)
    assert (again.tries, again.stalls) == (2, 2)
    again.receive(some(0, 0, [7]))
    (calm,) = generation.rest(again, MODEL, "a", interrupted=True)
    assert (calm.tries, calm.stalls) == (0, 0)


def test_the_newest_version_of_a_stream_is_that_of_its_own_tokens() -> None:
    """The version of the previous replica must not be attributed to the next one."""
    generation, part = begun(1)
    new = [tokens_pb2.VersionSpan(start=0, policy_version=Version(1, 9).to_proto())]
    part.receive(some(0, 0, [7, 8], version_spans=new))
    assert part.newest_version == Version(1, 9)
    (more,) = generation.rest(part, MODEL, "a", interrupted=True)
    more.receive(opening(more))
    assert more.newest_version == BASE
    more.receive(some(0, 0, [9]))
    assert more.newest_version == Version(1, 0)


def test_alternatives_are_cut_with_their_tokens() -> None:
    generation, part = begun(1, max_tokens=2)
    part.receive(some(0, 0, [7, 8], top_logprobs=[{"ids": [1]}, {"ids": [2]}]))
    generation.rest(part, MODEL, "a", interrupted=False)
    assert [list(each.ids) for each in generation.response.samples[0].top_logprobs] == [[1]]


def test_a_float_travels_unchanged() -> None:
    generation, part = begun(1)
    part.receive(some(0, 0, [7], STOP, logprobs=[math.inf]))
    assert math.isinf(generation.response.samples[0].logprobs[0])
