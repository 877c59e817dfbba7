"""What GPT-2's and Qwen v1's checkpoints name alike: layers in ``transformer.h``."""

from __future__ import annotations

PREFIXES = ("transformer.",)
LAYERS = "transformer.h"
LAYER_NAMES = {
    "attn_norm": ("ln_1",),
    "attn.qkv_proj": ("attn.c_attn",),
    "attn.o_proj": ("attn.c_proj",),
    "mlp_norm": ("ln_2",),
    "mlp.down_proj": ("mlp.c_proj",),
}
"""Module of a layer → its names in the checkpoint."""
