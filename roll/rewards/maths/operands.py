r"""Numbers, letters, functions and LaTeX commands, with the powers and marks behind them."""

from __future__ import annotations

import re
from fractions import Fraction

from roll.rewards.maths.brackets import MARKS, UPRIGHT, VECTORS, Brackets
from roll.rewards.maths.nodes import Node, Unreadable, is_differential, negative, number, symbol
from roll.rewards.maths.tokens import GREEK, MAX_NESTING, Token, tokenise
from roll.rewards.maths.units import spelled_number, words

FUNCTIONS = frozenset(
    words(
        "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth sech csch arcsinh "
        "arccosh arctanh ln log lg exp sqrt cbrt abs floor ceil gcd lcm max min erf sgn sign Re Im arg det tr "
        "rank dim deg ker"
    )
)
_PLAIN_FUNCTIONS = {
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "arsinh": "arcsinh",
    "arcosh": "arccosh",
    "artanh": "arctanh",
    "ceiling": "ceil",
    "sign": "sgn",
}
_INVERSE = frozenset(["sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh"])
_CONSTANTS = {"pi": "pi", "infty": "infinity", "infinity": "infinity", "inf": "infinity", "oo": "infinity"}
_LETTERS = frozenset(["aleph", "beth", "top", "dagger", "ast", "star", "bot", "wp", "imath", "jmath"])
_APPLIED = frozenset(["f", "g", "h", "phi", "psi", "Phi", "Psi", "Gamma", "zeta", "theta", "delta", "Theta", "O", "o"])


