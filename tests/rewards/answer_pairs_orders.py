"""Answer pairs of intervals, inequalities, ratios, moduli, bases, and sequences, whose order counts."""

from __future__ import annotations

from answer_pairs_form import AnswerPair, Case, written

INTERVALS: list[Case] = [
    (r"[3,\infty)", (r"x \geq 3", r"[3, +\infty)", "[3, ∞)"), (r"(3,\infty)", r"x > 3", r"(-\infty,3]")),
    ("[-2, 2]", (r"-2 \leq x \leq 2", r"\left[-2,2\right]", r"x \in [-2,2]"), ("[-2,2)", r"-2 < x < 2", "[2,-2]")),
    (r"(0,1) \cup (1,2)", (r"(1,2) \cup (0,1)", r"(0, 1) ∪ (1, 2)"), ("(0,2)", r"(0,1) \cap (1,2)")),
    (r"[\frac{1}{2}, 1)", ("[0.5, 1)", "[1/2, 1[", r"\frac{1}{2} \le x < 1"), (r"[\frac{1}{2}, 1]", "[0.2, 1)")),
    (r"(-\infty, 4)", ("x < 4", "4 > x", "(-∞, 4)"), (r"(-\infty, 4]", "(4, \\infty)", "x > 4")),
    ("[0, 3]", (r"[0,2] \cup [1,3]", "[0;3]"), (r"[0,2] \cap [1,3]", "[0,2]", "3")),
]

INEQUALITIES: list[Case] = [
    (r"x \geq 3", (r"[3,\infty)", r"3 \leq x", "x>=3", r"x \geqslant 3"), ("x > 3", r"x \leq 3", "x = 3")),
    ("x > 3", ("3 < x", r"(3,\infty)", "2x > 6", r"x \gt 3"), (r"x \geq 3", "3 > x", "x > -3")),
    (r"-2 \leq x \leq 2", ("[-2,2]", r"2 \geq x \geq -2", "-2 ≤ x ≤ 2"), (r"-2 \leq x < 2", r"x \leq 2", r"(-2,2)")),
    (
        r"x < -1 \text{ or } x > 4",
        (r"(-\infty,-1) \cup (4,\infty)", r"x > 4 \text{ or } x < -1", "x<-1 or x>4"),
        (r"-1 < x < 4", r"x < -1 \text{ and } x > 4", "x > 4"),
    ),
    (r"x \neq 2", (r"x \ne 2", "x ≠ 2", "x != 2"), ("x = 2", r"x \neq -2", "2")),
    (r"0 < x \leq 1", ("(0,1]", r"x \in (0,1]", "0<x<=1"), ("(0,1)", r"0 \leq x \leq 1")),
    (r"a < b < c", ("c > b > a",), ("a < c < b",)),
]

RATIOS: list[Case] = [
    ("1:2:3", ("1 : 2 : 3", "1: 2: 3", r"1\!:\!2\!:\!3", r"1{:}2{:}3"), ("1:3:2", "1:2", "1:2:4")),
    (
        "2:3",
        ("2 : 3", r"2\colon 3", r"2 \, : \, 3", "2 to 3", r"2 \text{ to } 3", "$2:3$"),
        ("3:2", "23", "2.3", "3 to 2"),
    ),
    ("5:7", ("5: 7", "(5:7)", r"\text{5:7}"), ("7:5", "5", "57")),
    (r"\sqrt{2}:1", (r"\sqrt{2} : 1", r"\sqrt{2}\,:\,1", r"\sqrt2:1"), (r"1:\sqrt{2}", "2:1", r"\sqrt{2}:2")),
    ("a:b", ("a : b",), ("b:a", "a:c", "ab")),
    ("3:4:5", ("3 : 4 : 5", "3 to 4 to 5"), ("5:4:3", "3:4", "345")),
]

