"""Countdown: make a target out of a few numbers by arithmetic, with feedback after every try."""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from roll.envs.base import Env, InvalidAction, Observation, ResetNeeded, StepResult
from roll.utils.seeding import stable_hash

_LONGEST = 200
_ATTEMPTS = 2000
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*", "–": "-"})
_READABLE = re.compile(r"[0-9+\-*/() ]+")


class Countdown(Env):
    """Make the target out of the numbers with + - * / and parentheses, each number at most once.

    Each seed has numbers and a target of its own, which can be made: the target comes from an expression. An action is
    an expression, e.g. `(3 + 4) * 2`; what follows an equals sign is ignored. A wrong one is answered by what it makes
    and whether that is too low or too high, or by which numbers it may not use; the same numbers are then tried again.
    An expression that can't be read is an invalid action.

    Rewards: `reward_solved` for the target, `reward_valid` once per episode for an expression that makes something else
    out of the right numbers. Solving it terminates the episode. Metrics: `valid` (the expression keeps the rules), and
    `success` in the last step.

    Args:
        num_numbers: numbers that are given.
        max_number: the largest of them; the smallest is 1.
        min_target, max_target: bounds of the target.
        use_all: every number must be used, once.
        reward_solved, reward_valid: see above.
    """

    def __init__(
        self,
        *,
        num_numbers: int = 4,
        max_number: int = 25,
        min_target: int = 10,
        max_target: int = 100,
        use_all: bool = False,
        reward_solved: float = 1.0,
        reward_valid: float = 0.0,
    ) -> None:
        for name, value, least in (("num_numbers", num_numbers, 2), ("max_number", max_number, 1)):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: got {value!r}, expected a whole number of at least {least}")
        if not 1 <= min_target <= max_target:
            raise ValueError(f"max_target: got {min_target} to {max_target}, expected 1 <= min_target <= max_target")
        self._num_numbers, self._max_number = num_numbers, max_number
        self._targets = range(min_target, max_target + 1)
        self._use_all = use_all
        self._reward_solved, self._reward_valid = reward_solved, reward_valid
        self._numbers: tuple[int, ...] = ()
        self._target = 0
        self._solution = ""
        self._tried_validly = self._over = False
        how_often = "exactly once" if use_all else "at most once"
        self.instructions = (
            f"Make the target out of the numbers. Use + - * / and parentheses, and each number {how_often}.\n"
            "An answer is one expression, e.g. (3 + 4) * 2."
        )

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        if options:
            raise ValueError(f"Countdown has no options, got {', '.join(sorted(options))}: leave them out")
        self._numbers, self._target, self._solution = self._draw(seed)
        self._tried_validly = self._over = False
        return Observation.of(self._question)

    def step(self, action: str) -> StepResult:
        if not self._numbers or self._over:
            raise ResetNeeded("no episode under way: call reset first")
        value, used = evaluate(action)
        problem = self._broken_rule(used)
        self._over = problem is None and value == self._target
        if self._over:
            return StepResult(reward=self._reward_solved, terminated=True, metrics={"valid": 1.0, "success": 1.0})
        reward = 0.0
        if problem is None:
            reward, self._tried_validly = (0.0 if self._tried_validly else self._reward_valid), True
            problem = f"That makes {_plain(value)}, too {'low' if value < self._target else 'high'}."
            valid = 1.0
        else:
            valid = 0.0
        observation = Observation.of(f"{problem}\n{self._question}")
        return StepResult(reward=reward, terminated=False, observation=observation, metrics={"valid": valid})

    def render(self) -> str:
        return self._question

    def solution(self, max_actions: int) -> Sequence[str] | None:  # noqa: ARG002 - it is the same with any time
        return None if self._over else [self._solution]

    @property
    def _question(self) -> str:
        return f"Numbers: {', '.join(map(str, self._numbers))}. Target: {self._target}."

    def _broken_rule(self, used: Sequence[int]) -> str | None:
        available, count = Counter(self._numbers), Counter(used)
        foreign = sorted(count.keys() - available.keys())
        if foreign:
            return f"{foreign[0]} is not one of the numbers."
        often = sorted(number for number in count if count[number] > available[number])
        if often:
            return f"{often[0]} is used {count[often[0]]} times, but it is there {available[often[0]]} time(s)."
        left = sorted((available - count).elements())
        if self._use_all and left:
            return f"{left[0]} is not used, but every number must be."
        return None

    def _draw(self, seed: int) -> tuple[tuple[int, ...], int, str]:
        """Numbers, target, and an expression that makes it."""
        for attempt in range(_ATTEMPTS):
            rng = random.Random(stable_hash("countdown", seed, attempt))
            numbers = tuple(rng.randint(1, self._max_number) for _ in range(self._num_numbers))
            used = self._num_numbers if self._use_all else rng.randint(2, self._num_numbers)
            target, expression = _combined(rng, rng.sample(numbers, used))
            if target in self._targets and target not in numbers:
                return numbers, target, expression
        raise ValueError(
            f"no target between {self._targets.start} and {self._targets.stop - 1} in {_ATTEMPTS} draws of "
            f"{self._num_numbers} numbers up to {self._max_number}; widen min_target, max_target or max_number"
        )


def _combined(rng: random.Random, numbers: Sequence[int]) -> tuple[int, str]:
    """Return a random expression of all these numbers whose every part is a positive whole number, and its value."""
    pool = [(number, str(number)) for number in numbers]
    while len(pool) > 1:
        (a, left), (b, right) = (pool.pop(rng.randrange(len(pool))) for _ in range(2))
        if a < b:
            (a, left), (b, right) = (b, right), (a, left)
        makes = {"+": a + b, "*": a * b, "-": a - b, "/": a // b}
        signs = [sign for sign, value in makes.items() if value > 0 and (sign != "/" or a % b == 0)]
        sign = rng.choice(signs)
        pool.append((makes[sign], f"({left} {sign} {right})"))
    value, expression = pool[0]
    return value, expression.removeprefix("(").removesuffix(")")


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    """Value of an arithmetic expression, and the numbers in it; raises `InvalidAction`. Nothing is executed."""
    expression = text.translate(_SIGNS).split("=")[0].strip()
    if len(expression) > _LONGEST:
        raise InvalidAction(f"An expression has at most {_LONGEST} characters, this one has {len(expression)}.")
    if not _READABLE.fullmatch(expression):
        raise InvalidAction("That is not an expression of numbers, + - * / and parentheses.")
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: very deep nesting
        raise InvalidAction("That expression can't be read; check its parentheses and signs.") from None
    numbers: list[int] = []
    return _value(tree.body, numbers), numbers


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, numbers)
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        raise InvalidAction("Only + - * / and parentheses are allowed.")
    left, right = _value(node.left, numbers), _value(node.right, numbers)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
    if right == 0:
        raise InvalidAction("That divides by zero.")
    return left / right


def _plain(value: Fraction) -> str:
    """Return a short text of a value, however large it is."""
    text = str(value)
    return text if len(text) <= 20 else "a number of many digits"