class Operands(Brackets):
    """What stands between signs."""

    def _power(self) -> Node:
        node = self._postfix(self._operand())
        if self._is("^"):
            self._at += 1
            if self._take("circ", "degree"):
                return self._after_degrees(node)
            if self._is("{") and self._peek(1).text in ("circ", "degree") and self._peek(2).text == "}":
                self._at += 3
                return self._after_degrees(node)
            order = [self._peek(ahead).text for ahead in range(5)]
            if node.op == "symbol" and order[:2] == ["{", "("] and order[3:] == [")", "}"]:
                self._at += 5
                return self._postfix(symbol(f"{node.value}({order[2]})"))  # a derivative of that order
            exponent = self._exponent()
            if (
                node.op == "symbol"
                and exponent == negative(number(1))
                and self._is("(")
                and str(node.value) in _APPLIED
            ):
                node = symbol(f"{node.value}^-1")  # the inverse function
            else:
                node = Node("pow", (node, exponent))
            node = self._postfix(node)
        elif self._is("degree"):
            self._at += 1
            node = Node("degrees", (node,))
        return node

    def _after_degrees(self, node: Node) -> Node:
        """Return an angle, with minutes and seconds if they follow."""
        node = Node("degrees", (node,))
        for size, mark in ((60, "'"), (3600, "''")):
            if self._peek().kind == "number" and self._peek(1).text == mark:
                part = Node("div", (self._operand(), number(size)))
                self._at += 1
                node = Node("degrees", (Node("add", (node.args[0], part)),))
        return node

    def _exponent(self) -> Node:
        if self._is("-", "+"):
            return self._signed(self._exponent)
        mark = self._peek()
        if mark.text == "*" and self._peek(1).kind != "number" and self._skip():
            return symbol("*")  # an adjoint or a dual
        if self._is("{"):
            if self._peek(1).text in ("*", "+", "-") and self._peek(2).text == "}":
                self._at += 3
                return symbol(self._peek(-2).text)
            return self._group()
        node = self._operand()
        if self._is("^"):  # 2^3^2 is 2^9
            self._at += 1
            node = Node("pow", (node, self._exponent()))
        return self._postfix(node, factorials=False)

    def _postfix(self, node: Node, factorials: bool = True) -> Node:
        while True:
            if factorials and self._is("!") and not (self._peek(1).text == "=" and self._peek(1).space is False):
                self._at += 1
                double = self._is("!") and not self._peek().space
                self._at += double
                node = Node("factorial2" if double else "factorial", (node,))
            elif self._is("%"):
                self._at += 1
                node = Node("percent", (node,))
            elif self._is("_") and node.op in ("symbol", "number"):
                node = self._with_subscript(node)
            elif self._peek().text in ("'", "''", "'''") and node.op == "symbol" and self._peek().kind == "sign":
                node = symbol(str(node.value) + self._next().text)
            else:
                return self._applied(node)

    def _with_subscript(self, node: Node) -> Node:
        self._at += 1
        start = self._at
        self._argument_of_base()
        inner = "".join(token.text for token in self._tokens[start : self._at] if token.text not in "{}")
        if node.op == "symbol":
            return symbol(f"{node.value}_{inner}")
        base = int(inner) if inner.isdigit() else spelled_number(inner)
        value, decimal = node.value
        if base is None or not 2 <= base <= 36 or decimal or any(int(digit) >= base for digit in str(value)):
            raise Unreadable("'_'")
        return Node("based", (), (str(value), base))

    def _applied(self, node: Node) -> Node:
        """Return `f(x)` as an application, where it isn't a product."""
        if node.op != "symbol" or not self._is("("):
            return node
        name = str(node.value)
        bare = re.split("[_^'(]", name)[0]
        follows = [token.text for token in self._tokens[self._at : self._at + 4]]
        is_number = len(follows) > 2 and self._peek(1).kind == "number" and follows[2] == ")"
        defined = self._is_definition()
        if self._has_bar():
            return self._conditional(name)
        if not (bare in _APPLIED or "'" in name or is_number or defined or self._has_comma()):
            return node
        inner = self._group()
        items = inner.args if inner.op in ("tuple", "list") else (inner,)
        return Node("apply", items, name)

    def _is_function(self) -> bool:
        token = self._peek()
        return token.kind in ("command", "word") and (token.text in FUNCTIONS or token.text in _PLAIN_FUNCTIONS)

    def _starts_operand(self) -> bool:
        token = self._peek()
        if self.at_end() or token.kind in ("number", "text"):
            return False
        if token.kind == "word":
            return token.text.lower() not in ("and", "or", "mod", "if", "for", "to") and token.text != "U"
        if token.kind == "sign":
            if token.text == "|":
                return self._bars == 0
            if token.text == "[" and self._square:
                return False
            return token.text in ("(", "{", "[") and not (token.text == "(" and self._peek(1).text in ("bmod", "mod"))
        name = token.text
        return (
            name in FUNCTIONS
            or name in GREEK
            or name in _LETTERS
            or name in _CONSTANTS
            or name in VECTORS
            or name in MARKS
            or name in UPRIGHT
            or name
            in (
                "angle",
                "triangle",
                "sqrt",
                "cbrt",
                "frac",
                "binom",
                "surd",
                "lfloor",
                "lceil",
                "begin",
                "langle",
                "Re",
                "Im",
            )
        )

    def _operand(self) -> Node:
        token = self._peek()
        if token.kind == "number":
            return self._number()
        if token.kind == "hex":
            self._at += 1
            self._take(")")
            self._expect("_")
            self._argument_of_base()
            return Node("based", (), (token.text, 16))
        if token.kind == "word":
            return self._word()
        if token.kind == "text":
            return self._text()
        if token.kind == "command":
            return self._command()
        if token.text in ("(", "[", "]", "{{", "<"):
            return self._delimited()
        if token.text == "{":
            return self._group()
        if token.text == "|":
            return self._absolute()
        raise Unreadable(self.here())

    def _argument_of_base(self) -> None:
        if self._is("{"):
            self._skip_group()
        else:
            self._next()

    def _number(self) -> Node:
        token = self._next()
        text = token.text
        if not self._peek().space and re.fullmatch(r"\d*\.?\d*", text):
            repeating = self._repeating(text)
            if repeating is not None:
                return repeating
        mantissa, _, exponent = text.lower().partition("e")
        if exponent:
            return Node("mul", (number(Fraction(mantissa), True), Node("pow", (number(10), number(int(exponent))))))
        return number(Fraction(text), decimal="." in text)

    def _repeating(self, text: str) -> Node | None:
        r"""Return `0.1\overline{6}`, `0.\dot{1}4\dot{2}`, `0.(3)` or `0.333...` as the fraction that it is."""
        token = self._peek()
        if "." not in text and not (token.text == "." and self._peek(1).text in ("overline", "bar", "dot", "(")):
            return None
        at = self._at
        self._take(".")
        integer, _, digits = text.partition(".")
        if self._is("overline", "bar") or (self._is("(") and not digits):
            if self._peek().text != "(":
                self._at += 1
            block = self._digits_of_group()
        elif self._is("dot"):
            self._at += 1
            block = self._digits_of_group()
            if block and self._peek().kind == "number" and self._peek(1).text == "dot":
                block += self._next().text
            if block and self._is("dot"):
                self._at += 1
                block += self._digits_of_group()
        elif self._is("ldots") and len(digits) >= 3 and digits[-1] * 3 == digits[-3:]:
            self._at += 1
            block = digits[-1]
        elif (
            self._is("ldots")
            and len(digits) >= 4
            and len(digits) % 2 == 0
            and digits[:2] * (len(digits) // 2) == digits
        ):
            self._at += 1
            block, digits = digits[:2], ""
        else:
            block = ""
        if not block.isdigit() or len(block) > 50:
            self._at = at
            return None
        value = Fraction(int((integer or "0") + digits or "0"), 10 ** len(digits))
        return number(value + Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(digits)))

    def _digits_of_group(self) -> str:
        if self._peek().kind == "number":
            return self._next().text
        if self._is("{", "(") and self._peek(1).kind == "number" and self._peek(2).text in ("}", ")"):
            self._at += 3
            return self._tokens[self._at - 2].text
        return ""

    def _word(self) -> Node:
        token = self._next()
        word = token.text
        if word in _CONSTANTS:
            return Node("constant", (), _CONSTANTS[word])
        if word in FUNCTIONS or word in _PLAIN_FUNCTIONS:
            return self._function(_PLAIN_FUNCTIONS.get(word, word))
        if word in GREEK:
            return symbol(word)
        if len(word) > 3:
            for known in ("sqrt", "sin", "cos", "tan", "log", "ln", "pi"):  # xsin(x), 2pir
                if word.endswith(known) and len(word) - len(known) <= 2:
                    self._at -= 1
                    rest = [Token("word", word[: -len(known)], token.space), Token("word", known)]
                    self._tokens = [*self._tokens[: self._at], *rest, *self._tokens[self._at + 1 :]]
                    return self._word()
            raise Unreadable(repr(word))
        letters = [self._letter(letter) for letter in word]
        if len(letters) > 1:  # a power belongs to the last letter
            self._at -= 1
            rest = [Token("word", letter, token.space and not i) for i, letter in enumerate(word)]
            self._tokens = [*self._tokens[: self._at], *rest, *self._tokens[self._at + 1 :]]
            self._at += 1
        return letters[0]

    def _letter(self, letter: str) -> Node:
        return Node("constant", (), letter) if letter in ("e", "i") else symbol(letter)

    def _text(self) -> Node:
        token = self._next()
        value = spelled_number(token.text)
        if value is not None:
            return number(value)
        if not re.fullmatch(r"[A-Za-z ]*", token.text.strip("() .,")) and self._depth < MAX_NESTING:
            return self._inside_text(token.text)
        if token.text.strip(" .") in _CONSTANTS:
            return Node("constant", (), _CONSTANTS[token.text.strip(" .")])
        letter = token.text.strip("() .")
        if len(letter) == 1 and letter.isalpha():
            return symbol(letter)
        raise Unreadable(repr(token.text))

    def _inside_text(self, text: str) -> Node:
        parser = type(self)(tokenise(text))
        parser._depth = self._depth + 1
        node = parser.answers()
        if not parser.at_end():
            raise Unreadable(parser.here())
        return node

    def _command(self) -> Node:
        token = self._next()
        name = token.text
        if name in _CONSTANTS:
            return Node("constant", (), _CONSTANTS[name])
        if name in FUNCTIONS or name in _PLAIN_FUNCTIONS:
            return self._function(_PLAIN_FUNCTIONS.get(name, name))
        if name in GREEK or name in _LETTERS:
            return symbol(name)
        if name == "emptyset":
            return Node("set")
        if name in VECTORS or name in MARKS:
            return self._marked(name)
        if name in ("angle", "triangle"):
            return symbol(f"{name} {self._name()}")
        if name in ("lfloor", "lceil", "langle") or name in UPRIGHT:
            self._at -= 1
            return self._upright() if name in UPRIGHT else self._delimited()
        return self._with_arguments(name)

    def _with_arguments(self, name: str) -> Node:
        if name == "frac":
            return self._fraction()
        if name == "binom":
            return Node("binomial", (self._argument(), self._argument()))
        if name in ("sqrt", "surd", "cbrt"):
            return self._root(name)
        if name == "begin":
            return self._matrix()
        if name == "norm":
            inner = self._sum()
            self._expect("norm")
            return Node("apply", (inner,), "norm")
        raise Unreadable(repr("\\" + name))

    def _fraction(self) -> Node:
        over, under = self._argument(), self._argument()
        if is_differential(over) and is_differential(under):
            raise Unreadable(r"'\frac{d'")  # dy/dx is no quotient
        return Node("div", (over, under))

    def _root(self, name: str) -> Node:
        index = number(3 if name == "cbrt" else 2)
        if name == "sqrt" and self._take("["):
            index = self._sum()
            self._expect("]")
        if self._is("(", "{", "|"):
            return Node("root", (self._operand(), index))
        token = self._peek()
        if token.kind == "word" and len(token.text) > 1 and token.text not in _CONSTANTS:
            raise Unreadable(self.here())
        return Node("root", (self._operand(), index))

    def _argument(self) -> Node:
        """Return what a LaTeX command takes: a group, or one digit, letter or command."""
        if self._is("{"):
            return self._group()
        token = self._peek()
        if token.kind == "number" and token.text.isdigit() and len(token.text) > 1:
            rest = Token("number", token.text[1:])
            self._tokens = [
                *self._tokens[: self._at],
                Token("number", token.text[0]),
                rest,
                *self._tokens[self._at + 1 :],
            ]
        elif token.kind == "word" and len(token.text) > 1:
            self._word()
            self._at -= 1
        elif token.kind not in ("number", "word", "command"):
            raise Unreadable(self.here())
        return self._operand()

    def _function(self, name: str) -> Node:
        exponent: Node | None = None
        base: Node | None = None
        for _ in range(2):
            if name == "log" and self._take("_"):
                base = self._argument() if self._peek().kind != "number" else self._number()
            elif self._take("^"):
                exponent = self._exponent()
        if name in ("sqrt", "cbrt"):
            self._at -= exponent is not None
            return self._root(name)
        bare = not self._is("(", "{", "[", "|")
        argument = self._bare_argument() if bare else self._operand()
        items = argument.args if argument.op in ("tuple", "list") else (argument,)
        if exponent is not None and name in _INVERSE and exponent == negative(number(1)):
            name, exponent = "arc" + name, None
        items = (*items, base) if base is not None else items
        node = Node("call", tuple(items), (name, bare))
        return node if exponent is None else Node("pow", (node, exponent))

    def _bare_argument(self) -> Node:
        r"""Return the argument of `\sin 2x`: factors side by side, up to the next function."""
        node = self._signed(self._power) if self._is("-") else self._power()
        while (
            self._starts_operand()
            and not self._is_function()
            and not self._is("(", "[")
            and not self._unit_starts(node)
        ):
            node = Node("mul", (node, self._power()))
        return node

    def _upright(self) -> Node:
        name = self._upright_name()
        if name in FUNCTIONS or name in _PLAIN_FUNCTIONS:
            return self._function(_PLAIN_FUNCTIONS.get(name, name))
        if len(name) == 1 and name.isalpha():
            return self._letter(name)
        if re.fullmatch(r"\d+(\.\d+)?", name):
            return number(Fraction(name), "." in name)
        if re.fullmatch("[A-Z]{2,4}", name):
            return symbol(name)
        raise Unreadable(repr(name))
