r"""What answers in mathematics and in numbers are worth: the forms in which models and data sets write them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.environments.rewards import gsm8k_reward, math_reward, numbers

BOXED = r"The answer is \boxed{%s}."

RIGHT = [
    (BOXED % r"\frac12", r"\frac{1}{2}"),
    (BOXED % r"\dfrac{1}{2}", "0.5"),
    (BOXED % "1/2", r"\frac{1}{2}"),
    (BOXED % r"1\tfrac{1}{2}", r"\frac{3}{2}"),
    (BOXED % r"7.2\%", r"7.2\%"),
    (BOXED % r"12\text{ cm}", "12"),
    (BOXED % "12", "12 cm"),
    (BOXED % r"12\ \mathrm{cm}^2", "12"),
    (BOXED % "5", "5 dollars"),
    (BOXED % r"\$1{,}234.50", "1234.5"),
    (BOXED % "1,234", "1234"),
    (BOXED % "[0, 1)", "[0,1)"),
    (BOXED % r"(-\infty, -2] \cup [3, \infty)", r"(-\infty,-2]\cup[3,\infty)"),
    (BOXED % r"\{1, 2, 3\}", r"\{3,2,1\}"),
    (BOXED % "x = 3", "3"),
    (BOXED % "3x + 4y + 14 = 0", "3x + 4y + 14 = 0"),
    (BOXED % "x > 5", "x > 5"),
    (BOXED % r"\text{13}", "13"),
    (BOXED % r"\text{(B)}", "B"),
    (BOXED % r"2\sqrt{3}", r"\sqrt{12}"),
    (BOXED % r"90^\circ", "90"),
    (BOXED % "004", "4"),
    (BOXED % r"2^{10}", "1024"),
    (BOXED % "10!", "3628800"),
    (BOXED % r"\binom{5}{2}", "10"),
    (BOXED % "\N{MINUS SIGN}5", "-5"),
    (BOXED % r"\left\{ \frac{a}{b} \right\}", r"\{\frac{a}{b}\}"),
    (BOXED % r"\boxed{7}", "7"),
    (BOXED % r"\pi", "3.14159265"),
    (r"First \boxed{840}. **Final Answer** \boxed{840}", "840"),
    (r"I thought \boxed{3}, but it is \boxed{4}.", "4"),
    (r"It is \boxed{4}, since \boxed{", "4"),
    ("So the number is **73**.", "73"),
    ("437 + 2*234 = 905, consistent.\n\nFinal Answer: **73**", "73"),
    (BOXED % r"\text{no solution}", r"\text{no solution}"),
    (BOXED % "Tuesday", "Tuesday"),
    ("The answer is 5.", "5"),
    ("It is $5$.", "5"),
    ("```python\nprint(5)\n```\nAnswer: $5$", "5"),
    ("5" * 400, "5" * 400),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (BOXED % "0.5", r"$\frac{1}{2}$"),
    (BOXED % "0.5", r"It is \boxed{\frac{1}{2}}"),
]

WRONG = [
    (BOXED % "[0, 1]", "[0,1)"),
    (BOXED % "(1, 2)", "(2, 1)"),
    (BOXED % r"\pm 2", "2"),
    (BOXED % "0.333", r"\frac13"),
    (BOXED % r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
    (BOXED % "0.0000001", "0.00000001"),
    (BOXED % "10^{-9}", "0"),
    (BOXED % "12:00", "1:00"),
    (BOXED % "3x - y + 13 = 0", "3x + 4y + 14 = 0"),
    (BOXED % "0", "3x + 4y + 14 = 0"),
    (BOXED % "x = 0", "3x + 4y + 14 = 0"),
    (BOXED % "x < 5", "x > 5"),
    (BOXED % "Parsi", "Paris"),
    (r"I thought \boxed{4}, but it is \boxed{3}.", "4"),
    (r"\boxed{", "5"),
    ("", "5"),
    ("\x00\ud83d", "5"),
    ("5", r"\text{no solution}"),
    (BOXED % "no", "no solution"),
    (BOXED % "5", "-5"),
    (BOXED % "1000000.5", "1000000"),
]


@pytest.mark.parametrize(
    ("said", "reference", "reward"), [(*each, 1) for each in RIGHT] + [(*each, 0) for each in WRONG]
)
def test_an_expression_is_right_if_it_equals_the_reference(said: str, reference: str, reward: float) -> None:
    assert math_reward(said, reference) == reward


def test_a_reference_without_an_expression_makes_the_reward_missing() -> None:
    with pytest.raises(ValueError, match="finds no mathematical expression"):
        math_reward(BOXED % "5", " ")


@pytest.mark.parametrize(
    ("said", "reference", "reward"),
    [
        ("so 10-15", "15", 1),
        ("between 10 and -15", "-15", 1),
        ("(20-5)-15", "15", 1),
        ("3 - 5 = -2", "-2", 1),
        ("it is \N{MINUS SIGN}5", "-5", 1),
        ("it is \N{MINUS SIGN}5", "5", 0),
        ("1.5e3", "1500", 1),
        ("1e3", "3", 0),
        ("10^3", "3", 0),
        ("2**3", "3", 0),
        ("**73**", "73", 1),
        ("$1,234.50.", "1,234.50", 1),
        (r"\boxed{1{,}234}", "1234", 1),
        (r"$\$18$", "18", 1),
        ("-$5", "-5", 1),
        ("1,2", "2", 1),
        ("about 3.", "3", 1),
        (".5", "0.5", 1),
        ("about .5", "5", 0),
        ("20/4", "5", 1),
        ("20/4", "4", 0),
        ("1/0", "0", 0),
        ("1e999999999", "1", 0),
        ("9" * 9000, "1", 0),
        ("5", "$5", 1),
        ("5", "5 dollars", 1),
        ("9" * 400, "9" * 400, 1),
        ("9007199254740993", "9007199254740992", 0),
    ],
)
def test_the_last_number_is_read_as_people_write_numbers(said: str, reference: str, reward: float) -> None:
    assert gsm8k_reward(said, f"Steps.\n#### {reference}") == reward


@pytest.mark.parametrize("reference", ["#### many", "####", "#### 5 or 6", "#### 1/0", "", "#### 2^3"])
def test_a_reference_that_is_not_one_number_makes_the_reward_missing(reference: str) -> None:
    with pytest.raises(ValueError, match="does not end with #### and a number"):
        gsm8k_reward("5", reference)


@given(st.integers(), st.integers(0, 6), st.sampled_from(["", "$", "=", "x = ", "(", "**"]), st.booleans())
def test_a_number_is_found_exactly_whatever_stands_before_it(
    units: int, places: int, before: str, grouped: bool
) -> None:
    value = Fraction(units, 10**places)
    whole, rest = divmod(abs(units), 10**places)
    sign = "-" if units < 0 else ""
    text = f"{sign}{whole:{',' if grouped else ''}}" + (f".{rest:0{places}}" if places else "")
    assert numbers(f"I say {before}{text}.") == [value]
