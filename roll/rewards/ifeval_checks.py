"""The 25 constraint families of IFEval (Zhou et al. 2023, arXiv:2311.07911): does a response keep one?

A checker takes the response and the keyword arguments of the data set's row. All take time linear in the response's
length, and treat keywords as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal

from roll.rewards.ifeval_text import capital_words, language, sentences, words

Relation = Literal["less than", "at least"]

CHOICES = ("my answer is yes.", "my answer is no.", "my answer is maybe.")
_FENCES = ("```json", "```Json", "```JSON", "```")
_BOLD, _ITALIC = re.compile(r"\*\*[^*]+\*\*"), re.compile(r"\*[^*]+\*")
_FIRST_WORD = re.compile(r"[^.,?!'\"]*")


def _related(count: int, relation: Relation, limit: int) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f"a relation is 'less than' or 'at least', got {relation!r}")
    return count < limit if relation == "less than" else count >= limit


def _count(text: str, keyword: str) -> int:
    return len(re.findall(re.escape(keyword), text, re.IGNORECASE))


# --- keywords


def existence(response: str, keywords: Sequence[str]) -> bool:
    """Check that every keyword occurs, in any case, also inside of a word."""
    return all(_count(response, keyword) for keyword in keywords)


def frequency(response: str, keyword: str, frequency: int, relation: Relation) -> bool:
    """Check that the keyword occurs at least, or less than, so many times."""
    return _related(_count(response, keyword), relation, frequency)


def forbidden_words(response: str, forbidden_words: Sequence[str]) -> bool:
    """Check that none occurs as a whole word."""
    return not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(response: str, letter: str, let_frequency: int, let_relation: Relation) -> bool:
    """Check that a letter occurs at least, or less than, so many times, in any case."""
    return _related(response.lower().count(letter.lower()), let_relation, let_frequency)


# --- language, length


def response_language(response: str, language: str) -> bool:
    """Check that the whole response is in this language."""
    return _language(response) == language


_language = language


def number_sentences(response: str, num_sentences: int, relation: Relation) -> bool:
    """Check that it has at least, or less than, so many sentences."""
    return _related(len(sentences(response)), relation, num_sentences)


def number_words(response: str, num_words: int, relation: Relation) -> bool:
    """Check that it has at least, or less than, so many words."""
    return _related(len(words(response)), relation, num_words)


def _all_but_ends(pieces: Sequence[str]) -> list[str] | None:
    """Return the pieces that aren't empty; None if one between others is."""
    if any(not piece.strip() for piece in pieces[1:-1]):
        return None
    return [piece for piece in pieces if piece.strip()]


def number_paragraphs(response: str, num_paragraphs: int) -> bool:
    """Exactly so many paragraphs, separated by `***`."""
    paragraphs = _all_but_ends(response.split("***"))
    return paragraphs is not None and len(paragraphs) == num_paragraphs


def nth_paragraph_first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Exactly so many paragraphs, separated by empty lines, the n-th of which starts with a word."""
    paragraphs = response.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if count != num_paragraphs or nth_paragraph > count or not paragraphs[nth_paragraph - 1].strip():
        return False
    word = paragraphs[nth_paragraph - 1].split(maxsplit=1)[0].lstrip("'").lstrip('"')
    match = _FIRST_WORD.match(word.lower())
    return match is not None and match.group() == first_word.lower()


# --- detectable content and format


def number_placeholders(response: str, num_placeholders: int) -> bool:
    """At least so many placeholders in square brackets, such as `[address]`."""
    count = 0
    for line in response.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            count += 1
            start = line.find("[", end)
    return count >= num_placeholders


def postscript(response: str, postscript_marker: str) -> bool:
    """There is a postscript that starts with the marker (`P.S.`, `P.P.S`), in any case."""
    marker = re.escape(postscript_marker.strip().lower())
    if marker == re.escape("p.p.s"):
        marker = r"p\.\s?p\.\s?s"
    elif marker == re.escape("p.s."):
        marker = r"p\.\s?s\."
    return re.search(marker, response.lower()) is not None


def number_bullet_lists(response: str, num_bullets: int) -> bool:
    """Exactly so many lines that begin with `* ` or `-`."""
    lines = [line.strip() for line in response.split("\n")]
    starred = sum(len(line) > 1 and line[0] == "*" and line[1] != "*" for line in lines)
    return starred + sum(line.startswith("-") for line in lines) == num_bullets


def constrained_response(response: str) -> bool:
    """Check that it contains one of the three sentences "My answer is yes." / no / maybe, as they stand."""
    return any(f"My {choice[3:]}" in response for choice in CHOICES)


def number_highlighted_sections(response: str, num_highlights: int) -> bool:
    """At least so many `*highlighted sections*`, of one line each; `**bold**` ones count too."""
    count = 0
    for line in response.split("\n"):
        count += sum(bool(double.strip("*").strip()) for double in _BOLD.findall(line))
        count += sum(bool(single.strip("*").strip()) for single in _ITALIC.findall(_BOLD.sub(" ", line)))
    return count >= num_highlights


def multiple_sections(response: str, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections, each headed by the word and a number (`SECTION 1`)."""
    return len(re.findall(re.escape(section_spliter.strip()) + r"\s?\d", response)) >= num_sections


def json_format(response: str) -> bool:
    """Check that the whole response is JSON, with or without a code fence."""
    text = response.strip()
    for fence in _FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.strip().removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(response: str) -> bool:
    """Check that a title stands in double angular brackets, `<<like this>>`."""
    for line in response.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start:end].strip("<> "):
            return True
    return False


# --- combination, start and end


def two_responses(response: str) -> bool:
    """Exactly two answers, separated by `******`, that aren't the same."""
    answers = _all_but_ends(response.split("******"))
    return answers is not None and len(answers) == 2 and answers[0].strip() != answers[1].strip()


def repeat_prompt(response: str, prompt_to_repeat: str) -> bool:
    """Check that it starts with the request, word for word, in any case."""
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(response: str, end_phrase: str) -> bool:
    """Check that it ends with the phrase, in any case; a closing quotation mark may follow."""
    return response.strip().strip('"').strip().lower().endswith(end_phrase.strip().strip('"').strip().lower())


def quotation(response: str) -> bool:
    """Check that the whole response stands in double quotation marks."""
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


# --- case and punctuation


def english_capital(response: str) -> bool:
    """English, and no letter in lower case."""
    # In lower case: the detector skips words in capitals, and takes German ones for English.
    return response.isupper() and _language(response.lower()) == "en"


def english_lowercase(response: str) -> bool:
    """English, and no letter in upper case."""
    return response.islower() and _language(response) == "en"


def capital_word_frequency(response: str, capital_frequency: int, capital_relation: Relation) -> bool:
    """At least, or less than, so many words in capitals."""
    return _related(capital_words(response), capital_relation, capital_frequency)


def no_comma(response: str) -> bool:
    """There is no comma."""
    return "," not in response


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "change_case:capital_word_frequency": capital_word_frequency,
    "punctuation:no_comma": no_comma,
}
"""Checker by the id that rows name in `instruction_id_list`."""
