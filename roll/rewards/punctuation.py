"""Leaving out the punctuation of a text, but not what changes a number or joins two words."""

from __future__ import annotations

import re
import string
import unicodedata

_DASHES = str.maketrans(dict.fromkeys("−‐‑‒–", "-") | {"’": "'", "‘": "'"})
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_ACRONYM = re.compile(r"(?<![^\W\d_])(?:[^\W\d_]\.){2,}(?:[^\W\d_](?![^\W_]))?")
_EXPONENT = re.compile(r"(\d[eE])\+(?=\d)")
_POWER = re.compile(r"(?<=[\w)])\*\*(?=[\w(])")
_CURRENCY = re.compile(r"\$(?=\s?-?[\d.])|(?<=[-+])\$|(?<=\d)\$")
_BETWEEN = "/=^*|&~@_"
"""Kept between two letters or digits."""
_AFTER_OPERATOR = re.compile(rf"(?<=\w[{re.escape(_BETWEEN)}:+-]) (?=\w)|(?<=[<>]) (?=[\w.-])")


def without_punctuation(text: str) -> str:
    """Return a text without punctuation, runs of white space as one space.

    Kept are signs, decimal points, and what stands between the digits of fractions, times, ratios, ranges and dates;
    operators between letters or digits (`a-b`, `x=5`, `R&D`); `%`, `<` and `>` at a number; `C++`, `C#`. Other
    punctuation separates like a space, except apostrophes, commas of thousands and the dots of `U.S.A.`
    """
    text = _POWER.sub("^", _CURRENCY.sub("", text.translate(_DASHES)))
    text = _EXPONENT.sub(r"\1", _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text))
    text = _ACRONYM.sub(lambda match: match[0].replace(".", ""), text)
    text = f"  {' '.join(text.split())}  "
    characters: list[str] = []
    for position in range(2, len(text) - 2):
        character = text[position]
        if character.isalnum() or character == " " or not _is_punctuation(character):
            characters.append(character)
        elif _carries_meaning(text, position):
            if characters and characters[-1] == " " and not _is_sign(text, position):
                characters.pop()
            characters.append(character)
        else:
            characters.append("" if character == "'" else " ")
    return _AFTER_OPERATOR.sub("", " ".join("".join(characters).split()))


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


def _is_sign(text: str, position: int) -> bool:
    """Return whether a minus belongs to the number after it, or a comparison to what it compares with."""
    return text[position] in "-<>" and not text[position - 1].isalnum() and text[position + 1] != " "


def _carries_meaning(text: str, position: int) -> bool:
    """Return whether this punctuation mark is part of a number, a formula or a name."""
    character, left, right = text[position], text[position - 1], text[position + 1]
    before = left if left != " " else text[position - 2]
    after = right if right != " " else text[position + 2]
    spaced_alike = (left == " ") == (right == " ")
    if character == ".":
        return right.isdigit() and not (left.isalpha() or left == ".")
    if character == ",":
        return left.isdigit() and right.isdigit()
    if character == "'":
        return left.isdigit() and right.isdigit()
    if character == ":":
        return before.isdigit() and after.isdigit() and spaced_alike
    if character == "%":
        return before.isdigit()
    if character == "#":
        return left.isalnum()
    if character == "+":
        return (
            left.isalnum() or (left == "+" and text[position - 2].isalnum()) or (before.isalnum() and after.isalnum())
        )
    if character in "<>":
        return after.isalnum() or after in "-."
    if character == "-":
        return _is_minus(text, position, spaced_alike=spaced_alike)
    return character in _BETWEEN and before.isalnum() and after.isalnum() and spaced_alike


def _is_minus(text: str, position: int, *, spaced_alike: bool) -> bool:
    """Tell a minus from the hyphen of a word, a dash, and the mark of a list."""
    left, right = text[position - 1], text[position + 1]
    if not left.isalnum() and left not in ")]" and right != " ":
        return right.isdigit() or right == "." or (right.isalpha() and not text[position + 2].isalpha())
    before = position - 1 if left != " " else position - 2
    after = position + 1 if right != " " else position + 2
    if not (text[before].isalnum() and text[after].isalnum() and spaced_alike):
        return False
    is_word_before = text[before].isalpha() and text[before - 1].isalpha()
    is_word_after = text[after].isalpha() and text[after + 1].isalpha()
    return not (is_word_before or is_word_after)
