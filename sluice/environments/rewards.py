"""Reward functions of the environment `question_answer`, by the names that its settings give them."""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from sluice.environments.formats import last_boxed
from sluice.environments.sandbox import START_S, Limits, Ran, check_confines, run_python
from sluice.errors import ConfigError

RewardFunction = Callable[[str, str], float]

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_NUMBER = re.compile(
    r"""
    (?:(?<![\w)])(?P<sign>[-+])\s?)?  # what joins two numbers is no sign: 10-15
    [$€£]?
    (?P<number>(?:\d{1,3}(?:,\d{3}(?!\d))+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)
    (?:/(?P<divisor>\d+(?:\.\d+)?))?
    (?P<power>(?:\^|\*\*)\{?-?\d+)?
    """,
    re.VERBOSE,
)

_NUMBER_DIGITS, _EXPONENT_DIGITS = 4000, 4
"""Longest number that Python reads, about, and longest exponent: larger ones make numbers that fill the memory."""

_MARKED = re.compile(r"\$|\\boxed|\\fbox|\\\[|\\\(")
"""What says that a text holds LaTeX."""

_MEASURE = re.compile(r"[-+]?[\d.,]+\s+[^\W\d_]{3,}(?:\s+[^\W\d_]+)*")
"""A number with a unit in words, as "5 dollars", which is prose."""

_WORD = re.compile(r"[^\W\d_]{4,}")

_NEAR = 1e-6
"""Greatest difference between a number and the right one, as a share of that."""

_CASES = 6
"""The cases of a list may take so many times the seconds of one run, unless the limits say otherwise."""

STARTS_S = 60.0
"""Seconds that the starts of the interpreter for one program may take together: 30 ms each on a quiet machine."""

JUDGE_PROMPT = """Judge an answer.

Question: {question}

Reference answer: {answer}

Answer to judge: {completion}

Is it right? End with a line "score: X", where X is a number from 0 (wrong) to 1 (right)."""


def exact_reward(completion: str, answer: str) -> float:
    """Return 1 if the completion is the answer, white space around it aside; else 0."""
    return float(completion.strip() == answer.strip())


def math_reward(completion: str, answer: str) -> float:
    r"""Return 1 if the last mathematical expression of the completion equals the answer, else 0 (math-verify).

    The last expression is the last ``\boxed{}`` if there is one. The answer is LaTeX, with or without ``$``. An answer that is a word is
    compared as text as well, since to the library the letters of "Paris" are factors in any order. The library's own time limits rely on
    signals and are switched off: the environment's process has one.

    Raises:
        ValueError: if the answer has no mathematical expression.
    """
    from math_verify import parse, verify  # noqa: PLC0415 - brings sympy, which is slow to import

    gold = _reference(answer)
    if not gold:
        raise ValueError(
            f"the answer of a task is {answer!r:.200}, in which math-verify finds no mathematical expression"
        )
    try:
        said = last_boxed(completion)
    except ValueError:
        said = completion
    found = parse(said, parsing_timeout=None) or parse(completion, parsing_timeout=None)
    if not verify(gold, found, timeout_seconds=None):
        return 0.0
    word = answer.strip()
    if _WORD.fullmatch(word) and word.lower() not in said.lower():
        return 0.0
    return float(_near(gold[0], found[0]))


def _reference(answer: str) -> list[Any]:
    """Return what math-verify makes of an answer; without ``$`` it would take the answer for prose, and look for a number in it."""
    from math_verify import parse  # noqa: PLC0415 - brings sympy, which is slow to import

    text = answer.strip()
    readings = [text] if _MARKED.search(text) or _MEASURE.fullmatch(text) else [f"${text}$", text]
    for reading in readings:
        if found := parse(reading, parsing_timeout=None):
            return list(found)
    return []


def _near(gold: Any, found: Any) -> bool:  # noqa: ANN401 - what math-verify found
    """Return whether two numbers are as near as `_NEAR`; True of all that is no number. The library rounds to six decimals."""
    if not all(getattr(each, "is_number", False) and getattr(each, "is_real", False) for each in (gold, found)):
        return True
    try:
        return bool(abs(gold - found).evalf() <= _NEAR * abs(gold).evalf())
    except TypeError:  # not to be decided by their values
        return True


