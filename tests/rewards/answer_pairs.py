r"""Pairs of mathematical answers whose equality is known by construction, for `math_rule`.

Each file `answer_pairs_*.py` holds some kinds. Numbers are computed (`answer_pairs_numbers.py`): a spelling is built
together with its exact value, and two spellings are equal when their values are. The other kinds are written by hand as
`(gold, equal answers, unequal answers)`; an unequal answer is one that a careless reader takes for the gold.

Conventions:
* A unit is ignored when one side has none (`5 cm`, `5`). Two different units differ (`5 km`, `5 m`; `5 cm`, `5 cm^2`;
  am, pm; Celsius, Fahrenheit), names and abbreviations of the same unit don't. A word that multiplies is no unit:
  `5 million` isn't 5.
* Commas without brackets, and braces, make a set of answers (`B, D, A, C` too); parentheses make an ordered tuple.
* `50%` equals 0.5 and 50. `90^\circ` equals 90 and \pi/2.
* `5(2)` is 10, `-2^2` is -4, `1/2x` is x/2.
* `\lg` is the logarithm to base 10, `\ln` and `\exp` belong to e. `\sin^{-1}` is the inverse function.
* `x = 5` and `f(x) = 5` state 5. A lone constant `+C` may be small or capital; other letters keep their case.

Left out, since honest mathematicians disagree or the question decides:
* rounded decimals (0.33 for 1/3 is wrong, 0.333333 is a matter of tolerance), the decimal comma;
* conversions of units, currencies and clocks (1 km and 1000 m, `$0.50` and 50 cents, 17:00 and 5 pm);
* a numeral and its value in another base, a numeral without its base; proportional ratios, a ratio and its quotient;
* residues that differ by the modulus; `3 \pmod 7` and 3; a vector as row, column, tuple and sum of unit vectors;
* `x = 5` against `y = 5`, a function's or variable's other name, `x^2 + C` against `x^2`;
* multisets (`1, 1, 2`), `(1, 2)` against `1, 2`;
* `\sin 30` without a degree sign, `\log` without a base, `5m` without a blank (metres or a product);
* `\overline{AB}` or `\vec{v}` against the bare letters, R against \mathbb{R}, `3+4i` against the point (3, 4);
* Yes against True, "no solution" against the empty set, "all real numbers" against \mathbb{R}.
"""

from __future__ import annotations

import answer_pairs_algebra
import answer_pairs_collections
import answer_pairs_functions
import answer_pairs_numbers
import answer_pairs_orders
import answer_pairs_words
from answer_pairs_form import AnswerPair

FILES = (
    answer_pairs_numbers,
    answer_pairs_algebra,
    answer_pairs_functions,
    answer_pairs_orders,
    answer_pairs_collections,
    answer_pairs_words,
)


def answer_pairs() -> list[AnswerPair]:
    """Return all pairs, kind by kind."""
    return [pair for file in FILES for pair in file.pairs()]
