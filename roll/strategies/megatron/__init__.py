"""Training on Megatron-core: tensor, pipeline, context and expert parallelism (arXiv:1909.08053, arXiv:2104.04473)."""

import logging

_megatron = logging.getLogger("megatron")
if _megatron.level == logging.NOTSET:
    # At INFO it prints all of its options and every parameter's name; who wants that sets a level before.
    _megatron.setLevel(logging.WARNING)
