r"""Whether two mathematical answers are equal: read in whole, or compared as text.

`tokens.py` splits an answer once, `grammar.py` reads the tokens into an expression or says which one it can't read,
`evaluation.py` computes an expression exactly or to 60 digits, `units.py` knows what may stand behind a number, and
`comparison.py` decides. Everything takes time linear in the answer's length but for bounded arithmetic.
"""
