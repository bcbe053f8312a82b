r"""Whole responses, a gold answer, and whether the response is right: where the answer stands, what stands around it.

Several boxes: the last one counts, but boxes with only a comma or a word like "and" between them are several answers.
"""

from __future__ import annotations

ResponsePair = tuple[str, str, bool]
"""A response, the gold answer, whether it is right."""

CUES: list[ResponsePair] = [
    ("We add them. The answer is 12.", "12", True),
    ("We add them. The answer is 12.", "1", False),
    ("The answer is: 1 1/2.", r"\frac{3}{2}", True),
    ("The answer is 1 1/2.", "1", False),
    ("The final answer is $\\frac{3}{4}$. I hope it is correct.", "0.75", True),
    ("The final answer is $\\frac{3}{4}$. I hope it is correct.", "3", False),
    ("The answers are 2 and 3.", "2, 3", True),
    ("The answers are 2 and 3.", "3", False),
    ("Answer: 45%", "0.45", True),
    ("Answer: 45%", "0.0045", False),
    ("**Final Answer:** $x = 7$", "7", True),
    ("**Final Answer:** $x = 7$", "-7", False),
    ("The answer is 1,234,567 people.", "1234567", True),
    ("The answer is 1,234,567 people.", "567", False),
    ("So the answer is (3, 4).", "(3,4)", True),
    ("So the answer is (3, 4).", "(4,3)", False),
    ("The answer is 5 million.", "5000000", True),
    ("The answer is 5 million.", "5", False),
    ("The answer is $2^{10}$.", "1024", True),
    ("The answer is $2^{10}$.", "2", False),
    ("I thought it was 3, but the answer is -3.", "-3", True),
    ("I thought it was 3, but the answer is -3.", "3", False),
]

BOXES: list[ResponsePair] = [
    (r"So we get \boxed{42}.", "42", True),
    (r"So we get \boxed{42}.", "4", False),
    (r"\boxed{3}. No, that is wrong, I forgot the sign and have to go back to the second line: \boxed{-3}", "-3", True),
    (r"\boxed{3}. No, that is wrong, I forgot the sign and have to go back to the second line: \boxed{-3}", "3", False),
    (r"The roots are \boxed{1} and \boxed{2}.", "1, 2", True),
    (r"The roots are \boxed{1} and \boxed{2}.", "2", False),
    (r"$\boxed{1}$, $\boxed{2}$", r"\{1, 2\}", True),
    (r"$\boxed{1}$, $\boxed{2}$", "12", False),
    (r"It is located between $\boxed{12\text{ and }13}$.", "12, 13", True),
    (r"It is located between $\boxed{12\text{ and }13}$.", "13", False),
    (r"\boxed{\text{The area is } 50}", "50", True),
    (r"\boxed{\text{The area is } 50}", "5", False),
    (r"Their sum is \boxed{x = \frac{-1 + \sqrt{5}}{2}}", r"\frac{\sqrt{5}-1}{2}", True),
    (r"Their sum is \boxed{x = \frac{-1 + \sqrt{5}}{2}}", r"\frac{\sqrt{5}}{2}", False),
    (r"\boxed{28} percent", r"28\%", True),
    (r"\boxed{28} percent", r"2.8\%", False),
    (r"\[ \boxed{[-4, 0]} \]", "[-4,0]", True),
    (r"\[ \boxed{[-4, 0]} \]", "(-4,0)", False),
    (r"<think>\boxed{9}</think> So it is \boxed{8}.", "8", True),
    (r"<think>\boxed{9}</think> So it is \boxed{8}.", "9", False),
    (r"$\boxed{\frac{1}{3}}.$ Here is why.", "1/3", True),
    (r"$\boxed{\frac{1}{3}}.$ Here is why.", "1", False),
    ("\\boxed{\n\\begin{pmatrix} 0 & 3 \\\\ 0 & -1 \\end{pmatrix}\n}", r"\begin{pmatrix}0&3\\0&-1\end{pmatrix}", True),
    ("\\boxed{\n\\begin{pmatrix} 0 & 3 \\\\ 0 & -1 \\end{pmatrix}\n}", r"\begin{pmatrix}0&3\\0&1\end{pmatrix}", False),
]

ENDINGS: list[ResponsePair] = [
    ("We multiply and get\n\\[\nx = 17\n\\]", "17", True),
    ("We multiply and get\n\\[\nx = 17\n\\]", "7", False),
    ("Therefore\n\n\\[\n\\frac{2}{3}\n\\]\n", r"\frac{4}{6}", True),
    ("Therefore\n\n\\[\n\\frac{2}{3}\n\\]\n", "2", False),
    ("Therefore\n$$\n\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}\n$$", r"\begin{pmatrix}1\\2\end{pmatrix}", True),
    ("Therefore\n$$\n\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}\n$$", r"\begin{pmatrix}2\\1\end{pmatrix}", False),
    ("The area is 50 m²", "50", True),
    ("The area is 50 m²", "2", False),
    ("The area is 50 m².", r"50 \text{ m}^2", True),
    ("The volume is 8 cm³", "3", False),
    ("#### 50 m²", "50", True),
    ("#### 50 m²", "2", False),
    ("#### ½", "0.5", True),
    ("#### ½", "2", False),
    ("#### 1,250", "1250", True),
    ("#### 1,250", "250", False),
    ("She has 3 bags with 4 apples each, so 3 * 4 = 12 apples.", "12", True),
    ("She has 3 bags with 4 apples each, so 3 * 4 = 12 apples.", "4", False),
    ("Hence $a + b = 10$ and $ab = 21$, so $|a - b| = 4$.", "4", True),
    ("Hence $a + b = 10$ and $ab = 21$, so $|a - b| = 4$.", "21", False),
    ("So it costs $7.50.", "7.5", True),
    ("So it costs $7.50.", "50", False),
    ("In total that makes 2/3.", r"\frac{2}{3}", True),
    ("In total that makes 2/3.", "3", False),
    (r"The probability is $\frac{5}{36}.$", "5/36", True),
    (r"The probability is $\frac{5}{36}.$", "36", False),
    ("The temperature falls to -7", "-7", True),
    ("The temperature falls to -7", "7", False),
    ("This makes 3 1/2", "3.5", True),
    ("This makes 3 1/2", "0.5", False),
]

KINDS = {"cues": CUES, "boxes": BOXES, "endings": ENDINGS}
