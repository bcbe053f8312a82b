"""Answer pairs of sets, tuples, vectors, matrices and several answers at once."""

from __future__ import annotations

from answer_pairs_form import AnswerPair, Case, written

SETS: list[Case] = [
    (r"\{1,2\}", (r"\{2,1\}", r"\left\{1, 2\right\}", "1, 2", r"\lbrace 1,2 \rbrace"), ("(1,2)", "[1,2]", r"\{12\}")),
    (r"\varnothing", (r"\emptyset", r"\{\}", "∅", r"\{ \}"), (r"\{0\}", r"\{\emptyset\}", "0")),
    (
        r"\{x \mid x > 3\}",
        (r"\{x : x > 3\}", r"(3,\infty)", r"\{x \in \mathbb{R} \mid x > 3\}"),
        (r"\{x \mid x \geq 3\}", r"\{3\}"),
    ),
    (r"\mathbb{R}", (r"(-\infty,\infty)", "ℝ", r"(-\infty, +\infty)"), (r"\mathbb{Q}", r"(0,\infty)")),
    (
        r"\mathbb{R} \setminus \{0\}",
        (r"(-\infty,0) \cup (0,\infty)", r"\mathbb{R}\setminus\{0\}"),
        (r"\mathbb{R}", r"\mathbb{R} \setminus \{1\}"),
    ),
    (r"A \times B", (r"A\times B", "A × B"), (r"B \times A",)),
    (r"\{\{1\}\}", (r"\{ \{1\} \}",), (r"\{1\}",)),
    (r"A \cup B", (r"A\cup B", "A ∪ B"), (r"A \cap B", r"A \setminus B")),
    (r"\{\frac{1}{2}, 3\}", (r"\{0.5, 3\}", r"\{3, 1/2\}"), (r"\{\frac{1}{2}\}", r"\{\frac{1}{3}, 2\}")),
    (r"\{(1,2),(3,4)\}", (r"\{(3,4),(1,2)\}",), (r"\{(2,1),(3,4)\}", r"\{1,2,3,4\}")),
    (r"\{-1,0,1\}", (r"\{0, \pm 1\}", r"\{1,0,-1\}"), (r"\{0,1\}",)),
]

TUPLES: list[Case] = [
    ("(1,2)", ("(1, 2)", r"\left(1,2\right)", "(x,y)=(1,2)", "( 1 , 2 )"), ("(2,1)", "(1,3)", "12", "(12)")),
    (
        r"(\frac{1}{2}, -3)",
        ("(0.5, -3)", "(1/2,-3)", r"\left(\dfrac{1}{2}, -3\right)"),
        (r"(-3, \frac{1}{2})", r"(\frac{1}{2}, 3)"),
    ),
    ("(1,2,3)", ("(1, 2, 3)", "(x,y,z) = (1,2,3)", r"(1,\,2,\,3)"), ("(1,3,2)", "(1,2)", "123")),
    ("(1,234)", ("(1, 234)",), ("1234", "1,234", "(1234)")),
    (
        "(1,2),(3,4)",
        ("(3,4),(1,2)", "(1, 2), (3, 4)", r"(1,2) \text{ and } (3,4)", r"(1,2), \; (3,4)"),
        ("(1,2)", "(1,3),(2,4)", "(2,1),(4,3)", "(1,2,3,4)"),
    ),
    (
        r"(3, \frac{\pi}{2})",
        (r"(3, \pi/2)", r"\left( 3, \frac{\pi}{2} \right)"),
        (r"(\frac{\pi}{2}, 3)", r"(3, \frac{2}{\pi})"),
    ),
    ("(a+1,b)", ("(1+a, b)",), ("(a,b+1)", "(b,a+1)")),
]

VECTORS: list[Case] = [
    (
        r"\langle 1,2,3\rangle",
        (r"\langle 1, 2, 3 \rangle", r"\left\langle 1,2,3 \right\rangle", r"\langle 1,2,\frac{6}{2}\rangle"),
        (r"\langle 1,2,4\rangle", r"\langle 3,2,1\rangle", r"\langle 1,2\rangle"),
    ),
    (
        r"2\mathbf{i}-\mathbf{j}",
        (r"2 \mathbf{i} - \mathbf{j}", r"-\mathbf{j}+2\mathbf{i}", r"2\mathbf i - \mathbf j"),
        (r"2\mathbf{i}+5\mathbf{j}", r"2\mathbf{i}+\mathbf{j}", r"\mathbf{i}-2\mathbf{j}", r"2\mathbf{i}-\mathbf{k}"),
    ),
    (
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        (
            r"\begin{pmatrix}1\\2\end{pmatrix}",
            r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}",
            r"\left(\begin{array}{c} 1 \\ 2 \end{array}\right)",
        ),
        (
            r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}",
            r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}",
            r"\begin{pmatrix} 1 \\ 2 \\ 0 \end{pmatrix}",
        ),
    ),
    (
        r"\hat{i}+3\hat{k}",
        (r"\hat{i} + 3 \hat{k}", r"3\hat{k}+\hat{i}"),
        (r"\hat{i}+3\hat{j}", r"3\hat{i}+\hat{k}", r"\hat{i}-3\hat{k}"),
    ),
    (
        r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}",
        (r"\begin{bmatrix}-7\\16\\5\end{bmatrix}", r"\begin{pmatrix} -7 \\ 4^2 \\ 5 \end{pmatrix}"),
        (r"\begin{pmatrix} 7 \\ 16 \\ 5 \end{pmatrix}", r"\begin{pmatrix} -7 \\ 5 \\ 16 \end{pmatrix}"),
    ),
    (
        r"\langle \frac{1}{2}, 0 \rangle",
        (r"\langle 0.5, 0 \rangle", r"\langle 1/2, 0 \rangle"),
        (r"\langle 0, \frac{1}{2} \rangle",),
    ),
    (
        r"\mathbf{a}\times\mathbf{b}",
        (r"\mathbf{a} \times \mathbf{b}",),
        (r"\mathbf{b}\times\mathbf{a}", r"\mathbf{a}\cdot\mathbf{b}"),
    ),
    (r"\vec{u}\cdot\vec{v}", (r"\vec{u} \cdot \vec{v}",), (r"\vec{u}\times\vec{v}",)),
    (r"\vec{a}+\vec{b}", (r"\vec{a} + \vec{b}", r"\vec a + \vec b"), (r"\vec{a}-\vec{b}", r"\vec{a}+\vec{c}")),
]

