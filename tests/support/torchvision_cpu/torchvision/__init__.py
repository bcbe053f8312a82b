"""PyPI's torchvision, which is built for CUDA, made importable beside a torch for CPUs: put the parent of this folder
before it on PYTHONPATH.

Without its compiled part the import fails because two operators aren't declared that it describes. Declared, everything
in plain torch works (transforms); decoding files and the compiled operators don't.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch

_declared = torch.library.Library("torchvision", "DEF")
_declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_here = Path(__file__).parents[1]
_real = PathFinder.find_spec(__name__, [path for path in sys.path if Path(path or ".").resolve() != _here.resolve()])
assert _real is not None and _real.origin is not None, "torchvision isn't installed"
__path__ = list(_real.submodule_search_locations or ())
__spec__.submodule_search_locations = __path__
__file__ = _real.origin
exec(compile(Path(__file__).read_text("utf-8"), __file__, "exec"))
