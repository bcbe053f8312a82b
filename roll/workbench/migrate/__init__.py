"""Configurations of other systems as configurations of this one: `roll migrate`. Nothing that is read is ever run."""
