"""The samples of one request as they grow, at one replica after the other. Pure: messages in, requests out.

A `Part` is the request to one replica: at first for all samples. When its stream has ended or broken, `Generation.rest` returns the
requests that are left to make: each sample that has tokens continues from them by a separate request, and the samples without tokens are
sampled again together. Only tokens with a version span count; the others are sampled again.

`Generation.final_deltas` yields tokens and text while the samples grow. It holds back those that may still be dropped. Tokens and text
that it has yielded are never dropped.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import xxhash

from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2, tokens_pb2
from sluice.versions import BASE, Version, append_spans

_INTERRUPTED = {
    tokens_pb2.FINISH_REASON_ABORT,
    tokens_pb2.FINISH_REASON_ERROR,
    tokens_pb2.FINISH_REASON_VERSION_RETIRED,
}
"""Finish reasons that do not come from the policy: the sample is continued."""

MAX_REQUEST_ID = 128
"""Maximum number of characters of a request id, as the contract says."""


class _Words:
    """A text of one sample: the part from the present stream, and how much of the text was sent to the reader.

    A stream that continues a sample begins with the text of the earlier tokens.
    """

    __slots__ = ("_characters", "_given", "_new", "_skip")

    def __init__(self) -> None:
        self._new: list[str] = []
        self._given: list[str] = []
        self._characters = 0
        self._skip = 0
        """Characters that the present stream is going to repeat, because an earlier stream brought them and they were sent."""

    def begin(self) -> None:
        """Begin with a new stream."""
        self._new.clear()
        self._skip = self._characters

    def receive(self, text: str) -> None:
        """Append more text of the stream, if there is any."""
        if text:
            self._new.append(text[self._skip :])
            self._skip -= min(self._skip, len(text))

    def whole(self, text: str) -> str:
        """Return the whole text of the sample. Text that was already sent stays, even if the tokenizer decodes it differently in the end."""
        given = "".join(self._given)
        return text if text.startswith(given) else given + text[len(given) :]

    def give(self, whole: str | None) -> str:
        """Return the text that was not sent yet: of `whole` if it is given, else of the text that has arrived so far."""
        text = "".join(self._new) if whole is None else whole[self._characters :]
        self._given.append(text)
        self._characters += len(text)
        self._new.clear()
        return text

    @property
    def has_news(self) -> bool:
        """Whether there is text to send before the end."""
        return any(self._new)


class Growing:
    """One sample, and the text that the present stream has brought.

    Attributes:
        sample: Its tokens so far, each with its log-probability and its version.
        ended: Whether it has ended by itself.
    """

    def __init__(self, sample: rollout_pb2.GeneratedSample) -> None:
        self.sample = sample
        self.ended = False
        self._begun = 0
        self._received = 0
        self._usable = True
        self._stopped = False
        self._text: list[str] = []
        self._given = 0
        self._given_end = False
        self._words, self._reasoning, self._content = _Words(), _Words(), _Words()

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""
        return len(self.sample.token_ids)

    @property
    def gained(self) -> int:
        """Number of usable tokens that the present stream has brought."""
        return self.tokens - self._begun

    def versions_gained(self) -> Iterator[Version]:
        """Yield the versions of the tokens that the present stream has brought, newest token first."""
        end = self.tokens
        for span in reversed(self.sample.version_spans):
            if end <= self._begun:
                return
            yield Version.from_proto(span.policy_version)
            end = span.start

    @property
    def waiting(self) -> bool:
        """Whether the present stream may still bring tokens."""
        return not self._stopped

    def begin(self) -> None:
        """Begin with a new stream."""
        self._begun, self._received = self.tokens, 0
        self._usable, self._stopped = True, False
        self._text.clear()  # the text of a continuation begins with the text of the earlier tokens
        for each in (self._words, self._reasoning, self._content):
            each.begin()

    def receive(self, delta: rollout_pb2.SampleDelta) -> int:
        """Append the next tokens of the stream. Return how many of them are unusable.

        Raises:
            SluiceError: DATA_LOSS if they do not follow the earlier tokens, or lack log-probabilities or valid version spans.
        """
        tokens, sample = delta.tokens, self.sample
        count, starts = len(tokens.token_ids), [span.start for span in tokens.version_spans]
        end = delta.offset + count
        if self._stopped or delta.offset != self._received:
            raise _damaged(
                f"tokens {delta.offset} to {end} of sample {tokens.index} came after {self._received} tokens"
                + " and its end" * self._stopped
            )
        if len(tokens.logprobs) != count:
            raise _damaged(f"{count} tokens of sample {tokens.index} have {len(tokens.logprobs)} log-probabilities")
        if starts and not (delta.offset <= starts[0] and starts[-1] < end and all(a < b for a, b in pairwise(starts))):
            raise _damaged(f"tokens {delta.offset} to {end} of sample {tokens.index} have spans from {starts}")
        self._received = end
        # A token cannot be trained without the version that sampled it. Neither can the tokens after it.
        self._usable = self._usable and (not count or (bool(starts) and starts[0] == delta.offset))
        if self._usable:
            append_spans(sample.version_spans, tokens.version_spans, self._begun)
            sample.token_ids.MergeFrom(tokens.token_ids)
            sample.logprobs.MergeFrom(tokens.logprobs)
            if tokens.top_logprobs:
                sample.top_logprobs.MergeFrom(tokens.top_logprobs)
            self._text.append(tokens.text)
            if tokens.finish_reason not in _INTERRUPTED:  # an interrupted text may end with an incomplete character
                self._words.receive(tokens.text)
                self._reasoning.receive(delta.reasoning)
                self._content.receive(delta.content)
        if tokens.finish_reason:
            self._stopped = True
            if self._usable and tokens.finish_reason not in _INTERRUPTED:
                self._end(tokens.finish_reason, tokens.stop_string)
                if tokens.HasField("message"):
                    sample.message.CopyFrom(tokens.message)
                    sample.message.reasoning = self._reasoning.whole(sample.message.reasoning)
                    sample.message.content = self._content.whole(sample.message.content)
        return 0 if self._usable else count

    def keep(self, tokens: int) -> int:
        """Keep the first `tokens` tokens and forget the others. Return how many were forgotten."""
        sample, lost = self.sample, max(0, self.tokens - tokens)
        if lost:
            for field in (sample.token_ids, sample.logprobs, sample.top_logprobs):
                del field[tokens:]
            while sample.version_spans and sample.version_spans[-1].start >= tokens:
                sample.version_spans.pop()
        return lost

    def settle(self, request: rollout_pb2.GenerateRequest, model: rollout_pb2.GetModelResponse, prompt: int) -> int:
        """Find out whether the sample had ended when its stream broke. Return the number of tokens that have to be sampled again.

        A replica sends the last token together with the finish reason. If the reason is missing, an end token ends the sample, with the text
        that has arrived. The last token is sampled again if the sample has its full length, so that a replica decodes the whole text and gives
        the finish reason, and if the request wants a message, which only a replica can parse.
        """
        ends = self._ends(request, model)
        if ends and not request.return_message:
            self._end(tokens_pb2.FINISH_REASON_STOP, "")
            return 0
        most = self._most(request, model, prompt)
        return self.keep(max(self._given, min(self.tokens - ends, most - 1)))

    def final_delta(
        self, request: rollout_pb2.GenerateRequest, model: rollout_pb2.GetModelResponse, prompt: int
    ) -> rollout_pb2.SampleDelta | None:
        """Return what became final since the last call; None if nothing did.

        Hold back everything if `settle` would drop the last token, or end the sample with it, in case the stream broke now.
        """
        held = self._ends(request, model) or self.tokens >= self._most(request, model, prompt)
        if self._given_end or (held and not self.ended):
            return None
        sample, first = self.sample, self._given
        has_news = self._words.has_news or self._reasoning.has_news or self._content.has_news
        if first == self.tokens and not has_news and not self.ended:
            return None
        says = self.ended and sample.HasField("message")
        delta = rollout_pb2.SampleDelta(
            offset=first,
            reasoning=self._reasoning.give(sample.message.reasoning if says else None),
            content=self._content.give(sample.message.content if says else None),
        )
        given = delta.tokens
        given.index, given.text = sample.index, self._words.give(sample.text if self.ended else None)
        given.token_ids.extend(sample.token_ids[first:])
        given.logprobs.extend(sample.logprobs[first:])
        given.top_logprobs.extend(sample.top_logprobs[first:])
        given.version_spans.extend(_spans_from(sample.version_spans, first) if first < self.tokens else ())
        if self.ended:
            given.finish_reason, given.stop_string = sample.finish_reason, sample.stop_string
            if sample.HasField("message"):
                given.message.CopyFrom(sample.message)
        self._given, self._given_end = self.tokens, self.ended
        return delta

    def undo(self) -> int:
        """Forget everything that came from the present stream and was not sent yet. Return how many tokens were forgotten."""
        if self._given_end:
            return 0
        self.ended = False
        self.sample.finish_reason = tokens_pb2.FINISH_REASON_UNSPECIFIED
        self.sample.text = self.sample.stop_string = ""
        self.sample.ClearField("message")
        return self.keep(max(self._begun, self._given))

    def _ends(self, request: rollout_pb2.GenerateRequest, model: rollout_pb2.GetModelResponse) -> bool:
        """Return whether the last token ends the sample."""
        if not self.tokens or self.tokens < request.sampling.min_tokens:
            return False
        last, sampling = self.sample.token_ids[-1], request.sampling
        return last in sampling.stop_token_ids or (last in model.eos_token_ids and not sampling.ignore_eos)

    def _most(self, request: rollout_pb2.GenerateRequest, model: rollout_pb2.GetModelResponse, prompt: int) -> int:
        """Return the number of tokens of a sample of full length. If nothing limits it: one more than there are now."""
        most = request.sampling.max_tokens if request.sampling.HasField("max_tokens") else self.tokens + 1
        return min(most, model.max_model_len - prompt) if model.max_model_len else most

    def _end(self, reason: tokens_pb2.FinishReason.ValueType, stop_string: str) -> None:
        self.ended = True
        self.sample.finish_reason, self.sample.stop_string = reason, stop_string
        self.sample.text = self._words.whole("".join(self._text))


class Failure(NamedTuple):
    """The error that a replica answered to a request instead of sampling.

    Attributes:
        target: Address of the replica.
        said: Name of the replica and its error, for people.
    """

    target: str
    said: str


class Part:
    """One request to one replica, and the samples that it asks for.

    Attributes:
        request: The request.
        samples: Its samples, by their index in the request.
        tries: Number of requests for these samples in a row that brought no token.
        stalls: How many of these requests ended because the engine stalled.
        failures: Errors of the replicas that failed at these samples.
        avoid: The last replica that failed at these samples, or gave them up.
        unusable: Tokens that arrived and have to be sampled again.
        kept: Tokens that arrived and from which the samples continue elsewhere.
        opened: Whether the replica has begun with the request.
    """

    def __init__(
        self,
        generation: Generation,
        request: rollout_pb2.GenerateRequest,
        samples: Sequence[Growing],
        *,
        tries: int = 0,
        stalls: int = 0,
        failures: tuple[Failure, ...] = (),
        avoid: str = "",
    ) -> None:
        self.request, self.samples, self.tries, self.stalls, self.avoid = request, samples, tries, stalls, avoid
        self.failures = failures
        self.unusable = self.kept = 0
        self.opened = False
        self._generation = generation
        for each in samples:
            each.begin()

    @property
    def gained(self) -> int:
        """Usable tokens that this stream has brought."""
        return sum(each.gained for each in self.samples)

    @property
    def newest_version(self) -> Version:
        """Newest version among the tokens that this stream has brought; (0, 0) if there are none."""
        versions = [version for each in self.samples for version in each.versions_gained()]
        return max(versions, default=BASE)

    @property
    def continues(self) -> bool:
        """Whether it continues a sample from the tokens that it has."""
        return self.request.continued_tokens > 0

    def receive(self, message: rollout_pb2.GenerateStreamResponse) -> None:
        """Take a message of the stream.

        Raises:
            SluiceError: DATA_LOSS if it does not follow the earlier messages. Then everything from the stream that was not sent yet is dropped.
        """
        try:
            if message.HasField("opening"):
                self.opened = True
                self._generation.open(message.opening, self.samples)
            for delta in message.chunk.deltas:
                index = delta.tokens.index
                if index >= len(self.samples):
                    raise _damaged(f"a message has tokens of sample {index} of {len(self.samples)}")
                self.unusable += self.samples[index].receive(delta)
        except SluiceError:
            self.unusable += sum(each.undo() for each in self.samples)
            raise


class _Tries(NamedTuple):
    """How often samples were asked for without a new token, and how these requests ended. The fields are as in `Part`."""

    tries: int
    stalls: int
    failures: tuple[Failure, ...]


class Generation:
    """All samples of one request.

    Attributes:
        response: The answer so far; complete when `rest` returns nothing for the last part.
        replicas: Addresses of the replicas that were asked, in order, each once.
    """

    def __init__(self, request: rollout_pb2.GenerateRequest) -> None:
        self.request = request
        self.response = rollout_pb2.GenerateResponse(request_id=request.request_id)
        self.replicas: list[str] = []
        self._samples = [Growing(self.response.samples.add(index=index)) for index in range(request.n or 1)]

    def whole(self) -> Part:
        """Return the first part: the whole request."""
        return Part(self, self.request, self._samples)

    def open(self, opening: rollout_pb2.StreamOpening, samples: Sequence[Growing]) -> None:
        """Take the first message of a stream.

        Raises:
            SluiceError: DATA_LOSS if the replica tokenized the prompt differently from the replica before it.
        """
        response = self.response
        if not response.prompt_token_ids:
            response.prompt_token_ids.MergeFrom(opening.prompt_token_ids)
            response.tokenizer_digest, response.continued = opening.tokenizer_digest, opening.continued
            return
        prompt = [*response.prompt_token_ids, *samples[0].sample.token_ids]
        differ = response.tokenizer_digest and opening.tokenizer_digest not in ("", response.tokenizer_digest)
        if differ or prompt != list(opening.prompt_token_ids):
            raise _damaged("the prompt has other tokens than at the replica before: give all replicas the same --model")

    def rest(
        self,
        part: Part,
        model: rollout_pb2.GetModelResponse,
        avoid: str,
        *,
        interrupted: bool,
        stalled: bool = False,
        failure: Failure | None = None,
    ) -> list[Part]:
        """Return the parts that are left to ask for, after the stream of a part has ended or broken.

        Args:
            part: The part that was asked for.
            model: The model that the replicas serve.
            avoid: Replica that the rest should not go to, if there is another.
            interrupted: Whether the replica itself gave the samples up, sent damaged messages, failed at the samples, or died of
                them. That counts as a try if it brought no token.
            stalled: Whether the engine stalled. Then the next engine gets more time.
            failure: The error of the replica, if it failed at the samples.
        """
        fresh: list[Growing] = []
        left: list[Part] = []
        prompt = len(self.response.prompt_token_ids)
        part.unusable += sum(each.settle(self.request, model, prompt) for each in part.samples if not each.ended)
        failures = part.failures if failure is None else (*part.failures, failure)
        fruitless = _Tries(part.tries + interrupted, part.stalls + stalled, failures)
        for each in part.samples:
            if each.ended:
                continue
            part.kept += max(0, each.gained)
            if each.tokens:
                tries = _Tries(0, int(stalled), ()) if each.gained > 0 else fruitless
                left.append(self._continued(each, tries, avoid))
            else:
                fresh.append(each)
        runs = _runs(fresh) if self.request.sampling.HasField("seed") else [fresh] * bool(fresh)
        return left + [self._again(run, fruitless, avoid) for run in runs]

    def final_deltas(self, part: Part, model: rollout_pb2.GetModelResponse) -> Iterator[rollout_pb2.SampleDelta]:
        """Yield what became final in the samples of a part since the last call. A broken stream does not take it back.

        Args:
            part: The part, after it received a message, or after `rest`.
            model: The model of the replica that samples the part.
        """
        prompt = len(self.response.prompt_token_ids)
        deltas = (each.final_delta(self.request, model, prompt) for each in part.samples)
        return (each for each in deltas if each is not None)

    def _continued(self, growing: Growing, tries: _Tries, avoid: str) -> Part:
        """Ask for the rest of one sample."""
        done, sample, request = growing.tokens, growing.sample, self.request
        # Another process may have asked for another continuation under the same name. Then a replica would refuse this one.
        digest = xxhash.xxh3_64_hexdigest(array("I", sample.token_ids).tobytes())[:8]
        # The replica needs tools and template to parse the message.
        keeps = request.return_message and request.HasField("conversation")
        more = self._copy(f"{sample.index}+{done}.{digest}", tries.tries, keep_prompt=keeps)
        more.n = 1
        more.ClearField("continues")
        ids = more.rendered if keeps else more.token_ids
        ids.ids.MergeFrom(self.response.prompt_token_ids)
        ids.ids.MergeFrom(sample.token_ids)
        more.continued_tokens = request.continued_tokens + done
        more.sampling.min_tokens = max(0, request.sampling.min_tokens - done)
        if request.sampling.HasField("max_tokens"):
            more.sampling.max_tokens = request.sampling.max_tokens - done
        if request.sampling.HasField("seed"):
            more.sampling.seed = derived_seed(request.sampling.seed, sample.index, done)
        return Part(self, more, [growing], **tries._asdict(), avoid=avoid)

    def _again(self, samples: Sequence[Growing], tries: _Tries, avoid: str) -> Part:
        """Ask again for samples that have no token, with their original seeds."""
        if len(samples) == len(self._samples) and not tries.tries:
            return Part(self, self.request, samples, **tries._asdict(), avoid=avoid)
        first = samples[0].sample.index
        again = self._copy(f"{first}x{len(samples)}", tries.tries, keep_prompt=True)
        again.n = len(samples)
        if self.request.sampling.HasField("seed"):
            again.sampling.seed = self.request.sampling.seed + first
        return Part(self, again, samples, **tries._asdict(), avoid=avoid)

    def _copy(self, name: str, tries: int, *, keep_prompt: bool = False) -> rollout_pb2.GenerateRequest:
        """Return a copy of the request with a new id. To an id that it knows, a replica sends the answer that it remembers."""
        copy = rollout_pb2.GenerateRequest()
        copy.CopyFrom(self.request)
        if not keep_prompt:
            copy.ClearField(copy.WhichOneof("prompt") or "token_ids")
        if copy.request_id:
            copy.request_id = bounded_id(copy.request_id, f"/{name}" + f"~{tries}" * (tries > 0))
        return copy


def _spans_from(spans: Sequence[tokens_pb2.VersionSpan], first: int) -> list[tokens_pb2.VersionSpan]:
    """Return the spans of the tokens from `first` on."""
    found: list[tokens_pb2.VersionSpan] = []
    for span in reversed(spans):
        found.append(tokens_pb2.VersionSpan(start=max(first, span.start), policy_version=span.policy_version))
        if span.start <= first:
            break
    return found[::-1]


def derived_seed(*parts: object) -> int:
    """Return a seed of 47 bits, derived from the parts by a hash. Different parts give unrelated seeds."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=6).digest()
    return int.from_bytes(digest) >> 1


def _runs(samples: Sequence[Growing]) -> list[list[Growing]]:
    """Return samples in runs of consecutive indexes, because the samples of one request get consecutive seeds."""
    runs: list[list[Growing]] = []
    for each in samples:
        if runs and runs[-1][-1].sample.index + 1 == each.sample.index:
            runs[-1].append(each)
        else:
            runs.append([each])
    return runs


def bounded_id(request_id: str, suffix: str = "") -> str:
    """Return the id of a request, or of a part of it. An id that is too long for a replica is cut, and a hash of the full id is appended."""
    if len(request_id) + len(suffix) <= MAX_REQUEST_ID:
        return request_id + suffix
    digest = "#" + hashlib.blake2b(request_id.encode(), digest_size=8).hexdigest()
    return request_id[: MAX_REQUEST_ID - len(digest) - len(suffix)] + digest + suffix


def _damaged(problem: str) -> SluiceError:
    return SluiceError.data_loss(
        "STREAM_DAMAGED", f"{problem}; what this stream brought is discarded and sampled again elsewhere"
    )
