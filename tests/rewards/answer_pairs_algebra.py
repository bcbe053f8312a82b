"""Answer pairs of algebra: roots, surds, slopes, letters of both cases, complex numbers, equations, plain text."""

from __future__ import annotations

from answer_pairs_form import AnswerPair, Case, written

ROOTS: list[Case] = [
    (
        r"\sqrt{2}",
        ("√2", r"\sqrt2", r"2^{1/2}", "sqrt(2)", r"\sqrt[2]{2}"),
        ("2", "4", r"\sqrt[3]{2}", r"\sqrt{20}", r"-\sqrt{2}"),
    ),
    ("3", (r"\sqrt{9}", r"\sqrt[3]{27}", "√9", r"81^{1/4}"), (r"\sqrt{3}", r"\sqrt[3]{9}", r"\pm 3", r"\sqrt{27}")),
    (r"\sqrt[3]{5}", (r"5^{\frac{1}{3}}", r"\sqrt[3]5", "∛5"), (r"\sqrt{5}", r"3\sqrt{5}", r"\frac{5}{3}", r"5^3")),
    (r"\sqrt{\frac{1}{4}}", (r"\frac{1}{2}", "0.5"), (r"\frac{1}{4}", r"\frac{1}{16}")),
    ("-2", (r"\sqrt[3]{-8}", r"-\sqrt{4}"), (r"\sqrt{4}", r"\sqrt[3]{8}")),
    (r"x\sqrt{3}", (r"\sqrt{3}x", r"\sqrt{3} \cdot x"), (r"\sqrt{3x}", "3x")),
]

SURDS: list[Case] = [
    (
        r"2\sqrt{3}",
        (r"\sqrt{12}", r"\sqrt{3} \cdot 2", "2√3", r"\frac{6}{\sqrt{3}}"),
        (r"3\sqrt{2}", r"\sqrt{6}", r"\sqrt{23}", "2"),
    ),
    (
        r"\frac{\sqrt{2}}{2}",
        (r"\frac{1}{\sqrt{2}}", r"\sqrt{\frac{1}{2}}", r"\sqrt{2}/2"),
        (r"\frac{2}{\sqrt{2}}", r"\frac{1}{2}", r"\sqrt{2}"),
    ),
    (
        r"1+\sqrt{5}",
        (r"\sqrt{5}+1", "1 + √5", r"\frac{4}{\sqrt{5}-1}"),
        (r"\sqrt{6}", r"1-\sqrt{5}", r"\frac{1+\sqrt{5}}{2}"),
    ),
    # (sqrt 2 + sqrt 3)^2 = 5 + 2 sqrt 6
    (
        r"\sqrt{5+2\sqrt{6}}",
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{3}+\sqrt{2}"),
        (r"\sqrt{5}", r"5+2\sqrt{6}", r"\sqrt{5-2\sqrt{6}}"),
    ),
    (r"5\sqrt{2}", (r"\sqrt{50}", r"\sqrt{2}+4\sqrt{2}"), ("5", r"\sqrt{10}", r"\sqrt{52}")),
]

SLOPES: list[Case] = [
    (
        r"y=-\frac{3}{4}x+2",
        ("y=-3/4x+2", "y = -(3/4)x + 2", r"y=-\dfrac{3x}{4}+2"),
        (r"y=-\frac{3}{4x}+2", r"y=-\frac{4}{3}x+2"),
    ),
    (r"\frac{x}{2}", ("1/2x", "x/2", "0.5x", r"\frac12 x"), (r"\frac{1}{2x}", "1/(2x)", r"\frac{2}{x}")),
    (r"\frac{1}{2x}", ("1/(2x)", r"\frac{1}{2} \cdot \frac{1}{x}"), ("1/2x", r"\frac{x}{2}")),
    (r"\frac{2\pi}{3}", (r"2/3\pi", r"\frac{2}{3}\pi", "2π/3"), (r"\frac{2}{3\pi}", r"2/(3\pi)", r"\frac{3\pi}{2}")),
    (r"\frac{\sqrt{3}}{2}", (r"1/2\sqrt{3}", r"\frac12\sqrt3"), (r"\frac{1}{2\sqrt{3}}", r"1/(2\sqrt{3})")),
    (r"\frac{2}{3}x+1", ("2/3x+1", "2x/3 + 1"), (r"\frac{2}{3x}+1", "2/(3x) + 1", r"\frac{2x+1}{3}")),
]

LETTERS: list[Case] = [
    (r"\pi R^2", (r"\pi \cdot R^2", r"R^2\pi"), (r"\pi r^2", r"\pi R", r"2\pi R")),
    ("F=ma", ("F = am", r"F = m \cdot a"), ("f=MA", "F=Ma", "F=mA")),
    (
        r"\frac{GMm}{r^2}",
        (r"\frac{G m M}{r^2}", r"G\frac{Mm}{r^2}"),
        (r"\frac{Gm^2}{r^2}", r"\frac{GMm}{R^2}", r"\frac{GM^2}{r^2}"),
    ),
    ("A+a", ("a+A",), ("2a", "2A")),
    (r"\frac{R-r}{2}", (r"\frac{1}{2}(R-r)", r"\frac{R}{2}-\frac{r}{2}"), ("0", r"\frac{r-R}{2}")),
    ("x^2+C", ("x^2+c", "x^2 + C"), ("X^2+C", "2x+C")),
    ("Nn", (r"n \cdot N",), ("n^2", "N^2")),
    ("a^2+A^2", ("A^2+a^2",), ("2a^2", "2A^2")),
    (r"3\Delta", (r"\Delta \cdot 3",), (r"3\delta",)),
    (r"2\Omega", (r"\Omega + \Omega",), (r"2\omega",)),
    ("V=IR", ("V = RI",), ("v=ir", "V=Ir")),
]

