"""Exact numbers out of text: signs, thousands separators, currencies, units, fractions, percent."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 200  # Longer numbers are not read: nobody states one, and converting them takes quadratic time

_CHARACTERS = {
    **dict.fromkeys("−–—‒﹣－", "-"),
    **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
    **dict.fromkeys("\u00a0\u2007\u2009\u202f\u3000", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    **dict(zip("，．％（）＋＝／⁄∕÷", ",.%()+=////", strict=True)),
    **{"×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq "},
    **{"±": r"\pm ", "∪": r"\cup ", "∈": r"\in ", "ℝ": r"\mathbb{R}"},
    **{"²": "^{2}", "³": "^{3}", "°": r"^\circ ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}"},
}
_TABLE = str.maketrans(_CHARACTERS)

PLAIN_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_SIGNED = rf"[-+]?\s?(?:{PLAIN_NUMBER})"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)\s*(?:\\?[$€£¥₹]\s*)?(?P<sign2>-?)
    (?:(?P<whole>\d+)?\s*\\frac\s*\{{\s*(?P<num>{_SIGNED})\s*\}}\s*\{{\s*(?P<den>{_SIGNED})\s*\}}
      |(?P<a>(?:{PLAIN_NUMBER})(?:[eE][-+]?\d{{1,3}})?)(?:\s*/\s*(?P<b>{PLAIN_NUMBER}))?)
    (?:\s*(?P<percent>\\?%|[Pp]ercent\b))?(?P<unit>.*)""",
    re.VERBOSE | re.DOTALL,
)
_UNIT = re.compile(
    r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\?[$€£¥₹])?"
    r"(?:(?P<words>\s[A-Za-z][A-Za-z ./-]*)|\s*\\(?:text|mathrm|mbox)\s*\{[^{}\d]*\})?(?:\^\{?[23]\}?)?\.?\s*"
)
_SHORT_UNITS = frozenset([
    "cm", "mm", "km", "nm", "in", "ft", "yd", "mi", "kg", "mg", "lb", "oz", "ml", "dl", "hr", "hrs", "min", "sec", "ms",
    "am", "pm", "mph", "kph", "m", "g", "h", "s", "l",
])  # fmt: skip
_MATHS_WORDS = frozenset(
    ["pi", "phi", "sqrt", "sin", "cos", "tan", "cot", "csc", "log", "ln", "exp", "inf", "infinity", "mod", "and", "or"]
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number as written."""

    value: Fraction  # For `50%` this is 50
    percent: bool
    decimal: bool  # Written with a decimal point, hence possibly rounded


def plain_characters(text: str) -> str:
    """Typographic signs (minus, fullwidth digits, odd spaces, operators) as ASCII or LaTeX."""
    return text.translate(_TABLE)


def _fraction(text: str) -> Fraction:
    return Fraction(re.sub(r"[,\s+]", "", text))


def _is_unit(text: str) -> bool:
    """`dollars`, `cm^2`, a degree sign, `\\text{...}`; but not `x`, `xy`, `pi`, `or 3`: those change the value."""
    match = _UNIT.fullmatch(text)
    if match is None:
        return False
    word = re.match(r"\s*([A-Za-z]*)", match["words"] or "")
    first = word[1].lower() if word else ""
    return not first or first in _SHORT_UNITS or (len(first) > 2 and first not in _MATHS_WORDS)


def read_quantity(text: str) -> Quantity | None:
    """The number that `text` is, unit ignored, or None when it is anything else (`5x`, `3+4`, `1,3`, `2 or 3`)."""
    text = text.strip()
    if not text or sum(map(str.isdigit, text)) > MAX_DIGITS or len(text) > 4 * MAX_DIGITS:
        return None
    match = _NUMBER.fullmatch(text)
    if match is None or not _is_unit(match["unit"]):
        return None
    if match["num"] is not None:
        parts = (match["num"], match["den"])
    else:
        parts = (match["a"], match["b"] or "1")
    if _fraction(parts[1]) == 0:
        return None
    value = Fraction(match["whole"] or 0) + _fraction(parts[0]) / _fraction(parts[1])
    negative = (match["sign"] == "-") != (match["sign2"] == "-")
    return Quantity(-value if negative else value, match["percent"] is not None, any("." in part for part in parts))


def same_quantity(a: Quantity, b: Quantity) -> bool:
    """Equal numbers; six decimals are enough when one is written as a decimal; `50%` is also 50 and 0.5.

    `b` is the right one: where six decimals leave nothing of it (`6.63e-34`), six digits have to agree.
    """
    exact = not (a.decimal or b.decimal)

    def equal(x: Fraction, y: Fraction) -> bool:
        if exact or x == y:
            return x == y
        tiny = b.value != 0 and round(b.value, 6) == 0
        return abs(x - y) * 10**6 <= max(abs(x), abs(y)) if tiny else round(x, 6) == round(y, 6)

    if a.percent == b.percent:
        return equal(a.value, b.value)
    percent, plain = (a, b) if a.percent else (b, a)
    exact = exact and not plain.decimal
    return equal(percent.value, plain.value) or equal(percent.value / 100, plain.value)