MATRICES: list[Case] = [
    (
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        (
            r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}",
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
            r"\frac{1}{2}\begin{pmatrix} 2 & 4 \\ 6 & 8 \end{pmatrix}",
            r"\left(\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}\right)",
        ),
        (
            r"\begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}",
            r"\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}",
            r"\begin{pmatrix} 3 & 4 \\ 1 & 2 \end{pmatrix}",
            r"\begin{pmatrix} 1 & 2 & 3 & 4 \end{pmatrix}",
            "1234",
        ),
    ),
    (
        r"\begin{pmatrix} 0 & \frac{1}{2} \\ -1 & 0 \end{pmatrix}",
        (
            r"\begin{pmatrix} 0 & 1/2 \\ -1 & 0 \end{pmatrix}",
            r"\begin{pmatrix} 0 & 0.5 \\ -1 & 0 \end{pmatrix}",
            r"\begin{bmatrix} 0 & \dfrac12 \\ -1 & 0 \end{bmatrix}",
        ),
        (
            r"\begin{pmatrix} 0 & \frac{1}{2} \\ 1 & 0 \end{pmatrix}",
            r"\begin{pmatrix} 0 & -1 \\ \frac{1}{2} & 0 \end{pmatrix}",
            r"\begin{pmatrix} 0 & 2 \\ -1 & 0 \end{pmatrix}",
        ),
    ),
    (
        r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}",
        (r"\begin{bmatrix} a & b \\ c & d \end{bmatrix}", r"\begin{pmatrix}a&b\\c&d\end{pmatrix}"),
        (r"\begin{pmatrix} a & c \\ b & d \end{pmatrix}", r"\begin{pmatrix} d & -b \\ -c & a \end{pmatrix}", "ad-bc"),
    ),
    (
        r"\begin{pmatrix} 2 & 0 \\ 0 & 2 \end{pmatrix}",
        (r"2\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}", r"\begin{bmatrix}2&0\\0&2\end{bmatrix}"),
        (
            "2",
            r"\begin{pmatrix} 0 & 2 \\ 2 & 0 \end{pmatrix}",
            r"\begin{pmatrix} 2 & 0 & 0 \\ 0 & 2 & 0 \end{pmatrix}",
            r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}",
        ),
    ),
    (
        r"\begin{pmatrix} x & 1 \\ 0 & x^2 \end{pmatrix}",
        (r"\begin{pmatrix} x & 1 \\ 0 & x \cdot x \end{pmatrix}", r"\begin{bmatrix} x&1\\0&x^2 \end{bmatrix}"),
        (r"\begin{pmatrix} x & 1 \\ 0 & 2x \end{pmatrix}", r"\begin{pmatrix} x & 0 \\ 1 & x^2 \end{pmatrix}"),
    ),
]

SEVERAL: list[Case] = [
    (
        "2, 3",
        ("3, 2", "2 and 3", r"2 \text{ and } 3", r"\{2,3\}", r"2 \text{ or } 3"),
        ("2", "5", "2, 3, 4", "23", "2.3"),
    ),
    ("x=2, x=3", ("2, 3", "x=3, x=2", r"x=2 \text{ or } x=3", "x = 2 or x = 3"), ("x=2", "x=2, x=-3", "x=23")),
    (r"\pm 2", ("2, -2", r"-2 \text{ or } 2", r"\{-2,2\}", "±2", r"x = \pm 2"), ("2", r"\pm 4")),
    (
        r"1 \pm \sqrt{2}",
        (r"1+\sqrt{2}, 1-\sqrt{2}", r"1-\sqrt{2} \text{ and } 1+\sqrt{2}", r"x = 1 \pm \sqrt{2}"),
        (r"1+\sqrt{2}", r"-1 \pm \sqrt{2}"),
    ),
    ("x=1, y=2", ("y=2, x=1", r"x=1 \text{ and } y=2", r"x = 1, \; y = 2"), ("x=2, y=1", "x=1")),
    (
        r"\frac{1}{2}, 4",
        ("4, 0.5", "1/2 and 4", r"\frac{1}{2} \text{ and } 4"),
        (r"\frac{1}{4}, 2", "2", r"\frac{1}{2}"),
    ),
    ("A, B, C, D", ("B, D, A, C",), ("A, B, C", "ABCD")),
    ("1, 4, 9", ("1, 4, and 9", r"1, 4, \text{ and } 9", "9, 4, 1"), ("1, 4", "149", "14")),
]

KINDS = {"sets": SETS, "tuples": TUPLES, "vectors": VECTORS, "matrices": MATRICES, "several answers": SEVERAL}


def pairs() -> list[AnswerPair]:
    """Return the pairs of this file."""
    return [pair for kind, cases in KINDS.items() for pair in written(kind, cases)]
