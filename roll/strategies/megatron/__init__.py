"""Training on Megatron-core: tensor, pipeline, context and expert parallelism (arXiv:1909.08053, arXiv:2104.04473)."""
