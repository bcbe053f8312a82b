r"""Whether two mathematical answers are equal: read in whole, or compared as text.

`tokens.py` splits an answer once, `grammar.py` reads the tokens into an expression or says which one it can't read,
`evaluation.py` computes an expression exactly or to 60 digits, `units.py` knows what may stand behind a number, and
`comparison.py` decides. The length of answers, their nesting, the size of numbers and the number of comparisons are
bounded, so nothing needs a process of its own.
"""
