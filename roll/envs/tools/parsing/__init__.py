"""Tool calls in the text of a response: the same reading in training, validation and serving.

A response is hostile text: reading it takes linear time and bounded memory, and never raises.
"""

from roll.envs.tools.parsing.base import CallProblem, ParsedResponse
from roll.envs.tools.parsing.parse import parse_calls, split_thinking

__all__ = ["CallProblem", "ParsedResponse", "parse_calls", "split_thinking"]
