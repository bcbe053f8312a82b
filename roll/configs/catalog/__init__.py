"""What there is of each kind of thing, one table per kind.

An entry says all that configuration, documentation and workers must know of a thing. What implements it is named by a
path and imported where it is used, so importing a table loads nothing.
"""
