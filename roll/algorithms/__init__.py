"""Pure maths of the algorithms: tensors in, tensors out. Knows masks and denominators, never config objects.

`advantages` and `losses` hold the registries; `docs/algorithms.md` maps YAML names to functions, formulas and papers.
"""