def gsm8k_reward(completion: str, answer: str) -> float:
    """Return 1 if the last number of the completion is the one after ``####`` in the answer, else 0.

    Raises:
        ValueError: if there is no number, or more than one.
    """
    right = gsm8k_number(answer)
    found = numbers(completion)
    return float(bool(found) and found[-1] == right)


def gsm8k_number(answer: str) -> Fraction:
    """Return the number after ``####``; of an answer without that mark, its only number.

    Raises:
        ValueError: if there is no number, or more than one.
    """
    found = numbers(answer.rpartition("####")[2])
    if len(found) != 1 or found[0] is None:
        raise ValueError(f"the answer of a task is {answer!r:.200}, which does not end with #### and a number")
    return found[0]


def numbers(text: str) -> list[Fraction | None]:
    """Return the numbers of a text, exact: 1,234 and 1{,}234, .5, 1.5e3, 1/2, -$5. One that cannot be had is None: 1/0, 1e999999, 2^3."""
    plain = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",").replace("\\$", "$")
    return [_fraction(each) for each in _NUMBER.finditer(plain)]


def _fraction(found: re.Match[str]) -> Fraction | None:
    sign, number, divisor, power = found.group("sign", "number", "divisor", "power")
    exponent = number.lower().partition("e")[2]
    if power or max(len(number), len(divisor or "")) > _NUMBER_DIGITS or len(exponent.lstrip("+-")) > _EXPONENT_DIGITS:
        return None
    if divisor and not Fraction(divisor):
        return None
    value = Fraction(number.replace(",", "")) / Fraction(divisor or 1)
    return -value if sign == "-" else value


class CodeReward:
    """Gives 1 if the program in a completion passes all tests of the answer, else 0.

    The program is the last fenced block, or the whole completion without one. The answer is Python code with assertions, which follows
    the program; or a JSON list of ``{"input": ..., "output": ...}``, what the program reads and what it must print.

    A program that has not ended after ``wall_s`` has failed its tests. So has one that took ``cases_s`` for the cases of a list together,
    without the starts of the interpreter, before the last of them.

    Args:
        limits: What each run may use, fields of `Limits`; and ``cases_s``, seconds for all cases of a list (6 times ``wall_s``).
        confined: Whether it runs in the sandbox.

    Attributes:
        scoring_s: Most seconds for one completion.

    Raises:
        ConfigError: if this machine cannot confine it, or there is no such limit.
    """

    def __init__(self, limits: Mapping[str, Any] | None = None, *, confined: bool = True) -> None:
        given = dict(limits or {})
        cases_s = given.pop("cases_s", None)
        try:
            self._limits = Limits(**given)
        except TypeError as error:
            raise ConfigError(f"no such limit of the sandbox: {error}") from error
        self._cases_s = self._limits.wall_s * _CASES if cases_s is None else cases_s
        for name, seconds in {"wall_s": self._limits.wall_s, "cases_s": self._cases_s}.items():
            if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise ConfigError(f"limits.{name} is {seconds!r}: give seconds, more than 0")
        self.scoring_s = max(self._limits.wall_s, self._cases_s) + STARTS_S + START_S
        self._confined = confined
        if confined:
            check_confines()

    def __call__(self, completion: str, answer: str) -> float:
        """Run the tests.

        Raises:
            TimeoutError: if this machine takes too long to start the interpreter for each case.
        """
        blocks = _FENCED.findall(completion)
        program = blocks[-1] if blocks else completion
        if (cases := _cases(answer)) is not None:
            return float(self._passes(program, cases))
        mark = secrets.token_hex(16)  # a program that ends early does not get to print it
        whole = f"{program}\n\n{answer}\n\nprint()\nprint({mark!r})\n"
        ran = run_python(whole, limits=self._limits, confined=self._confined)
        return float(ran.ok and ran.stdout.rstrip().endswith(mark))

    def _passes(self, program: str, cases: Sequence[Mapping[str, str]]) -> bool:
        """Return whether a program passes all cases; it is not run again after one that it fails."""
        left_s, starts_s = self._cases_s, 0.0
        for number, case in enumerate(cases):
            if starts_s > STARTS_S:
                raise TimeoutError(
                    f"the interpreter took {starts_s:.0f} s to start for {number} of {len(cases)} test cases: this machine is too busy, or"
                    " the list too long"
                )
            if left_s <= 0:
                return False
            limits = replace(self._limits, wall_s=min(self._limits.wall_s, left_s))
            ran = run_python(program, stdin=case["input"], limits=limits, confined=self._confined)
            if not _printed(ran, case["output"]):
                return False
            left_s -= ran.seconds
            starts_s += ran.start_seconds
        return True


