"""A place in the tokens of an answer: looking at the next ones, and taking them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from roll.rewards.maths.nodes import Node, Unreadable
from roll.rewards.maths.tokens import MAX_NESTING, Token


class Cursor(ABC):
    """The tokens, how far they are read, and which brackets are open; what the grammar's layers call of each other."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._bars = 0  # open |
        self._square = 0  # open square brackets, which `[` may close: [0, 1[
        self._depth = 0
        self._depth_of_angle = 0

    @abstractmethod
    def answers(self) -> Node:
        """Return one answer, or the list of several."""

    @abstractmethod
    def _relation(self) -> Node:
        """Return an expression, or several with relations between them."""

    @abstractmethod
    def _sum(self) -> Node:
        """Return a sum of terms."""

    @abstractmethod
    def _signed(self, inner: Callable[[], Node]) -> Node:
        """Return what `inner` reads, with the signs before it."""

    @abstractmethod
    def _with_unit(self, node: Node, currency: str) -> Node:
        """Return a node with the unit behind it."""

    @abstractmethod
    def _unit_starts(self, node: Node) -> bool:
        """Return whether what comes next, up to the end of the answer, is a unit of the number before it."""

    def at_end(self) -> bool:
        """Return whether all tokens are read."""
        return self._at >= len(self._tokens)

    def here(self) -> str:
        """Return the next token as a message names it."""
        return "its end" if self.at_end() else repr(self._tokens[self._at].text)

    def _peek(self, ahead: int = 0) -> Token:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else Token("sign", "")

    def _next(self) -> Token:
        token = self._peek()
        if self.at_end():
            raise Unreadable("its end")
        self._at += 1
        return token

    def _skip(self) -> bool:
        self._at += 1
        return True

    def _take(self, *texts: str) -> bool:
        token = self._peek()
        if token.text in texts and token.kind != "text" and not self.at_end():
            self._at += 1
            return True
        return False

    def _expect(self, *texts: str) -> str:
        token = self._peek()
        if not self._take(*texts):
            raise Unreadable(self.here())
        return token.text

    def _is(self, *texts: str) -> bool:
        token = self._peek()
        return token.kind != "text" and token.text in texts and not self.at_end()

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > 3 * MAX_NESTING:
            raise Unreadable("more nesting than is read")

    def _skip_group(self) -> None:
        depth = 0
        while True:
            token = self._next()
            depth += (token.text == "{") - (token.text == "}")
            if depth == 0:
                return

    def _name(self) -> str:
        """Return the tokens of a group, or of the next token, as one name."""
        start = self._at
        if self._is("{"):
            self._skip_group()
        else:
            self._next()
        return "".join(token.text for token in self._tokens[start : self._at] if token.text not in "{}")

    def _has_comma(self) -> bool:
        depth = 0
        for token in self._tokens[self._at :]:
            depth += (token.text in ("(", "[", "{", "{{")) - (token.text in (")", "]", "}", "}}"))
            if depth == 1 and token.text == ",":
                return True
            if depth == 0:
                return False
        return False

    def _has_bar(self) -> bool:
        """Return whether one `|` stands in the brackets that come: `P(A|B)`."""
        depth = bars = 0
        for token in self._tokens[self._at :]:
            depth += (token.text in ("(", "[", "{", "{{")) - (token.text in (")", "]", "}", "}}"))
            bars += depth == 1 and token.text == "|"
            if depth == 0:
                break
        return bars == 1

    def _is_definition(self) -> bool:
        """Return whether a letter in brackets comes, and an equals sign: `p(x) = ...`."""
        at = 1
        while self._peek(at).kind in ("word", "command") and self._peek(at + 1).text == ",":
            at += 2
        return (
            self._peek(at).kind in ("word", "command")
            and self._peek(at + 1).text == ")"
            and self._peek(at + 2).text in ("=", "approx")
        )
