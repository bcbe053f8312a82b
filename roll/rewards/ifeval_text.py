"""What IFEval counts in a text: sentences, words, tokens in capitals, and which language it is.

The reference takes sentences and tokens from NLTK, whose Punkt model is a download. The rules here need none: they were
compared with it on prose, lists, dialogue and quotations, and differ where a trained model knows a rare abbreviation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

_END = re.compile(r"""[.!?](?=(?P<mark>[)";}\]*:@'({\[!?])|\s+(?P<next>\S{1,64}))""")
_CLOSING = re.compile(r"""["')\]}]+(?=\s|--|$)""")
_WORD = re.compile(r"\w+")
_INITIALS = re.compile(r"(?:[a-z]\.)+[a-z]$")
_SHORTENED = """mr mrs ms dr prof st sr jr gen col lt maj sen rep messrs inc corp co ltd bros vs dec jan feb aug
sept sep oct nov tues wed fri ave u.s u.k u.s.a a.m p.m ph.d ga tenn minn fla calif conn ill wis
mich colo ariz okla ala kan nev va pa vt ft ok adm reps cie chg"""
_ABBREVIATIONS = frozenset(_SHORTENED.split())
_OPENERS = """the a an it he she they we you this that these those there in on at by for with but and so if when
while as its his her their our my what who why how after before however then now such some many most
all no not one to from thus instead under although despite since once also both each every is are
was were do does did will would can could"""
_STARTERS = frozenset(_OPENERS.split())
"""Words that begin a sentence where they are capitalised after an abbreviation or an ellipsis."""


def sentences(text: str) -> list[str]:
    """Split into sentences. A line break alone ends none; a number with a full stop (`1. Wash it.`) is one."""
    result, begin = [], 0
    for end in _ends(text):
        if end > begin:
            result.append(text[begin:end].strip())
            begin = end
    result.append(text[begin:].strip())
    return [sentence for sentence in result if sentence]


def _ends(text: str) -> Iterator[int]:
    for match in _END.finditer(text):
        position, mark = match.end(), match["mark"]
        if mark in ("!", "?") or (mark and text[position - 3 : position] == "..."):
            continue  # `?!` ends once, at its last mark; `(and so on ...)` doesn't end
        if match.group() == "." and not mark and not _ends_sentence(_before(text, position), match["next"]):
            continue
        closing = _CLOSING.match(text, position)  # quotes and brackets belong to what they close
        if closing is None and mark and mark in "\"')]}":
            continue  # `... is it "so."?` goes on
        yield closing.end() if closing else position


def _before(text: str, end: int) -> str:
    """Return the word that ends at `end`; it is looked for in the 64 characters before."""
    return text[max(0, end - 64) : end].split()[-1]


def _ends_sentence(word: str, following: str) -> bool:
    """Return whether the full stop after a word ends the sentence, given the next word."""
    stem = word.lower().lstrip("\"'([{*_")[:-1]
    starter = following[0].isupper() and following.lower().strip("\"'([{*_.,;:!?)]}") in _STARTERS
    if stem.endswith("."):
        return starter or not stem.endswith("..")  # three dots are an ellipsis, two a slip
    if stem.isdigit() or stem.replace(",", "").replace(".", "").isdigit():
        return not following[0].islower()
    if len(stem) == 1 and stem.isalpha():
        return starter or (stem not in "cefhjmnrstvw" and following[0].islower())
    if stem.rpartition("-")[2] in _ABBREVIATIONS:
        return starter
    if _INITIALS.match(stem) and stem not in ("e.g", "i.e", "p.s", "p.p.s"):
        return starter
    return True


def words(text: str) -> list[str]:
    """Return the runs of letters, digits and underscores: `don't` has two."""
    return _WORD.findall(text)


_SPLIT = re.compile(r"""[\]\[(){}<>;@#$%&"“”«»?!`]|--+|\.\.\.|:(?!\d)|,(?!\d)|(?<=\s)'""")
_SUFFIX = re.compile(r"(?i)('s|'m|'d|'ll|'re|'ve|n't|')$")


def capital_words(text: str) -> int:
    """Count the tokens in capitals, as a Penn Treebank tokenizer makes them: `I`, `U.S.` and `WELL-KNOWN` are one."""
    count = 0
    for token in _SPLIT.sub(" ", text).split():
        bare = token.rstrip(".") if token.endswith(".") and "." not in token[:-1] else token
        suffix = _SUFFIX.search(bare)
        if suffix and suffix.start():
            count += suffix.group().isupper()
            bare = bare[: suffix.start()]
        count += bare.isupper()
    return count


_LANGUAGE_CHARS = 10_000


def language(text: str) -> str | None:
    """Return the code of the text's language (`en`, `zh-cn`), or None where there is nothing to tell it by.

    The same text always gives the same answer; short texts (a few words) are often taken for another language.
    """
    detect, undetectable = _detector()
    try:
        return str(detect(text[:_LANGUAGE_CHARS]))
    except undetectable:
        return None


@lru_cache(maxsize=1)
def _detector() -> tuple[Any, type[Exception]]:
    import langdetect

    langdetect.DetectorFactory.seed = 0  # it samples: without a seed equal texts give different answers
    return langdetect.detect, langdetect.LangDetectException
