"""From the states in a checkpoint to a Hugging Face folder: on the CPU, in one process, whatever backend wrote them."""

from roll.strategies.merging.foreign import find_foreign, merge_foreign
from roll.strategies.merging.write_model import Merge, merge_states

__all__ = ["Merge", "find_foreign", "merge_foreign", "merge_states"]
