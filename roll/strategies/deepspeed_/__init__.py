"""Parts of `roll.strategies.deepspeed` that each stand alone."""
