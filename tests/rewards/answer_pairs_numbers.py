"""Answer pairs whose values are computed: integers, separators, fractions, decimals, percent, powers and more."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from answer_pairs_form import AnswerPair

Spelling = tuple[Fraction | int, str]
"""An exact value, and one way to write it."""


def compared(kind: str, *rows: tuple[Spelling, ...]) -> Iterator[AnswerPair]:
    """Yield for each row (gold, answers ...) the pairs of the gold with every answer."""
    for (value, gold), *answers in rows:
        for other, answer in answers:
            yield AnswerPair(kind, gold, answer, Fraction(value) == Fraction(other))


def integers() -> Iterator[AnswerPair]:
    for value in (42, 306):
        tens, ones = divmod(value, 10)
        yield from compared(
            "integers",
            (
                (value, str(value)),
                (value, f"+{value}"),
                (value, f"x = {value}"),
                (value, rf"\mathbf{{{value}}}"),
                (value, f"{value - 5} + 5"),
                (-value, f"-{value}"),
                (value * 10, f"{value}0"),
                (Fraction(value, 10), f"{tens}.{ones}"),
                (tens * ones, rf"{tens} \cdot {ones}"),
                (tens + ones, f"{tens} + {ones}"),
            ),
        )
    yield from compared(
        "integers",
        ((-8, "-8"), (-8, "−8"), (-8, "0 - 8"), (8, "8"), (8, "-(-8)"), (-80, "-80")),
        ((7, "7"), (7, "$7$"), (7, "７"), (7, "007"), (7, "{7}"), (7, "(7)"), (-7, "(-7)"), (5040, "7!"), (77, "77")),
        ((0, "0"), (0, "5 - 5"), (0, "-0"), (1, "0!")),
    )


def separators() -> Iterator[AnswerPair]:
    for value in (1234, 20025, 1250000):
        groups = f"{value:,}"
        shifted = value // 1000  # all but the last group
        yield from compared(
            "thousands separators",
            (
                (value, str(value)),
                (value, groups),
                (value, groups.replace(",", r"\,")),
                (value, groups.replace(",", " ")),
                (value, groups.replace(",", "{,}")),
                (value, groups.replace(",", r",\!")),
                (value, groups.replace(",", "\u202f")),
                (value + 1, f"{value + 1:,}"),
                (shifted, f"{shifted:,}"),
                (value * 1000, f"{value:,},000"),
                (Fraction(value, 1000), f"{value // 1000}.{value % 1000:03d}"),
                (value % 1000, str(value % 1000)),
                (value * 10, f"{value * 10:,}".replace(",", " ")),
                (value + 1000, f"{value + 1000:,}".replace(",", "{,}")),
            ),
        )
    yield from compared(
        "thousands separators",
        ((1234, "1,234"), (1234, "1234"), (1234, "1234.00"), (1234, r"1{,}234.0"), (124, "124"), (1235, "1 235")),
        ((Fraction("1234.5"), "1234.5"), (Fraction("1234.5"), "1,234.5"), (Fraction("12345"), "12,345")),
    )
    for gold, answer in ((r"1250", "1, 250"), ("1234", "(1,234)"), ("1234", r"\{1, 234\}")):
        yield AnswerPair("thousands separators", gold, answer, False)  # a list, a pair, a set


def fractions() -> Iterator[AnswerPair]:
    for top, bottom in ((3, 4), (22, 7), (1, 12)):
        value = Fraction(top, bottom)
        yield from compared(
            "fractions",
            (
                (value, rf"\frac{{{top}}}{{{bottom}}}"),
                (value, f"{top}/{bottom}"),
                (value, rf"\dfrac{{{2 * top}}}{{{2 * bottom}}}"),
                (value, rf"{top} \div {bottom}"),
                (1 / value, rf"\frac{{{bottom}}}{{{top}}}"),
                (-value, rf"-\frac{{{top}}}{{{bottom}}}"),
                (value + 1, f"1 + {top}/{bottom}"),
                (top * bottom, rf"{top} \cdot {bottom}"),
            ),
        )
    half = Fraction(1, 2)
    yield from compared(
        "fractions",
        ((-half, r"-\frac{1}{2}"), (-half, r"\frac{-1}{2}"), (-half, r"\frac{1}{-2}"), (half, r"\frac{-1}{-2}")),
        (
            (half, r"\frac12"),
            (half, r"\tfrac{1}{2}"),
            (half, "1/2"),
            (half, "½"),
            (2, "2/1"),
            (Fraction(1, 12), "1/12"),
        ),
        (
            (Fraction(1, 20), r"\frac{1}{20}"),
            (Fraction(1, 20), "1/20"),
            (half, r"\frac{10}{20}"),
            (half, r"\frac{1}{2}"),
        ),
        (
            (Fraction(2, 3), r"\frac{2}{3}"),
            (Fraction(2, 3), r"{2 \over 3}"),
            (Fraction(2, 3), "2⁄3"),
            (Fraction(3, 2), "3/2"),
        ),
        (
            (Fraction(3, 8), r"\frac{\frac{3}{4}}{2}"),
            (Fraction(3, 8), "3/8"),
            (Fraction(3, 2), r"\frac{3}{\frac{4}{2}}"),
        ),
    )


def mixed_numbers() -> Iterator[AnswerPair]:
    for whole, top, bottom in ((1, 1, 2), (3, 1, 7), (5, 2, 3)):
        value = whole + Fraction(top, bottom)
        improper = f"{value.numerator}/{value.denominator}"
        frac = rf"\frac{{{top}}}{{{bottom}}}"
        yield from compared(
            "mixed numbers",
            (
                (value, f"{whole} {top}/{bottom}"),
                (value, rf"\frac{{{value.numerator}}}{{{value.denominator}}}"),
                (value, f"{whole}{frac}"),
                (value, f"{whole} + {top}/{bottom}"),
                (Fraction(whole + top, bottom), f"{whole + top}/{bottom}"),
                (whole, str(whole)),
                (Fraction(whole * top, bottom), rf"{whole} \cdot {frac}"),
            ),
            (
                (value, improper),
                (value, f"{whole} {top}/{bottom}"),
                (whole + Fraction(bottom, top), f"{whole} {bottom}/{top}"),
            ),
        )
    yield from compared(
        "mixed numbers",
        (
            (Fraction(-3, 2), r"-1\frac{1}{2}"),
            (Fraction(-3, 2), "-1 1/2"),
            (Fraction(-3, 2), "-3/2"),
            (Fraction(-1, 2), "-1/2"),
        ),
        ((Fraction(-3, 2), "-1 1/2"), (Fraction(-3, 2), "-1.5"), (Fraction(-1, 2), r"-1 + \frac{1}{2}")),
        (
            (Fraction(7, 4), "1.75"),
            (Fraction(7, 4), "1 3/4"),
            (Fraction(7, 4), r"1\,\tfrac{3}{4}"),
            (Fraction(13, 4), "13/4"),
        ),
        ((Fraction(3, 2), "1.5"), (Fraction(3, 2), "1½"), (Fraction(11, 2), "11/2")),
        ((Fraction(3, 2), "1 1/2"), (Fraction(3, 2), "1.5"), (Fraction(1, 2), "1/2")),
        ((Fraction(22, 7), r"\frac{22}{7}"), (Fraction(22, 7), "3 1/7"), (Fraction(31, 7), "31/7")),
    )


def decimals() -> Iterator[AnswerPair]:
    for text in ("0.75", "0.5", "0.04", "0.008"):
        value = Fraction(text)
        yield from compared(
            "decimals",
            (
                (value, text),
                (value, f"{text}0"),
                (value, rf"\frac{{{value.numerator}}}{{{value.denominator}}}"),
                (value, text.removeprefix("0")),
                (value * 10, f"{float(value * 10):.10g}"),
                (value + Fraction(1, 1000), f"{float(value + Fraction(1, 1000)):.10g}"),
                (-value, f"-{text}"),
                (value / 10, f"{float(value / 10):.10f}".rstrip("0")),
            ),
        )
    third = Fraction(1, 3)
    yield from compared(
        "decimals",
        ((5, "5"), (5, "5.0"), (5, "5.000"), (Fraction("5.05"), "5.05"), (Fraction("0.5"), ".5"), (50, "5.0e1")),
        ((Fraction("0.1"), "0.1"), (Fraction("0.1"), "1/10"), (Fraction("0.01"), "0.01"), (Fraction("1/11"), "1/11")),
        ((third, r"\frac{1}{3}"), (Fraction("0.33"), "0.33"), (Fraction("0.3333"), "0.3333")),
        (
            (Fraction("-1.25"), "-1.25"),
            (Fraction("-1.25"), "-5/4"),
            (Fraction("-1.25"), "−1.250"),
            (Fraction("1.25"), "1.25"),
        ),
    )


def repeating_decimals() -> Iterator[AnswerPair]:
    for start, cycle in (("", "3"), ("", "27"), ("58", "3"), ("", "09")):
        scale, nines = 10 ** len(start), 10 ** len(cycle) - 1
        value = Fraction(int(start or 0), scale) + Fraction(int(cycle), scale * nines)
        ended = Fraction(int(start + cycle), 10 ** len(start + cycle))
        barred = rf"0.{start}\overline{{{cycle}}}"
        fraction = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
        yield from compared(
            "repeating decimals",
            ((value, fraction), (value, barred), (ended, f"0.{start}{cycle}")),
            ((value, barred), (value, f"{value.numerator}/{value.denominator}"), (1 - value, rf"1 - {fraction}")),
            ((ended, f"0.{start}{cycle}"), (value, barred)),
        )
    sixth = Fraction(1, 6)
    yield from compared(
        "repeating decimals",
        ((sixth, "1/6"), (sixth, r"0.1\dot{6}"), (sixth, r"0.1\bar{6}"), (Fraction(16, 99), r"0.\overline{16}")),
        (
            (Fraction(4, 3), r"\frac{4}{3}"),
            (Fraction(4, 3), r"1.\overline{3}"),
            (Fraction(4, 3), r"1.\dot{3}"),
            (Fraction(13, 99), r"0.\dot{1}\dot{3}"),
        ),
        (
            (Fraction(12, 99), r"0.\overline{12}"),
            (Fraction(4, 33), r"0.\dot{1}\dot{2}"),
            (Fraction(11, 90), r"0.1\overline{2}"),
        ),
        ((Fraction(1, 9), r"0.\overline{1}"), (Fraction(1, 9), r"0.\bar{1}"), (Fraction(1, 90), r"0.0\overline{1}")),
        ((1, "1"), (1, r"0.\overline{9}")),
    )


def percents() -> Iterator[AnswerPair]:
    for text in ("25", "12.5", "150"):
        share = Fraction(text) / 100
        yield from compared(
            "percent",
            (
                (share, rf"{text}\%"),
                (share, f"{text}%"),
                (share, f"{text} percent"),
                (share, f"{float(share):g}"),
                (share, rf"\frac{{{share.numerator}}}{{{share.denominator}}}"),
                (share * 10, rf"{float(share * 1000):g}\%"),
                (share / 10, f"{float(share / 10):g}"),
                (1 - share, rf"{float(100 - share * 100):g}\%"),
                (share / 100, rf"{float(share):g}\%"),
            ),
        )
        yield AnswerPair("percent", rf"{text}\%", text, True)  # the convention: percent of something is also its count
        yield AnswerPair("percent", text, rf"{text} \%", True)
        yield AnswerPair("percent", f"{float(share):g}", text, False)  # no percent sign on either side
    yield from compared(
        "percent",
        (
            (Fraction(1, 3), r"\frac{100}{3}\%"),
            (Fraction(1, 3), r"33\frac{1}{3}\%"),
            (Fraction(1, 3), "33 1/3 %"),
            (Fraction("0.33"), r"33\%"),
        ),
        ((Fraction("-0.05"), r"-5\%"), (Fraction("-0.05"), "-5 percent"), (Fraction("0.05"), r"5\%")),
        ((Fraction("0.05"), r"5\%"), (Fraction("0.05"), "0.05"), (Fraction("0.5"), "0.5"), (Fraction("0.5"), r"50\%")),
    )


def powers() -> Iterator[AnswerPair]:
    for base, exponent in ((2, 3), (10, 3), (5, 2)):
        value = base**exponent
        yield from compared(
            "powers",
            (
                (value, str(value)),
                (value, f"{base}^{exponent}"),
                (value, f"{base}^{{{exponent}}}"),
                (value, f"{base}**{exponent}"),
                (exponent**base, f"{exponent}^{{{base}}}"),
                (base ** (exponent + 1), f"{base}^{exponent + 1}"),
                (-value, f"-{base}^{exponent}"),
            ),
            ((base, str(base)), (value, f"{base}^{exponent}")),
            ((base * exponent, str(base * exponent)), (value, f"{base}^{{{exponent}}}")),
        )
    yield from compared(
        "powers",
        ((-4, "-4"), (-4, "-2^2"), (4, "(-2)^2")),
        ((4, "4"), (4, "(-2)^2"), (-4, "-2^2"), (4, r"\left(-2\right)^{2}"), (4, "2²")),
        ((Fraction(3, 2), r"\frac{3}{2}"), (Fraction(9, 4), r"\left(\frac{3}{2}\right)^2")),
        (
            (Fraction(1, 8), r"\frac{1}{8}"),
            (Fraction(1, 8), "2^{-3}"),
            (Fraction(1, 8), r"\frac{1}{2^3}"),
            (8, "2^3"),
            (-8, "-2^3"),
        ),
        ((1, "1"), (1, "7^0"), (0, "0^7")),
        ((512, "2^9"), (512, "2^{3^2}"), (64, "(2^3)^2"), (512, "8^3"), (18, "2 9")),
        (
            (2**20, "2^{20}"),
            (2**20, "1048576"),
            (2**20, "4^{10}"),
            (2**2 * 0, r"2^2 \cdot 0"),
            (40, "2 \\cdot 20"),
            (220, "220"),
        ),
    )
    yield AnswerPair("powers", r"\frac{3}{2}", r"\frac{3}{2}^2", False)  # 9/4, or 9/2 by another reading


def brackets() -> Iterator[AnswerPair]:
    for a, b in ((5, 2), (2, 3)):
        yield from compared(
            "numbers in brackets",
            ((a * b, str(a * b)), (a * b, f"{a}({b})"), (a * b, f"({a})({b})"), (a + b, f"({a}) + ({b})")),
            ((a + b, str(a + b)), (a * b, f"{a}({b})"), (a * b, f"({a})({b})"), (a + b, f"({a} + {b})")),
            ((int(f"{a}{b}"), f"{a}{b}"), (a * b, f"{a}({b})")),
            ((a * b, str(a * b)), (a * b, rf"{a}\left({b}\right)"), (a - b, f"({a}) - ({b})")),
        )
    yield from compared(
        "numbers in brackets",
        ((24, "24"), (24, "2(3)(4)"), (9, "2 + (3) + (4)"), (24, "(2)(3)(4)")),
        ((9, "9"), (24, "2(3)(4)"), (9, "(9)")),
        ((-12, "-12"), (-12, "3(-4)"), (-1, "3 + (-4)"), (12, "-3(-4)")),
        ((14, "14"), (14, "2(3 + 4)"), (10, "2(3) + 4"), (10, "(2)(3) + 4")),
        ((2, "2"), (2, r"4\left(\frac{1}{2}\right)"), (Fraction(9, 2), r"4 + \frac{1}{2}")),
        ((5, "5"), (5, "((5))"), (25, "5(5)"), (Fraction(5, 2), "5/(2)")),
    )


def scientific() -> Iterator[AnswerPair]:
    for digits, exponent in (("1.5", 3), ("6.02", 23), ("4", -3)):
        value = Fraction(digits) * Fraction(10) ** exponent
        plain = str(int(value)) if exponent > 0 else f"{float(value):.10f}".rstrip("0")
        yield from compared(
            "scientific notation",
            (
                (value, plain),
                (value, rf"{digits} \times 10^{{{exponent}}}"),
                (value, rf"{digits} \cdot 10^{{{exponent}}}"),
                (value, f"{digits}e{exponent}"),
                (value * 10, rf"{digits} \times 10^{{{exponent + 1}}}"),
                (
                    value / 10**exponent * Fraction(1, 10 ** abs(exponent)) / 10,
                    rf"{digits} \times 10^{{{-abs(exponent) - 1}}}",
                ),
                (Fraction(digits) * 10, rf"{digits} \times 10"),
            ),
            (
                (value, rf"{digits} \times 10^{{{exponent}}}"),
                (value, f"{digits}E{exponent}"),
                (Fraction(digits), digits),
            ),
        )
    yield from compared(
        "scientific notation",
        ((1000, "10^3"), (1000, r"1 \times 10^3"), (1000, "1e3"), (30, r"10 \cdot 3"), (10, "10")),
        ((300000000, r"3 \times 10^8"), (300000000, "3×10⁸"), (300000000, "3*10^8"), (2400, r"3 \times 10 \times 80")),
        (
            (Fraction("0.0015"), r"1.5 \times 10^{-3}"),
            (Fraction("0.0015"), r"15 \times 10^{-4}"),
            (Fraction("0.015"), r"1.5 \times 10^{-2}"),
        ),
        (
            (Fraction("6.63e-34"), r"6.63 \times 10^{-34}"),
            (Fraction("6.63e-34"), "6.63e-34"),
            (0, "0"),
            (Fraction("6.62e-34"), r"6.62 \times 10^{-34}"),
        ),
    )


def number_words() -> Iterator[AnswerPair]:
    for text, word, value in (
        ("5", "million", 10**6),
        ("2.5", "billion", 10**9),
        ("3", "thousand", 1000),
        ("7", "hundred", 100),
    ):
        total = Fraction(text) * value
        yield from compared(
            "number words",
            (
                (total, f"{text} {word}"),
                (total, str(int(total))),
                (total, rf"{text} \text{{ {word}}}"),
                (total, rf"{text}\text{{ {word} dollars}}"),
                (Fraction(text), text),
                (total * 1000, f"{int(total * 1000):,}"),
                (Fraction(text), rf"{text} \text{{ dollars}}"),
            ),
            ((Fraction(text), text), (total, f"{text} {word}")),
        )
    yield from compared(
        "number words",
        ((5 * 10**6, "5 million"), (5 * 10**9, "5 billion"), (5 * 10**6, "5,000,000"), (5 * 10**12, "5 trillion")),
        ((36, "36"), (36, "3 dozen"), (3, "3")),
        ((3, "3"), (36, "3 dozen"), (36, r"3\text{ dozen}")),
        ((2 * 10**12, "2 trillion"), (2 * 10**12, r"2 \times 10^{12}"), (2 * 10**9, "2 billion")),
        ((12, "12"), (12, "twelve"), (20, "twenty")),
        ((7, "seven"), (7, "7"), (70, "seventy")),
        ((5, "5"), (Fraction(5, 10), "5 tenths"), (Fraction(5, 100), r"5 \text{ hundredths}")),
        ((Fraction(3, 10), "0.3"), (Fraction(3, 10), "3 tenths"), (Fraction(3, 100), "3 hundredths")),
    )


def pairs() -> list[AnswerPair]:
    """Return the pairs of this file."""
    kinds = (
        integers,
        separators,
        fractions,
        mixed_numbers,
        decimals,
        repeating_decimals,
        percents,
        powers,
        brackets,
        scientific,
        number_words,
    )
    return [pair for kind in kinds for pair in kind()]