def _printed(ran: Ran, wanted: str) -> bool:
    """Return whether a program ended in order and printed what it should, white space at the ends of lines aside."""
    return ran.ok and [each.rstrip() for each in ran.stdout.rstrip().splitlines()] == [
        each.rstrip() for each in wanted.rstrip().splitlines()
    ]


def _cases(answer: str) -> list[dict[str, str]] | None:
    """Return the cases of an answer; None if it is code."""
    try:
        found = json.loads(answer)
    except ValueError:
        return None
    if isinstance(found, list) and all(isinstance(each, dict) and {"input", "output"} <= each.keys() for each in found):
        return found
    return None


REWARDS: Mapping[str, RewardFunction] = {"exact": exact_reward, "math": math_reward, "gsm8k": gsm8k_reward}
"""Reward functions by the name that settings give them; `code` and `judge` have settings of their own."""


class Judge:
    """Lets a model behind an OpenAI-compatible endpoint score answers.

    Answers that were judged before are not asked about again. What the judge says must end with a line ``score: X``.

    Args:
        url: Of the endpoint, up to and with ``/v1``.
        model: Name of the judge there.
        prompt: Text with the fields ``{question}``, ``{answer}`` and ``{completion}``.
        key_variable: Environment variable with the API key; `environment_processes.variables` must name it.
        timeout_s: Seconds for an answer, all attempts together; then the reward is missing.
        at_a_time: Requests under way.
        remembered: Judgements that are kept.
        **options: Further fields of the request, such as ``temperature = 0``.

    Attributes:
        timeout_s: As above.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        prompt: str = JUDGE_PROMPT,
        key_variable: str = "OPENAI_API_KEY",
        timeout_s: float = 60.0,
        at_a_time: int = 16,
        remembered: int = 100_000,
        **options: Any,  # noqa: ANN401 - whatever JSON has
    ) -> None:
        from sluice.chat_endpoint import ChatEndpoint  # noqa: PLC0415 - brings an HTTP client; other rewards need none

        self._endpoint = ChatEndpoint(url, model, key_variable=key_variable, timeout_s=timeout_s, at_a_time=at_a_time)
        self._prompt, self._options, self._most, self.timeout_s = prompt, options, remembered, timeout_s
        self._known: OrderedDict[bytes, float] = OrderedDict()

    async def score(self, question: str, answer: str, completion: str) -> float:
        """Return what the judge gives.

        Raises:
            ValueError: if it says no score, or one that is not from 0 to 1.
            EndpointError: if it does not answer.
        """
        text = self._prompt.format(question=question, answer=answer, completion=completion)
        key = hashlib.blake2b(text.encode()).digest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        choice = await self._endpoint.ask([{"role": "user", "content": text}], **self._options)
        said = str(choice["message"]["content"])
        found = numbers(said.lower().rpartition("score:")[2]) if "score:" in said.lower() else []
        if not found or found[0] is None or not 0 <= found[0] <= 1:
            raise ValueError(f'the judge gave no "score: X" with X from 0 to 1: {said[-200:]!r}')
        score = float(found[0])
        self._known[key] = score
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return score
