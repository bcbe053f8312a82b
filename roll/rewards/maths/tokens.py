r"""Splitting an answer into tokens: LaTeX, plain text and Unicode signs as one alphabet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from roll.rewards.maths.units import words

MAX_NESTING = 30
"""Of brackets and braces."""
PLAIN_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"

Kind = Literal["number", "hex", "word", "command", "text", "sign"]

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-", strict=True))
_FRACTIONS = {
    "½": "12",
    "⅓": "13",
    "⅔": "23",
    "¼": "14",
    "¾": "34",
    "⅕": "15",
    "⅖": "25",
    "⅗": "35",
    "⅘": "45",
    "⅙": "16",
    "⅚": "56",
    "⅛": "18",
    "⅜": "38",
    "⅝": "58",
    "⅞": "78",
}
_GREEK = dict(
    zip(
        "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ",
        words(
            "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon phi "
            "chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
        ),
        strict=True,
    )
)
GREEK = frozenset(_GREEK.values()) | {
    "varepsilon",
    "vartheta",
    "varphi",
    "varrho",
    "varsigma",
    "ell",
    "hbar",
    "Upsilon",
}

_CHARACTERS = {
    **dict.fromkeys("−–—‒﹣－", "-"),
    **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
    **dict.fromkeys("\u00a0\u2002\u2003\u2007\u2008\u2009\u200a\u202f\u3000", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\u2061\u2062\ufeff", ""),
    **dict(zip("，．％（）＋＝／⁄∕÷：；＜＞［］｛｝", ",.%()+=////:;<>[]{}", strict=True)),
    **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "∗": "*", "∞": r"\infty ", "√": r"\surd "},
    **{"≤": r"\leq ", "≥": r"\geq ", "⩽": r"\leq ", "⩾": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "≡": r"\equiv "},
    **{"±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∈": r"\in ", "∅": r"\emptyset "},
    **{"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}"},
    **{
        "°": r"^\circ ",
        "º": r"^\circ ",
        "℃": r"^\circ C",
        "℉": r"^\circ F",
        "′": "'",
        "’": "'",
        "″": "''",
        "…": r"\ldots ",
    },
    **{"⟨": r"\langle ", "⟩": r"\rangle ", "〈": r"\langle ", "〉": r"\rangle ", "∠": r"\angle ", "△": r"\triangle "},
    **{
        "⌊": r"\lfloor ",
        "⌋": r"\rfloor ",
        "⌈": r"\lceil ",
        "⌉": r"\rceil ",
        "→": r"\to ",
        "∣": r"\mid ",
        "∂": r"\partial ",
    },
    **{sign: rf"\{name} " for sign, name in _GREEK.items()},
    **{sign: rf"\frac{{{digits[0]}}}{{{digits[1]}}}" for sign, digits in _FRACTIONS.items()},
    "∛": r"\cbrt ",
    "ϕ": r"\phi ",
    "ϵ": r"\epsilon ",
    "µ": r"\mu ",
}
_TABLE = str.maketrans(_CHARACTERS)
_RAISED = re.compile(f"[{''.join(map(re.escape, _SUPERSCRIPTS))}]+")
_LOWERED = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")

_SPACES = r"(?:\\[,;:! ]|\{,\}|,\\!|~|\s)"
_GROUPS = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{_SPACES}{{1,2}}\d{{3}}(?!\d))+(?!\s*/)")
"""Thousands that are set apart by thin spaces, plain spaces or `{,}`; before a slash it would be a mixed number."""
_COMMAS = re.compile(r"(?<=\d)(?:\{,\}|,\s*\\!|\\!,|\\,\s*,|,\s*\\,)\s*(?=\d{3}(?!\d))")
_DIGITS = re.compile(r"\\([dtc]?frac|[dt]?binom)\s*(\d)\s*(\d)")
_HALF_DAYS = re.compile(r"(?<=[\d ])([apAP])\.\s?m\.?(?![A-Za-z])")
_OVER = re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}")
_DIGITS_IN_TEXT = re.compile(r"\\(?:text|mathrm|texttt|mathtt)\s*\{\s*([0-9A-Fa-f]+)\s*\}(?=\s*_)")
_PROSE = re.compile(r"\\(?:mathrm|operatorname|mathbf|mathit|mathsf)\s*\{([A-Za-z][A-Za-z ,]{2,})\}")
_PRIMES = re.compile(r"\^\s*(?:\{\s*((?:\\prime\s*|'\s*)+)\}|(\\prime|'))")
_IGNORED = re.compile(
    r"\\(?:left|right|[bB]ig[lrm]?|[bB]igg[lrm]?|displaystyle|textstyle|limits|nolimits|middle)(?![A-Za-z])\.?"
    r"|\\(?:label|tag)\{[^{}]*\}|\\phantom\{[^{}]*\}"
)
_SPACING = re.compile(r"(?<!\\)\\[,;:! ]|\\(?:q?quad|thinspace|enspace|hspace\*?\{[^{}]*\}|space)(?![A-Za-z])|~")
_TEXT = r"text|textbf|textit|textrm|textsf|texttt|mbox|hbox|textnormal"
_LEXER = re.compile(
    rf"""(?P<space>\s+)
    |(?P<hex>(?=[A-F]*\d|[A-F]{{2}})(?=\d*[A-Fa-f])[0-9A-Fa-f]+(?=\s*\)?\s*_\s*(?:16(?!\d)|\{{\s*16\s*\}})))
    |(?P<grouped>\d{{1,3}}(?:,\d{{3}})+(?![\d,]*\d)(?:\.\d+)?)
    |(?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{{1,4}}(?![\dA-Za-z]))?)
    |\\(?P<text>{_TEXT})\s*\{{(?P<content>[^{{}}]*)\}}
    |\\(?P<command>[A-Za-z]+\*?|[{{}}|%$\#&_\\])
    |(?P<word>[A-Za-z]+)
    |(?P<sign>\*\*|<=|>=|!=|=>|->|==|'+|[-+*/^_=<>()\[\]{{}}|,;:.!%$€£¥₹¢&?@\#"`])
    """,
    re.VERBOSE,
)
_SAME = {
    "le": "leq",
    "ge": "geq",
    "ne": "neq",
    "leqslant": "leq",
    "geqslant": "geq",
    "lt": "<",
    "gt": ">",
    "cdot": "*",
    "times": "times",
    "ast": "*",
    "div": "/",
    "dfrac": "frac",
    "tfrac": "frac",
    "cfrac": "frac",
    "varnothing": "emptyset",
    "dbinom": "binom",
    "tbinom": "binom",
    "lvert": "|",
    "rvert": "|",
    "vert": "|",
    "mid": "|",
    "lbrace": "{{",
    "rbrace": "}}",
    "{": "{{",
    "}": "}}",
    "%": "%",
    "$": "$",
    "|": "norm",
    "lVert": "norm",
    "rVert": "norm",
    "Vert": "norm",
    "backslash": "setminus",
    "operatorname*": "operatorname",
    "lbrack": "[",
    "rbrack": "]",
    "colon": ":",
    "dots": "ldots",
    "cdots": "ldots",
    "dotsc": "ldots",
    "arctg": "arctan",
    "tg": "tan",
    "ctg": "cot",
    "infin": "infty",
    "prime": "'",
    "sim": "sim",
    "varepsilon": "epsilon",
    "varphi": "phi",
    "land": "wedge",
    "lor": "vee",
    "to": "to",
    "rightarrow": "to",
    "lparen": "(",
    "rparen": ")",
    "textdegree": "degree",
    "euro": "€",
    "pounds": "£",
    "textdollar": "$",
    "\\": "newline",
    "mod": "bmod",
    "bigcup": "cup",
    "bigcap": "cap",
    "minus": "-",
}
_SIGNS = {"**": "^", "<=": "leq", ">=": "geq", "!=": "neq", "==": "=", "->": "to", "?": "?"}


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of an answer; `text` is its canonical form, so that `\\dfrac` and `\\frac` are one."""

    kind: Kind
    text: str
    space: bool = False
    """Whether white space stands before it."""


def plain_characters(text: str) -> str:
    """Return `text` with typographic signs (minus, fullwidth digits, odd spaces, operators) as ASCII or LaTeX."""
    if text.isascii():
        return text
    text = _RAISED.sub(lambda match: "^{" + "".join(_SUPERSCRIPTS[c] for c in match.group()) + "}", text)
    text = _LOWERED.sub(lambda match: "_{" + "".join(_SUBSCRIPTS[c] for c in match.group()) + "}", text)
    return text.translate(_TABLE)


@lru_cache(maxsize=512)
def tokenise(answer: str) -> tuple[Token, ...]:
    """Return the tokens of an answer without math delimiters; a sign that is unknown is a token of itself."""
    text = plain_characters(answer)
    text = _DIGITS.sub(r"\\\1{\2}{\3}", _COMMAS.sub("", text))
    text = _HALF_DAYS.sub(r"\1m", text.replace("...", r"\ldots "))
    text = _OVER.sub(r"\\frac{\1}{\2}", _DIGITS_IN_TEXT.sub(r"\1", _PROSE.sub(_as_text, text)))
    text = _PRIMES.sub(lambda match: "'" * len(re.findall(r"\\prime|'", match.group())), text)
    text = _GROUPS.sub(lambda match: re.sub(_SPACES, "", match.group()), text)
    text = _without_delimiters(_SPACING.sub(" ", _IGNORED.sub(" ", text)).strip())
    tokens: list[Token] = []
    position, space, depth = 0, False, 0
    while position < len(text):
        match = _LEXER.match(text, position)
        if match is None:
            tokens.append(Token("sign", text[position], space))
            position, space = position + 1, False
            continue
        position = match.end()
        if match.lastgroup == "space":
            space = True
            continue
        if match["grouped"] and depth > 0:  # inside of brackets a comma separates
            position = match.start() + match.group().index(",")
            token = Token("number", text[match.start() : position], space)
        else:
            token = _token(match, space)
        depth += (token.text in ("(", "[", "{{")) - (token.text in (")", "]", "}}"))
        tokens.append(token)
        space = False
    while tokens and tokens[-1].text in (".", ",", ";", "newline"):
        tokens.pop()
    return tuple(tokens)


def _token(match: re.Match[str], space: bool) -> Token:
    if match["grouped"]:
        return Token("number", match["grouped"].replace(",", ""), space)
    if match["hex"]:
        return Token("hex", match["hex"].upper(), space)
    if match["number"]:
        return Token("number", match["number"], space)
    if match["text"]:
        return Token("text", " ".join(match["content"].split()), space or match["content"][:1].isspace())
    if match["command"]:
        name = match["command"]
        return Token("sign" if name in _SAME and not _SAME[name].isalpha() else "command", _SAME.get(name, name), space)
    if match["word"]:
        return Token("word", match["word"], space)
    return Token("sign" if match["sign"] not in _SIGNS else "command", _SIGNS.get(match["sign"], match["sign"]), space)


def _without_delimiters(text: str) -> str:
    r"""Return the inside of `$...$`, `\(...\)`, `\[...\]` when they enclose all; drop them in between otherwise."""
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inner = text[len(opening) : -len(closing)]
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith((closing, closing + ".")):
            inner = text.rstrip(".")[len(opening) : -len(closing)]
            if opening not in inner:
                return inner.strip()
    text = re.sub(r"\\[()\[\]]", " ", re.sub(r"\$\$", " ", text))
    dollars = len(re.findall(r"(?<!\\)\$", text))
    if dollars and dollars % 2 == 0 and not re.search(r"(?<!\\)\$\s*\d[^$]*[a-z ]\s*\$\s*\d", text):
        text = re.sub(r"(?<!\\)\$", " ", text)
    return text.strip()


def _as_text(match: re.Match[str]) -> str:
    words = match[1].split()
    prose = all(_is_prose(word) and word not in MATHS_WORDS for word in words)
    return rf"\text{{{match[1]}}}" if prose else match.group()


def canonical_text(tokens: tuple[Token, ...]) -> str:
    """Return the answer apart from blanks and forms of writing: what two answers are compared by if one can't be read.

    Braces around a single token go, `\\text` is its content, and all is in lower case if there are words of a language.
    """
    parts: list[str] = []
    last = ""
    if has_prose(tokens):
        everything = " ".join(token.text for token in tokens).lower()
        return " ".join(re.findall(r"[^\W\d]+|\d+(?:\.\d+)?|[^\w\s.,;:!?]", everything))
    for i, token in enumerate(tokens):
        if _encloses_one(tokens, i) or (token.text == "}" and i >= 2 and _encloses_one(tokens, i - 2)):
            continue
        if token.kind == "number" and last == "number":
            parts.append("·")
        last = token.kind
        if token.kind == "command":
            parts.append("\\" + token.text + " ")
        elif token.kind == "word" and token.text not in MATHS_WORDS and not _is_prose(token.text):
            parts.append(" " + " ".join(token.text) + " ")
        elif token.kind in ("word", "text"):
            parts.append(" " + token.text.strip(" .,;:") + " ")
        else:
            parts.append(token.text)
    text = " ".join("".join(parts).split())
    return re.sub(r"(?<![A-Za-z]) | (?![A-Za-z])", "", text)


def _encloses_one(tokens: tuple[Token, ...], at: int) -> bool:
    if tokens[at].text != "{" or at + 2 >= len(tokens) or tokens[at + 2].text != "}":
        return False
    inner = tokens[at + 1]
    return inner.kind != "word" or len(inner.text) == 1 or _is_prose(inner.text)


MATHS_WORDS = frozenset(
    words(
        "sqrt asin acos atan infty infinity alpha beta gamma delta theta lambda sigma omega epsilon zeta kappa "
        "upsilon iota exp log sin cos tan cot csc sec arcsin arccos arctan sinh cosh tanh pi phi psi xi mu nu tau "
        "eta rho ln lg inf oo ceil floor ceiling abs cbrt gcd lcm max min mod"
    )
)


def has_prose(tokens: tuple[Token, ...]) -> bool:
    """Return whether it is words of a language and numbers (`January 5`), whose letters may be of either case."""
    if not all(token.kind in ("word", "text", "number") or token.text in "().,;:'!?-" for token in tokens):
        return False
    words = [word for token in tokens if token.kind in ("word", "text") for word in re.findall("[A-Za-z]+", token.text)]
    return any(_is_prose(word) for word in words if word not in MATHS_WORDS)


def _is_prose(word: str) -> bool:
    return (
        len(word) > 3
        or (len(word) == 3 and word.isupper())
        or word.lower() == "no"
        or (len(word) == 3 and re.search("[aeiouyAEIOUY]", word) is not None)
    )


def written(answer: str) -> str:
    """Return the same answer as people would write it: without math delimiters, spacing, `dfrac` and a full stop."""
    text = _DIGITS.sub(r"\\\1{\2}{\3}", _COMMAS.sub(",", plain_characters(answer).strip()))
    text = _SPACING.sub(" ", re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])", "", text))
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    # Spaces only matter between words, and after a comma: `1, 250` is not 1250.
    text = re.sub(r"\s+(?!\w)|(?<![\w,])\s+", "", " ".join(text.split()))
    text = _without_delimiters(text)
    return text if text.endswith("..") else text.rstrip(".").strip()


def nesting(text: str) -> int | None:
    """Return the deepest nesting of braces and brackets; None when the braces don't balance."""
    braces = deepest = brackets = 0
    escaped = False
    for character in text:
        if not escaped:
            braces += (character == "{") - (character == "}")
        brackets += (character in "([") - (character in ")]")
        deepest = max(deepest, braces + max(brackets, 0))
        if braces < 0:
            return None
        escaped = character == "\\" and not escaped
    return deepest if braces == 0 else None


def is_readable(text: str) -> bool:
    """Return whether an answer may be read at all: its braces balance, and it isn't nested beyond reason."""
    depth = nesting(text)
    return bool(text) and depth is not None and depth <= MAX_NESTING