COMPLEX: list[Case] = [
    ("-1", ("i^2", "e^{i\\pi}", r"i \cdot i"), ("i", "i^4", "-i")),
    ("2i", (r"(1+i)^2", "i + i", r"\sqrt{-4}", "2 i"), ("2", "-2i", "i^2")),
    ("3+4i", ("4i+3", "3 + 4 i", r"3+4\mathrm{i}"), ("3-4i", "4+3i", "7")),
    ("-i", (r"\frac{1}{i}", "i^3", "-1i"), ("i", "1", "i^5")),
    (
        r"\frac{1-i}{2}",
        (r"\frac{1}{1+i}", r"\frac{1}{2}-\frac{1}{2}i", r"\frac12 - \frac{i}{2}"),
        (r"\frac{1+i}{2}", r"\frac{1}{1-i}"),
    ),
    ("5", ("|3+4i|", "(2+i)(2-i)"), ("3+4i", "(2+i)^2")),
    (r"1+i\sqrt{3}", (r"1+\sqrt{3}i", r"2e^{i\pi/3}"), (r"1-i\sqrt{3}", r"\sqrt{3}+i")),
]

EQUATIONS: list[Case] = [
    ("y=2x+1", ("y = 1 + 2x", "y=2x+1.", "2x - y + 1 = 0"), ("y=2x-1", "y=x+1", "y=-2x+1")),
    ("x^2+y^2=25", ("y^2+x^2=25", "x^2+y^2-25=0", "x^2 + y^2 = 5^2"), ("x^2+y^2=5", "x^2+y^2")),
    ("3x-4y+5=0", ("-3x+4y-5=0", "6x-8y+10=0", "5+3x-4y=0"), ("3x+4y+5=0", "3x-4y-5=0", "4x-3y+5=0")),
    ("x=5", ("5", "x = 5.0", "5 = x"), ("x=-5", "x \\neq 5", "x=5y")),
    ("xy=6", ("yx = 6", "xy-6=0"), ("x=6", "xy=-6", "x+y=6")),
    ("ab=c", ("ba = c",), ("ac=b", "ab")),
]

POLYNOMIALS: list[Case] = [
    ("x^2+2x+1", ("(x+1)^2", "1+2x+x^2", "(x+1)(x+1)", "x(x+2)+1"), ("x^2+2x-1", "(x-1)^2", "x^2+1", "x^2+2x")),
    (
        "(x-2)(x+3)",
        ("(x+3)(x-2)", "x^2+x-6", r"\left(x-2\right)\left(x+3\right)"),
        ("(x+2)(x-3)", "x^2-x-6", "x^2+x+6"),
    ),
    (
        r"\frac{x+1}{x-1}",
        (r"\frac{-x-1}{1-x}", "(x+1)/(x-1)", r"1+\frac{2}{x-1}"),
        ("x+1/x-1", r"\frac{x-1}{x+1}", r"\frac{x+1}{1-x}"),
    ),
    ("6xy", ("6yx", r"2x \cdot 3y", "6 x y"), ("6x+y", "6x^2y", "6x", "6")),
    ("a^3-b^3", ("(a-b)(a^2+ab+b^2)", "-b^3+a^3"), ("(a-b)^3", "b^3-a^3", "a^3+b^3")),
]

TYPED: list[Case] = [
    (r"\frac{\pi}{2}", ("pi/2", "π/2", "0.5*pi"), ("2/pi", "2*pi")),
    (r"2\pi", ("2*pi", "2pi", "2π"), ("2", "pi**2")),
    ("e^2", ("exp(2)", "e**2", "e^(2)"), ("2e", "exp(1/2)", "ln(2)")),
    (r"\ln 2", ("ln(2)", "ln 2"), ("exp(2)", "2")),
    ("x^2", ("x**2", "x*x", "x²"), ("x*2", "x2")),
    (r"\sqrt{x+1}", ("sqrt(x+1)", "(x+1)^(1/2)"), ("sqrt(x)+1", "x+1")),
    (r"\frac{x+1}{2}", ("(x+1)/2", "0.5(x+1)"), ("x+1/2", "(x+1)*2")),
    (r"3x^2-2x", ("3*x**2-2*x", "3x^2 - 2x", "x*(3*x-2)"), ("3*x*2-2*x", "(3*x)**2-2*x")),
    ("12", ("3*4", "3×4"), ("3**4", "34")),
]

KINDS = {
    "roots": ROOTS,
    "surds": SURDS,
    "slopes": SLOPES,
    "letters of both cases": LETTERS,
    "complex numbers": COMPLEX,
    "equations": EQUATIONS,
    "polynomials": POLYNOMIALS,
    "plain text formulas": TYPED,
}


def pairs() -> list[AnswerPair]:
    """Return the pairs of this file."""
    return [pair for kind, cases in KINDS.items() for pair in written(kind, cases)]
