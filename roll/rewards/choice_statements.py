r"""Which letter of a multiple choice a text settles on, in time linear in its length.

A `\boxed{}` counts before an `<answer>`, that before sentences, those before a letter that stands by itself. Sentences
are read one mention of a letter after another: what stands right before it and right after it asserts it, rules it out
or asks. The last one asserted counts, unless it is ruled out later; of several asserted together none does.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

from roll.rewards.answers import last_boxed

_TAIL_CHARS = 4000
_CONTEXT = 90
"""Characters before and after a letter that decide about it."""
_MAX_MENTIONS = 200

_LATEX_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|bf|rm)\s*\{([^{}\n]{0,200})\}")
_TAGS = re.compile(r"</?(?:b|i|u|em|strong|code|mark)>", re.IGNORECASE)
_EMPHASIS = re.compile(r"(\*\*|__|\*|_|`|\$)\s?\(?([A-Za-z])\)?[.):]?\s?\1(?!\w)")
_QUOTED = re.compile(r"(?<!\w)[\"'“‘]\(?([A-Za-z])\)?[.]?[\"'”’](?!\w)")
_MARKS = str.maketrans(dict.fromkeys("*`$#", " ") | {"’": "'", "\\": " ", "{": " ", "}": " "})
_SENTENCE_END = re.compile(r"[.!?;\n]")

_NOUN = (
    r"(?:answers?|choices?|options?|letters?|statements?|solution|pick|selection|response|conclusion|verdict|guess|ans|"
    r"winner)"
)
_BE = r"(?:is|are|was|be|'s|equals)"
_FILLER = (
    r"(?:the|an?|my|our|correct|right|best|final|only|most|more|very|likely|probably|clearly|definitely|certainly|"
    r"surely|obviously|therefore|thus|hence|indeed|actually|wait|no|sorry|then|now|still|simply|just|again|in fact|"
    rf"of course|{_NOUN}|one|that|number|labell?ed|given by|as|to be|:|,|-|—)"
)
_TURN = (
    r"so|thus|hence|therefore|consequently|finally|no|nope|wait|on second thoughts?|on reflection|scratch that|maybe|"
    r"perhaps|likely|possibly|actually|rather|instead|sorry|correction|i mean|make that|definitely|clearly|surely|"
    r"certainly|probably|final|then"
)
_CUE_BEFORE = re.compile(
    rf"(?:\b{_NOUN}\b[^.!?;\n]{{0,40}}?\b(?:{_BE}|must be|should be|would be|has to be|seems to be)\b|(?<=\w)'s\b"
    rf"|\b{_NOUN}\b(?:\s+\w+){{0,3}}\s*(?:[:=]|->|→|-|—)"
    r"|\b(?:it|one|that|this|which|correct|right|true|best|left|remaining|remains?)\b\s*(?:is|was|'s|must be|"
    r"should be|has to be|:)"
    r"|\b(?:must|has to|have to|should|got to) be"
    r"|\b(?:choose|chose|chosen|choosing|pick|picked|picking|select|selected|selecting|conclude|concluded|"
    r"prefer|favou?r|"
    r"mark|marked|circle|circled|guess|say|believe|think|answer(?:ed)?(?: with)?|leaves?|leaving|remains?|find|"
    r"found|get|got|"
    r"opt(?:ed|ing)? for|go(?:ing|es)? with|went with|settl(?:e|ed|ing) (?:on|for)|stick(?:ing)? with|stuck with|"
    r"decid(?:e|ed|ing) (?:on|for)|land(?:ed|ing)? on|lean(?:ing)? towards?|end(?:ed)? up (?:with|at)|"
    r"down to|left with|(?:us|me) with|points? to|pointing to|vote for|voted? for|vote|corresponds? to|"
    r"match(?:es)?|(?:looks|"
    r"seems|sounds|feels) like|go(?:ing)? for|bet on|arrived? at)\b"
    rf"|(?:^|[,:—-]|\b(?:and|but)\b)\s*(?:{_TURN})\b)"
    rf"[\s,:]*(?:{_FILLER}[\s,:]*){{0,5}}$",
    re.IGNORECASE,
)
_DIRECT_CUE = re.compile(
    rf"\b{_NOUN}(?:\s+(?:{_BE}|must be|should be))?\s*[:=]?\s*(?:(?:the|option|choice|letter)\s+)*$", re.IGNORECASE
)
"""What may stand before a small letter."""
_CONNECTIVE = re.compile(rf"(?:^|[,:—-]|\b(?:and|but)\b)?\s*(?:(?:{_TURN})\b[,:\s—-]*)+$", re.IGNORECASE)
"""After these a letter is asserted only if nothing follows it."""
_NO_CLAUSE = r"(?:(?!(?:but|so|because|since|therefore|thus|then|hence|it is|leaving|only)\b)[a-z']+\s+)"
_RULED_OUT_BEFORE = re.compile(
    rf"(?:\b(?:not|never|neither|nor|cannot|hardly|no longer)\b|n't\b)\s+{_NO_CLAUSE}{{0,4}}[\s\"'(\[]*$"
    r"|\b(?:rather than|instead of|except|other than|as opposed to|unlike|over|without|beats|wrong(?: answers?)?:|"
    r"incorrect:|false:|eliminat\w+|rul\w+ out|exclud\w+|reject\w*|discard\w*|dismiss\w*|cross\w* (?:out|off)|remov\w+|"
    r"drop\w*|disprov\w+|refut\w+|distractors?)\s+"
    rf"(?:(?:the|both|all|either|{_NOUN})\s+){{0,3}}[\s\"'(\[]*$",
    re.IGNORECASE,
)
_NOT_BUT_BEFORE = re.compile(r"\bnot\s+[(\[]?[A-Z][)\]]?,?\s+but\s+(?:rather\s+)?$", re.IGNORECASE)
_BECAUSE_AFTER = re.compile(r"[)\]\"'.]{0,3}\s*[,(]?\s*(?:because|since|as|due to)\b", re.IGNORECASE)
_ONLY_NOT = re.compile(r"\bnot only\b[^.!?;\n]*$", re.IGNORECASE)
_ADVERBS = (
    r"(?:(?:also|clearly|definitely|obviously|simply|just|therefore|thus|hence|indeed|certainly|surely|probably|likely|"
    r"completely|totally|both|all|then|still|actually|of course|most|more|very|by far|the|an?|my|our|not only|only|one|"
    r"thing|that is|that's|which is|to be|final|even|almost|quite|always|alone)\s+){0,5}"
)
_VERB = (
    r"(?:is|are|was|were|'s|seems?|looks?|appears?|sounds?|remains?|must be|should be|has to be|would be|"
    r"will be|has been|"
    r"have been|can be|could be|turns? out)\s+"
)
_WRONG = (
    r"(?:wrong|incorrect|false|out|invalid|eliminated|excluded|ruled out|rejected|impossible|untrue|unlikely|"
    r"irrelevant|"
    r"mistaken|inconsistent|a distractor|nonsense|no good|off|too \w+|less (?:likely|good|accurate|suitable))\b"
)
_RIGHT = (
    r"(?:correct|right|true|best|better|answers?|choices?|options?|pick|solution|winner|valid|accurate|likely|"
    r"likeliest|"
    r"suitable|appropriate|closest|left|good|fitting|it|selection|match|matches|fits|works|what i(?:'d|"
    r" would)? (?:choose|pick))\b"
)
_NOT_ANOTHER = (
    r"(?:\s*,?\s*(?:and\s+)?(?:not|rather than|instead of|over)\s+(?:option\s+)?[(\[]?[A-Z][)\]]?(?![\w'])\s*,?)"
)
_CLOSERS = r"[)\]\"'”.:]{0,3}(?:\s*\([^()\n]{0,60}\))?(?:\s*alone\b)?\s*,?\s*"
_REFUSED_AFTER = re.compile(
    rf"{_CLOSERS}(?:(?:{_VERB}|[:–—-]\s*){_ADVERBS}{_WRONG}|"
    rf"{_VERB}not\s+{_ADVERBS}{_RIGHT})",
    re.IGNORECASE,
)
_NOT_RIGHT_AFTER = re.compile(rf"{_CLOSERS}(?:is|are|was|were|does|do)n't\s+{_ADVERBS}{_RIGHT}", re.IGNORECASE)
_DOUBTED_AFTER = re.compile(
    rf"{_CLOSERS}(?:{_VERB}(?:not|never)\b|(?:is|are|was|were|do|does|did|can|could|would|wo|has|have)(?:n't|\s?not)\b|"
    r"fails?\b|contradicts?\b|violates?\b|makes no sense|has the wrong|lacks?\b|ignores?\b|might\b|may\b|"
    r"could\b|can be\b)",
    re.IGNORECASE,
)
_NOT_WRONG_AFTER = re.compile(
    rf"{_CLOSERS}(?:{_VERB}not|(?:is|are|was|were)n't)\s+{_ADVERBS}(?:wrong|incorrect|false)\b", re.IGNORECASE
)
_ASSERTED_AFTER = re.compile(
    rf"{_NOT_ANOTHER}|{_CLOSERS}(?:(?:{_VERB}|[:–—-]\s*){_ADVERBS}{_RIGHT}|(?:my )?final answer\b|(?:is|was|"
    rf"it is)\s*[.!]?\s*$|(?:fits|works|matches|"
    rf"satisfies|holds|wins|remains|"
    r"stays|makes (?:the most )?sense|it is|must be (?:it|right|correct))\b)",
    re.IGNORECASE,
)
_QUESTION_AFTER = re.compile(r"[^.!;\n?]{0,90}\?")
_SUPPOSED_BEFORE = re.compile(
    r"\b(?:if|suppose|supposing|assume|assuming|were|whether|unless|tempting|tempted|mistake|mistakenly|"
    r"(?:might|may|could) (?:\w+ )?(?:think|choose|pick|say|guess|expect)|(?:people|students|many|some|others) "
    r"(?:\w+ )?(?:think|choose|pick|say|believe|chose|picked))\b[^.!?;\n,]*$",
    re.IGNORECASE,
)
_AFTER_ARTICLE = re.compile(
    r"\s*(?:$|[.,;:!?)\]\"'”—-]|(?:because|since|as|and|or|not|which|but|for|with|rather|instead|over|is|was|"
    r"isn't|wasn't|"
    r"are|aren't|seems|looks|must|should|has|can't|cannot|fits|works|matches|satisfies|contradicts|it is|alone|"
    r"remains|fails|wins|"
    r"by|due|given|here|holds|makes|does|doesn't)\b)"
)
_MAY_PRECEDE = re.compile(
    rf"(?:^\s*|[,;:(\[\"'“—>/&|-]\s*|\b(?:{_NOUN}|that|and|or|so|but|because|since|as|therefore|thus|hence|only|"
    rf"both|either|while|"
    r"whereas|then|is|why|of|says?|see|clearly|indeed|also|however|hence|out|nor|neither|not|than|maybe|perhaps|"
    r"possibly)\s+)$",
    re.IGNORECASE,
)
_BETWEEN = re.compile(
    r"[)\]\"'.]?\s*(?:,\s*(?:and|or)?|and|or(?:\s+(?:maybe|perhaps|possibly|even))?|&|/)\s*(?:(?:option|choice|"
    r"answer)\s+)?[(\[\"']?",
    re.IGNORECASE,
)
_WORD_BETWEEN = re.compile(r"\b(and|or)\b|[&/]", re.IGNORECASE)
_SINGULAR = re.compile(r"[)\]\"'.]{0,3}\s*(?:is|was|isn't|wasn't|'s|does|doesn't)\b", re.IGNORECASE)

Verdict = Literal["asserted", "ruled out", "refused", "other"]


@dataclass(frozen=True, slots=True)
class _Group:
    """Letters that are mentioned together: `A`, `(A)`, `A, B and D`."""

    letters: tuple[str, ...]
    start: int
    end: int


def stated_letter(text: str, letters: str, *, require_boxed: bool = False) -> str | None:
    """Return the letter that a text settles on, or None."""
    boxed = last_boxed(text)
    if boxed is None or boxed.strip() or require_boxed:
        return _leading_letter(boxed or "", letters)
    inside, closed, _ = text.rpartition("</answer>")
    _, opened, tagged = inside.rpartition("<answer>")
    if opened and closed:
        tail = _plain(tagged[-_TAIL_CHARS:])
        return (
            _leading_letter(tagged[:_TAIL_CHARS], letters) or _last_asserted(tail, letters) or _by_itself(tail, letters)
        )
    tail = _plain(text[-_TAIL_CHARS:])
    groups = _groups(tail, letters)
    judged = [(group, _verdict(tail, group)) for group in groups]
    if any(verdict == "asserted" for _, verdict in judged):
        return _settled(judged)
    return _by_itself(
        tail, letters, {letter for group, verdict in judged if verdict != "other" for letter in group.letters}
    )


def _last_asserted(text: str, letters: str) -> str | None:
    return _settled([(group, _verdict(text, group)) for group in _groups(text, letters)])


def _settled(judged: list[tuple[_Group, Verdict]]) -> str | None:
    """Return the letter asserted last, None if it was refused after that or asserted with others."""
    current: tuple[str, ...] = ()
    for group, verdict in judged:
        if verdict == "asserted":
            current = group.letters
        elif verdict == "refused" and set(group.letters) & set(current):
            current = ()
    return current[0] if len(set(current)) == 1 else None


def _plain(text: str) -> str:
    """Return a text without markup; an emphasised letter is in brackets."""
    text = unicodedata.normalize("NFKC", text)
    text = _LATEX_TEXT.sub(r" \1 ", _TAGS.sub("", text))
    text = _EMPHASIS.sub(r"(\2)", text)
    return _QUOTED.sub(r"(\1)", text).translate(_MARKS)


def _leading_letter(text: str, letters: str) -> str | None:
    """Return the letter that an answer by itself consists of, or begins with: `b`, `(B)`, `B. Paris`, `Option B`."""
    text = _LATEX_TEXT.sub(r" \1 ", unicodedata.normalize("NFKC", text)).translate(_MARKS).strip().strip("\"'_")
    match = re.match(
        rf"(?i:(?:the\s+)?(?:(?:correct|final)\s+)?(?:answer|option|choice|letter)(?:\s+is)?\s*:?\s*)?"
        rf"[(\[\"']?\s*([{letters}{letters.lower()}])\s*(?:([)\].:\"'])|(?=[\s,—-])|$)",
        text,
    )
    if match is None or _lists_letters(text, letters):
        return None
    letter, rest = match.group(1), text[match.end() :]
    if (
        not match.group(2)
        and rest.strip()
        and (letter.islower() or letter in "AI")
        and not re.match(r"\s*[,:—-]", rest)
    ):
        return None  # an article, or a word
    several = re.match(rf"\s*(?:,|and|or|&|/)\s*(?:and|or)?\s*[(\[]?[{letters}{letters.lower()}](?![\w'])", rest)
    return None if several and several.group()[-1].upper() != letter.upper() else letter.upper()


def _lists_letters(text: str, letters: str) -> bool:
    """Return whether a text is nothing but several letters: `A. B. C. D.`, `(A)(B)`."""
    both = letters + letters.lower()
    named = re.findall(rf"[(\[]?([{both}])[)\].:]?", text)
    between = re.sub(rf"(?<![A-Za-z])(?:[{both}](?![A-Za-z])|and|or)|[()\[\].:,;/&+|\s]", "", text)
    return not between and len({letter.upper() for letter in named}) > 1


def _groups(text: str, letters: str) -> list[_Group]:
    """Return all mentions of letters, in order."""
    small = letters.lower()
    mention = re.compile(
        rf"(?<![\w'])(?:[(\[]\s?([{letters}{small}])\s?[)\]]|([{letters}])(?![\w'+#]|-[a-zA-Z])|"
        rf"([{small}])(?=\s*(?:$|[.,;:!)\n])|\s+(?:is|was|seems|looks|fits|works|because|since)\b))"
    )
    single: list[_Group] = []
    for match in list(mention.finditer(text))[-_MAX_MENTIONS:]:
        letter = next(group for group in match.groups() if group)
        if match.group(1) is None and not _is_letter(text, match.start(), match.end(), letter):
            continue
        single.append(_Group((letter.upper(),), match.start(), match.end()))
    return _joined(text, single)


def _is_letter(text: str, start: int, end: int, letter: str) -> bool:
    """Tell a letter that stands for a choice from an article, a pronoun, and the C of vitamin C."""
    before, after = _clause_before(text, start), text[end : end + 30]
    if letter.islower():
        return _DIRECT_CUE.search(before) is not None
    if letter in "AI" and not _AFTER_ARTICLE.match(after):
        return False
    if letter == "I" and re.match(r"\s+\w", after) and not re.match(r"\s+(?:because|since|is|isn't)\b", after):
        return False
    return _MAY_PRECEDE.search(before) is not None or _CUE_BEFORE.search(before) is not None


def _joined(text: str, single: list[_Group]) -> list[_Group]:
    """Put letters together that are one list: `A and B`, `A, B and D`; two with a comma alone are none."""
    groups: list[_Group] = []
    position = 0
    while position < len(single):
        last = position
        words = False
        while last + 1 < len(single) and _BETWEEN.fullmatch(text, single[last].end, single[last + 1].start):
            if single[last + 1].letters[0] in {one.letters[0] for one in single[position : last + 1]}:
                break  # "Of A and B, B is better"
            words |= _WORD_BETWEEN.search(text, single[last].end, single[last + 1].start) is not None
            last += 1
        if last > position and words:
            joint = re.search(r"\band\b", text[single[last - 1].end : single[last].start], re.IGNORECASE)
            if joint and _SINGULAR.match(text, single[last].end):
                last -= 1  # "The answer is A and B is wrong"
        elif last - position < 2 and not re.match(r"[)\]\"'.]{0,3}\s*(?:$|[.!;\n])", text[single[last].end :][:9]):
            last = position  # "The answer is B, A is wrong"; but "B, C" at the end are two
        chain = single[position : last + 1]
        groups.append(_Group(tuple(one.letters[0] for one in chain), chain[0].start, chain[-1].end))
        position = last + 1
    return groups


def _clause_before(text: str, start: int) -> str:
    return _SENTENCE_END.split(text[max(0, start - _CONTEXT) : start])[-1]


def _verdict(text: str, group: _Group) -> Verdict:
    """Return what is said of letters, by what stands right before and right after them."""
    before, after = _clause_before(text, group.start), text[group.end : group.end + _CONTEXT]
    rest = re.split(r"[!?;\n]|\.\s", after)[0]
    if _QUESTION_AFTER.match(after) or _SUPPOSED_BEFORE.search(before):
        return "other"
    if _NOT_BUT_BEFORE.search(before):
        return "asserted"
    if _ONLY_NOT.search(before):
        return "other"
    if _RULED_OUT_BEFORE.search(before):
        return "refused"
    if _NOT_WRONG_AFTER.match(after):
        return "other"
    if _REFUSED_AFTER.match(after) or _NOT_RIGHT_AFTER.match(after):
        return "refused"
    cue = _CUE_BEFORE.search(before)
    if cue is not None and _CONNECTIVE.fullmatch(before[cue.start() :]):
        cue = None if rest.strip(" .,)]\"'") else cue
    if cue is not None:
        return "asserted"
    if _DOUBTED_AFTER.match(after):
        return "ruled out"
    if _ASSERTED_AFTER.match(rest) or (not before.strip(" (") and _BECAUSE_AFTER.match(after)):
        return "asserted"
    return "other"


def _by_itself(text: str, letters: str, ruled_out: frozenset[str] | set[str] = frozenset()) -> str | None:
    """Return the letter that stands by itself on a line or at its start, or the only one in brackets."""
    both = letters + letters.lower()
    lines = text.strip().splitlines()
    if lines and _lists_letters(lines[-1], letters):
        return None
    lone = rf"^[\s_>-]{{0,6}}(?:(?i:the )?(?i:option|choice|letter|answer) )?[(\[]?([{both}])[)\].:,!]{{0,2}}\s*$"
    starts = rf"^[\s_>-]{{0,6}}(?:[(\[]([{both}])[)\]]|([{both}])[.):]|([B-HJ-Z])\s[–—-]\s)"
    brackets = rf"(?<!\w)[(\[]\s?([{both}])\s?[)\]]"
    last_sentence = rf"[.!?]\s+[(\[]?([{letters}])[)\]]?[.!]?\s*\Z"
    lone = rf"{lone}|{last_sentence}"
    matches = list(re.finditer(lone, text, re.MULTILINE))
    if matches:
        last, *others = [(match.group(1) or match.group(2)).upper() for match in reversed(matches)]
        listed = bool(others) and others[0] != last and not text[matches[-2].end() : matches[-1].start()].strip()
        return None if listed or last in ruled_out else last
    for pattern in (starts, brackets):
        named = {
            next(filter(None, match.groups())).upper()
            for match in re.finditer(pattern, text, re.MULTILINE)
            if not _QUESTION_AFTER.match(text[match.end() : match.end() + _CONTEXT])
        }
        open_ones = named - ruled_out
        if named:
            return open_ones.pop() if len(open_ones) == 1 else None
    return None
