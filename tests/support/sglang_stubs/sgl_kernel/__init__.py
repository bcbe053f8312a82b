"""Stand-in for SGLang's CPU kernels: the names it imports, none of which plain generation calls.

SGLang imports these at module level once SGLANG_USE_CPU_ENGINE is set; all belong to speculative decoding. Norms,
rotary embeddings, attention and sampling fall back to SGLang's own torch code, so no number comes from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NAMES = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


def _missing(name: str) -> Callable[..., Any]:
    def kernel(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{name} needs SGLang's compiled CPU kernels, which this stand-in doesn't have")

    return kernel


globals().update({name: _missing(name) for name in _NAMES})
