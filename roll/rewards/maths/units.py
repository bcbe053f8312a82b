"""What may stand behind a number: units with their size, currencies, words that multiply, and other nouns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

words = str.split
"""Long lists of words read better as one text."""

_MULTIPLIERS = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_PARTS = {
    "half": 2,
    "halve": 2,
    "third": 3,
    "quarter": 4,
    "fifth": 5,
    "tenth": 10,
    "hundredth": 100,
    "thousandth": 1000,
}


def _table() -> dict[str, tuple[str, Fraction]]:
    """Return dimension and size of every unit by each of its names."""
    rows: list[tuple[str, str, int | Fraction]] = [
        ("m meter metre", "length", 1),
        ("km kilometer kilometre", "length", 1000),
        ("cm centimeter centimetre", "length", Fraction(1, 100)),
        ("mm millimeter millimetre", "length", Fraction(1, 1000)),
        ("nm nanometer nanometre", "length", Fraction(1, 10**9)),
        ("in inch inches", "length", Fraction(254, 10000)),
        ("ft foot feet", "length", Fraction(3048, 10000)),
        ("yd yard", "length", Fraction(9144, 10000)),
        ("mi mile", "length", Fraction(1609344, 1000)),
        ("g gram gramme", "mass", 1),
        ("kg kilogram kilo", "mass", 1000),
        ("mg milligram", "mass", Fraction(1, 1000)),
        ("lb lbs pound", "mass", Fraction(45359237, 100000)),
        ("oz ounce", "mass", Fraction(45359237, 1600000)),
        ("s sec secs second", "time", 1),
        ("ms millisecond", "time", Fraction(1, 1000)),
        ("min mins minute", "time", 60),
        ("h hr hrs hour", "time", 3600),
        ("day", "time", 86400),
        ("week", "time", 604800),
        ("l liter litre", "volume", 1),
        ("ml milliliter millilitre", "volume", Fraction(1, 1000)),
        ("dl deciliter decilitre", "volume", Fraction(1, 10)),
        ("$ dollar usd buck", "dollar", 1),
        ("¢ cent", "dollar", Fraction(1, 100)),
        ("€ euro eur", "euro", 1),
        ("£ gbp", "sterling", 1),
        ("¥ yen jpy yuan cny rmb", "yen", 1),
        ("₹ rupee inr rs", "rupee", 1),
        ("° deg degree", "degree", 1),
        ("rad radian", "radian", 1),
        ("hz hertz", "frequency", 1),
        ("n newton", "force", 1),
        ("j joule", "energy", 1),
        ("kj kilojoule", "energy", 1000),
        ("w watt", "power", 1),
        ("kw kilowatt", "power", 1000),
        ("v volt", "voltage", 1),
        ("pa pascal", "pressure", 1),
        ("month", "month", 1),
        ("year yr yrs", "year", 1),
    ]
    table = {name: (dimension, Fraction(size)) for names, dimension, size in rows for name in names.split()}
    return table | {name + "s": table[name] for name in list(table) if len(name) > 2 and not name.endswith("s")}


_UNITS = _table()
_SYMBOL = re.compile("[kMGTmnpcµ]?(?:W|Wh|V|A|Hz|Pa|J|N|eV|B|K|F|mol|cal|L)")
"""Of a unit that isn't in the table, whose letters have their case: `mW` isn't `MW`."""
_LARGE = frozenset(["Mm", "Mg", "Ms", "Ml", "ML"])
"""A million times what they are in small letters, or something else."""
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SPEEDS = {"mph": ("mi", "h"), "kph": ("km", "h"), "kmh": ("km", "h"), "fps": ("ft", "s")}
BARE_UNITS = frozenset(name for name in _UNITS if name.isalpha()) | _SPEEDS.keys() | _MULTIPLIERS.keys()
"""Words that are units behind a number wherever they stand; letters such as `m` only after a space."""
_CASED = frozenset({"N", "J", "W", "V", "L"})
_LOWER = frozenset({"m", "g", "s", "h", "l"})
_SINGLE = frozenset("aKACFTHSMΩ")
"""Letters that inside of `text` may be a unit outside of the table, or an article; K is one without it too."""
_FILLERS = frozenset({"the", "of", "a", "an", "in", "different", "total", "per", "each", "about"})
_PIECES = re.compile(r"\s*(?:(?P<power>\^-?\d)|(?P<sign>[*/°$€£¥₹¢%])|(?P<word>[A-Za-z.]+)|(?P<other>\S))")
_TEMPERATURES = {
    "c": "celsius",
    "celsius": "celsius",
    "centigrade": "celsius",
    "f": "fahrenheit",
    "fahrenheit": "fahrenheit",
}


@dataclass(frozen=True, slots=True)
class Unit:
    """What stands behind a number: it is `size` times as much of `dimensions`, of things named by `nouns`."""

    factor: Fraction = Fraction(1)
    """What words multiply the number by: 10**6 for `million`."""
    dimensions: frozenset[tuple[str, int]] = frozenset()
    size: Fraction = Fraction(1)
    nouns: frozenset[str] = frozenset()
    percent: bool = False

    @property
    def is_empty(self) -> bool:
        """Return whether nothing stands behind the number."""
        return not self.dimensions and not self.nouns


def is_bare_unit(word: str, space: bool) -> bool:
    r"""Return whether a word outside of `\text{}` is a unit behind a number: `5cm`, `5 m`; `5m` is a product."""
    if len(word) == 1:
        return space and (word in _LOWER or word in _CASED or word == "K")
    lower = word.lower()
    if lower in BARE_UNITS or lower in ("am", "pm", "percent", "per", "square", "cubic", "sq", "cu"):
        return True
    if _SYMBOL.fullmatch(word):
        return space
    syllable = re.fullmatch("[^aeiou][aeiou][^aeiou]", lower) is not None
    return space and (len(word) > 3 or syllable) and re.search("[aeiouy]", lower) is not None and word[1:].islower()


def read_unit(phrase: str) -> Unit | None:
    """Return the unit that `phrase` is (`km/h`, `square feet`, `million dollars`); None if it isn't one."""
    reader = _UnitReader()
    phrase, position = phrase.strip(" .,"), 0
    while position < len(phrase):
        match = _PIECES.match(phrase, position)
        if match is None or match["other"]:
            return None
        position = match.end()
        piece = (match["power"] or match["word"] or match["sign"]).replace(".", "")
        if not (reader.power(int(piece[1:])) if match["power"] else reader.word(piece)):
            return None
    return reader.unit()