MODULI: list[Case] = [
    (
        r"x \equiv 3 \pmod{7}",
        (
            r"x\equiv 3\pmod 7",
            r"x \equiv 3 \mod 7",
            "x ≡ 3 (mod 7)",
            r"x \equiv 3 \bmod 7",
            r"3 \pmod{7}",
            r"x \equiv 3 \ (\text{mod } 7)",
        ),
        (
            r"x \equiv 3 \pmod{5}",
            r"x \equiv 5 \pmod{7}",
            r"x \equiv -3 \pmod{7}",
            r"x \equiv 7 \pmod{3}",
            r"x \not\equiv 3 \pmod{7}",
        ),
    ),
    (
        r"2 \pmod{5}",
        (r"2 \pmod 5", r"2\ (\text{mod}\ 5)", r"2 \mod 5", r"2 \mod{5}", "2 mod 5"),
        (r"2 \pmod{6}", r"5 \pmod{2}", "25"),
    ),
    (
        r"n \equiv 1, 4 \pmod{6}",
        (r"n \equiv 1,4 \pmod 6", r"n \equiv 4, 1 \pmod{6}"),
        (r"n \equiv 1, 4 \pmod{5}", r"n \equiv 1 \pmod{6}"),
    ),
    (
        r"a^2 \equiv 1 \pmod{p}",
        (r"a^2\equiv 1 \pmod p", r"a^{2} \equiv 1 \pmod{p}"),
        (r"a^2 \equiv 1 \pmod{q}", r"a \equiv 1 \pmod{p}"),
    ),
    (r"0 \pmod{11}", (r"0 \pmod {11}", r"0 \mod 11"), (r"0 \pmod{1}", r"1 \pmod{11}", "11")),
]

BASES: list[Case] = [
    ("10_2", ("10_{2}", "(10)_2", r"10_{\text{two}}", "10₂"), ("10_3", "11_2", "10_{20}", "102")),
    (
        "1011_2",
        ("1011_{2}", "(1011)_{2}", r"1011_{\text{two}}", "1011₂"),
        ("1011_3", "1101_2", "10112", "1011_{20}", "101_2"),
    ),
    (r"245_8", ("245_{8}", "(245)_8", r"245_{\text{eight}}"), ("245_7", "254_8", "2458", "245_{16}")),
    (r"\text{1F}_{16}", ("1F_{16}", "1f_{16}", r"\mathrm{1F}_{16}"), (r"\text{1E}_{16}", "1F_{15}", "1F_{18}")),
    ("2012_3", ("2012_{3}", "(2012)_3"), ("2012_4", "2102_3", "212_3", "2012_{13}")),
]

SEQUENCES: list[Case] = [
    ("(2,3,5)", ("(2, 3, 5)", r"\left(2,3,5\right)"), ("(5,3,2)", "(2,5,3)", r"\{2,3,5\}")),
    ("(a,b,c)", ("(a, b, c)",), ("(a,c,b)", "(c,b,a)", "abc")),
    (r"A \to B \to C", (r"A\to B\to C", r"A \rightarrow B \rightarrow C"), (r"A \to C \to B",)),
    ("BADC", (r"\text{BADC}",), ("ABCD", "BACD")),
    (r"\text{LISTEN}", ("LISTEN",), ("SILENT", r"\text{SILENT}")),
    (r"1, 2, 4, 8, \ldots", (r"1,2,4,8,\ldots", r"1, 2, 4, 8, \dots", "1, 2, 4, 8, ..."), ("1, 2, 4, 8",)),
    ("a_n=2n+1", ("2n+1", "a_{n} = 2n+1"), ("a_{n+1}=2n-1", "a_n=n+2")),
    ("2^{n-1}", (r"\frac{2^n}{2}", r"\frac{1}{2} \cdot 2^n"), ("2^n-1", "2n-1")),
    (r"a>b>c", ("c<b<a",), ("b>a>c", "c>b>a")),
    (r"(1, \frac{1}{2})", ("(1, 1/2)",), (r"(\frac{1}{2}, 1)",)),
]

KINDS = {
    "intervals": INTERVALS,
    "inequalities": INEQUALITIES,
    "ratios": RATIOS,
    "moduli": MODULI,
    "bases": BASES,
    "sequences": SEQUENCES,
}


def pairs() -> list[AnswerPair]:
    """Return the pairs of this file."""
    return [pair for kind, cases in KINDS.items() for pair in written(kind, cases)]
