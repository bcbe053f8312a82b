"""How long a run would take with so many engines, in virtual time. Nothing else of `roll` imports this package."""