class _UnitReader:
    """Takes the pieces of a unit in order."""

    def __init__(self) -> None:
        self._factor = self._size = Fraction(1)
        self._dimensions: dict[str, int] = {}
        self._nouns: set[str] = set()
        self._percent = False
        self._sign = 1
        self._next_power = 1  # `square` comes before its unit
        self._last = ""

    def unit(self) -> Unit:
        """Return what the pieces are together."""
        dimensions = frozenset((name, exponent) for name, exponent in self._dimensions.items() if exponent)
        return Unit(self._factor, dimensions, self._size, frozenset(self._nouns), self._percent)

    def power(self, exponent: int) -> bool:
        """Raise the unit before to a power; False if there is none."""
        if not self._last:
            return False
        self._multiply(self._last, self._sign * (exponent - 1))
        return True

    def word(self, piece: str) -> bool:
        """Take a word or a sign; False if no unit has it."""
        has_case = (len(piece) == 1 and piece.isupper() and piece not in _CASED) or piece in _LARGE
        word = piece if has_case else piece.lower()
        last, self._last = self._last, ""
        if word in ("/", "per", "*"):
            self._sign = 1 if word == "*" else -1
        elif word in _POWERS:
            self._next_power = _POWERS[word]
        elif word in ("squared", "cubed"):
            self._last = last
            return self.power(2 if word == "squared" else 3)
        elif word in ("percent", "%"):
            self._percent = True
        elif word.removesuffix("s") in _MULTIPLIERS:
            self._factor *= _MULTIPLIERS[word.removesuffix("s")]
        elif word.removesuffix("s") in _PARTS:
            self._factor /= _PARTS[word.removesuffix("s")]
        elif word in _SPEEDS:
            self._multiply(_SPEEDS[word][0], 1)
            self._multiply(_SPEEDS[word][1], -1)
        elif word.lower() in _TEMPERATURES and (last in ("°", "degree", "degrees") or len(word) > 1):
            self._dimensions = {_TEMPERATURES[word.lower()]: 1}
        elif word in _UNITS:
            self._multiply(word, self._sign * self._next_power)
            self._last, self._next_power = word, 1
        elif len(word) == 1 and word not in _SINGLE:
            return False
        elif word not in _FILLERS:
            self._nouns.add(piece if _SYMBOL.fullmatch(piece) else _singular(word))
        return True

    def _multiply(self, name: str, exponent: int) -> None:
        dimension, size = _UNITS[name]
        self._dimensions[dimension] = self._dimensions.get(dimension, 0) + exponent
        self._size *= size**exponent


def _singular(word: str) -> str:
    lower = word.lower()
    if len(lower) > 4 and lower.endswith("ies"):
        return lower[:-3] + "y"
    return lower[:-1] if len(lower) > 3 and lower.endswith("s") and not lower.endswith("ss") else lower


def scale(answer: Unit, gold: Unit) -> Fraction | None:
    """Return what the answer's number is multiplied by to compare it with the gold one's; None if the units differ.

    A side without unit takes the other's.
    """
    if answer.dimensions and gold.dimensions and answer.dimensions != gold.dimensions:
        return None
    if answer.nouns and gold.nouns and not (answer.nouns <= gold.nouns or gold.nouns <= answer.nouns):
        return None
    if bool(answer.dimensions and not answer.nouns) != bool(gold.dimensions and not gold.nouns):
        kinds = [unit for unit in (answer, gold) if not unit.is_empty]
        if len(kinds) == 2 and not (answer.dimensions and gold.dimensions):
            return None  # `5 km` and `5 apples`
    return answer.size / gold.size if answer.dimensions and gold.dimensions else Fraction(1)


_SMALL = dict(
    zip(
        words(
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
            "seventeen eighteen nineteen"
        ),
        range(20),
        strict=True,
    )
)
_TENS = dict(
    zip(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], range(20, 100, 10), strict=True)
)


def spelled_number(text: str) -> int | None:
    """Return the number that English words say (`twenty-three`, `one hundred and five`, `two million`), or None."""
    words = [word for word in re.split(r"[\s-]+", text.lower().strip(" .")) if word != "and"]
    total = current = 0
    previous = ""
    if not words or len(words) > 20:
        return None
    for word in words:
        if word in _SMALL and (
            not previous or previous in _MULTIPLIERS or (previous in _TENS and 0 < _SMALL[word] < 10)
        ):
            current += _SMALL[word]
        elif word in _TENS and (not previous or previous in _MULTIPLIERS):
            current += _TENS[word]
        elif (
            word in _MULTIPLIERS and word != "dozen" and previous and previous not in ("thousand", "million", "billion")
        ):
            size = _MULTIPLIERS[word]
            if size == 100:
                current *= 100
            else:
                total, current = total + current * size, 0
        else:
            return None
        previous = word
    return total + current
