r"""Answer pairs of functions, degrees, derivatives, and of marks on symbols.

In degrees: sin 30 = 1/2, cos 60 = 1/2, tan 45 = 1, sin 60 = \sqrt{3}/2, 180 degrees are \pi.
"""

from __future__ import annotations

from answer_pairs_form import AnswerPair, Case, written

DEGREES: list[Case] = [
    (
        r"90^\circ",
        ("90", "90°", r"\frac{\pi}{2}", r"90^{\circ}", r"90 \text{ degrees}"),
        (r"\pi", r"9^\circ", r"\frac{\pi}{90}"),
    ),
    (r"\frac{\pi}{2}", (r"90^\circ", r"\frac{\pi}{2} \text{ radians}"), ("90", r"2^\circ", r"180^\circ")),
    (
        r"\frac{1}{2}",
        (r"\sin 30^\circ", r"\cos 60^\circ", "sin 30°"),
        (r"\sin 60^\circ", r"\cos 30^\circ", r"30^\circ"),
    ),
    ("1", (r"\tan 45^\circ", r"\tan{45^\circ}"), (r"\cos 90^\circ", r"45^\circ")),
    (r"\frac{\sqrt{3}}{2}", (r"\sin 60^\circ", r"\cos 30^{\circ}"), (r"\sin 30^\circ", r"\tan 60^\circ")),
    ("0", (r"\cos 90^\circ", r"\sin 180^\circ"), (r"\sin 90^\circ",)),
    (r"45^\circ", (r"\frac{\pi}{4}", r"180^\circ - 135^\circ"), (r"\frac{\pi}{45}", r"4.5^\circ", r"-45^\circ")),
    (r"\pi", (r"180^\circ", "180°"), ("180", r"360^\circ")),
]

FUNCTIONS: list[Case] = [
    ("f(x)=x^2", ("x^2", "f(x) = x^2"), ("f(x)=x^3", "f(x)=2x")),
    ("e^x", (r"\exp(x)", "exp(x)", r"\exp x"), (r"e \cdot x", "x^e")),
    (r"\ln x", (r"\ln(x)", "ln(x)"), (r"\ln x^2", r"\lg x")),
    ("2", (r"\lg 100", r"\log_{10} 100", r"\log_2 4", r"\ln e^2"), (r"\lg 20", r"\log_2 100")),
    ("100", (r"10^{\lg 100}",), (r"\lg 100", r"\log_{10} 100")),
    ("1", (r"\sin^2 x + \cos^2 x", r"\ln e", r"\lg 10"), (r"\sin x + \cos x", r"\ln 10")),
    (r"2\sin x\cos x", (r"\sin 2x", r"\sin(2x)"), (r"2\sin x", r"\cos 2x")),
    (r"\arctan x", (r"\tan^{-1} x", r"\tan^{-1}(x)"), (r"\frac{1}{\tan x}", r"\tan x")),
    (r"\sin^2 x", (r"(\sin x)^2", r"1-\cos^2 x"), (r"\sin x^2", r"\sin 2x")),
    (r"\tan x", (r"\frac{\sin x}{\cos x}", "tan(x)"), (r"\frac{\cos x}{\sin x}", r"\tanh x")),
    (r"\ln 6", (r"\ln 2 + \ln 3", r"\ln(2 \cdot 3)"), (r"\ln 5", r"\ln 2 \cdot \ln 3")),
]

DERIVATIVES: list[Case] = [
    ("f'(x)", (r"f^{\prime}(x)", "f' (x)"), ("f(x)", "f''(x)")),
    ("y'=2x", ("y' = 2x", r"y^{\prime} = 2x"), ("y=2x", "y''=2x")),
    ("f'(x)=3x^2", ("f'(x) = 3x^2", r"f'(x)=3 \cdot x^2"), ("f''(x)=3x^2", "f'(x)=x^3")),
    ("x'", ("x^{\\prime}",), ("x", "x''", r"\dot{y}")),
    (r"\frac{dy}{dx}", (r"\dfrac{dy}{dx}", r"\frac{d y}{d x}"), (r"\frac{dx}{dy}", r"\frac{y}{x}")),
    (r"\frac{dy}{dx}=2x", (r"\frac{dy}{dx} = 2x", r"\dfrac{dy}{dx}=2x"), (r"\frac{dx}{dy}=2x", r"\frac{dy}{dx}=2y")),
    (
        r"\frac{\partial f}{\partial x}",
        (r"\dfrac{\partial f}{\partial x}", r"\frac{ \partial f }{ \partial x }"),
        (r"\frac{\partial f}{\partial y}", r"\frac{\partial x}{\partial f}"),
    ),
    ("y''+y=0", ("y'' + y = 0", r"y^{\prime\prime}+y=0"), ("y'+y=0", "y+y=0")),
    (r"\dot{x}", (r"\dot x",), ("x", r"\ddot{x}")),
    ("A'B'", ("A' B'",), ("AB", "A'B")),
    (r"\nabla f", (r"\nabla{f}",), ("f", r"\nabla g")),
]

MARKS: list[Case] = [
    (r"\bar{x}", (r"\bar x",), ("x", r"\hat{x}")),
    ("x_1", ("x_{1}",), ("x_2", "x")),
    ("a_{n+1}", ("a_{n + 1}",), ("a_n+1", "a_{n-1}")),
    ("A^T", ("A^{T}",), ("A", "A^{-1}")),
    ("|x|", (r"\left|x\right|", r"\lvert x \rvert"), ("x", "-x")),
    (r"\lfloor x \rfloor", (r"\left\lfloor x \right\rfloor",), (r"\lceil x \rceil", "x")),
    ("f^{(2)}(x)", ("f^{(2)} (x)",), ("f(x)", "f^2(x)")),
    (r"p \land q", (r"p\land q",), (r"p \lor q",)),
    ("n!", ("n(n-1)!",), ("n", "n!!")),
    (r"\binom{5}{2}", ("10", r"\frac{5!}{2! \cdot 3!}", r"\binom{5}{3}"), (r"\frac{5}{2}", "20")),
    ("120", ("5!", r"5 \cdot 4!"), ("5", r"\binom{5}{2}")),
    (r"\angle ABC", (r"\angle{ABC}",), (r"\angle ACB", r"\triangle ABC")),
    (r"\overline{AB}", (r"\overline {AB}",), (r"\overline{AC}",)),
    (r"P(A|B)", (r"P(A \mid B)", r"P(A\,|\,B)"), ("P(B|A)", r"P(A \cap B)")),
    (r"\alpha+\beta", (r"\beta+\alpha",), (r"\alpha-\beta", r"\alpha+\gamma")),
    (r"\mathbf{v}", (r"\mathbf v",), (r"\mathbf{w}",)),
    (r"\sum_{k=1}^{n} k", (r"\sum_{k=1}^n k",), (r"\prod_{k=1}^{n} k",)),
    (r"AB \parallel CD", (r"AB\parallel CD",), (r"AB \perp CD",)),
]

KINDS = {"degrees": DEGREES, "functions": FUNCTIONS, "derivatives": DERIVATIVES, "marks on symbols": MARKS}


def pairs() -> list[AnswerPair]:
    """Return the pairs of this file."""
    return [pair for kind, cases in KINDS.items() for pair in written(kind, cases)]
