"""Explains the tensors of a checkpoint that the reference did not use.

The reference records what it reads. The rest was dropped by the build: computed buffers in old
files (compared with computed values), copies (compared), and parts that these models do not use.
Anything else means that a drop rule is too wide, and the engine is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor

from modelmill.accept.reference import ReferenceModel
from modelmill.accept.reference.minigpt4_vision import MiniGpt4VisionReference
from modelmill.accept.reference.sam import SamReference

ALLCLOSE_TOLERANCES: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-7}
"""For computed values that a file may store in 16 bits.

bfloat16 keeps 3 digits, float16 steps of 6e-8.
"""
MAX_MASKED_ATTENTION_BIAS = -1e3  # a score that masks a key: −1e4 in the originals
MAX_NAMES_SHOWN = 3

ValueCheck = Callable[[Tensor], bool]
HarmlessPatterns = Mapping[str, tuple[str, ValueCheck]]
"""Regular expression for names → what it is, and a check of its values."""


def explain_unused_language_tensors(reference: ReferenceModel) -> list[dict[str, Any]]:
    """Return rows on the tensors that a language reference did not read.

    See ``tolerance_check_to_json``.
    """
    patterns: dict[str, tuple[str, ValueCheck]] = {
        r"(.*\.)?rotary_emb\.inv_freq": (
            "rotary frequencies, computed",
            lambda t: _is_rope_frequencies(reference, t),
        ),
        r"(.*\.)?attn\.masked_bias": (
            "a mask's score, computed",
            lambda t: t.numel() == 1 and float(t) <= MAX_MASKED_ATTENTION_BIAS,
        ),
        r"(.*\.)?attn\.bias": ("a causal mask, computed", _is_causal_mask),
        r"(.*\.)?logn_tensor": ("logn factors, computed", lambda t: _is_logn_table(reference, t)),
        r".*\.bias": ("biases of zero beside packed matrices", lambda t: not bool(t.any())),
    }
    source = reference.source
    unread = source.unread_tensor_names()
    own: dict[str, tuple[str, ValueCheck]] = {
        pattern: (what, lambda _: True)
        for pattern, what in reference.unused_tensor_patterns().items()
    }
    # the first pattern that fits counts: a layer that predicts may have biases, too
    known = {**_harmless_mtp_patterns(unread, reference.num_layers), **own, **patterns}
    return _summarize_unused_tensors(unread, source.container.get, known)


def _harmless_mtp_patterns(unread: Iterable[str], num_layers: int) -> HarmlessPatterns:
    """Return the pattern of the layer behind the last, where it is one that predicts (2412.19437).

    Its matrix ``eh_proj`` joins a token's embedding with the hidden state before it.
    """
    layer = rf"(model\.layers|blk)\.{num_layers}\."
    if not any(re.fullmatch(layer + r"(nextn\.)?eh_proj\.weight", name) for name in unread):
        return {}
    return {layer + ".*": ("the layer of multi-token prediction", lambda _: True)}


def explain_unused_vision_tensors(reference: MiniGpt4VisionReference) -> list[dict[str, Any]]:
    """Return the same for MiniGPT-4's and BLIP-2's vision encoders."""
    last = int(reference.vision_config["depth"])
    unused: tuple[tuple[str, str], ...] = (
        (
            rf"(visual_encoder\.)?blocks\.{last}\..*",
            "the vision encoder's block behind the last that is used",
        ),
        (r"(visual_encoder\.)?(norm|fc_norm|head)\..*", "the vision encoder's head for classes"),
        (
            r"Qformer\.bert\.embeddings\.(word|position)_embeddings\..*",
            "the Q-Former's embeddings of text",
        ),
        (
            r"Qformer\.bert\.encoder\.layer\.\d+\.(intermediate|output)\..*",
            "the Q-Former's branch for text",
        ),
        (r"Qformer\.(cls|bert\.pooler)\..*", "the Q-Former's head for text"),
        (
            r"(vision_proj|text_proj|itm_head|t5_proj|opt_proj)\..*|temp",
            "heads of the Q-Former's training",
        ),
    )
    patterns: dict[str, tuple[str, ValueCheck]] = {
        pattern: (what, lambda _: True) for pattern, what in unused
    }
    patterns[r".*\.position_ids"] = ("positions, counted", _is_arange)
    source = reference.source
    return _summarize_unused_tensors(
        [n for n in source.unread_tensor_names() if not n.startswith("llama_model.")],
        source.container.get,
        patterns,
    )


def explain_unused_sam_tensors(
    reference: SamReference, other: SamReference
) -> list[dict[str, Any]]:
    """Return the same for SAM and MobileSAM.

    other: a second reference; a tensor that it read counts as read.
    """
    matrix = reference.get("prompt_encoder.pe_layer.positional_encoding_gaussian_matrix")
    patterns: HarmlessPatterns = {
        r"prompt_encoder\.shared_embedding\.positional_embedding": (
            "the Fourier matrix once more", lambda t: torch.equal(t.float(), matrix),
        ),
        r".*\bpixel_mean": ("the pixels' mean, known",
        lambda t: _is_close_to_values(t, (123.675, 116.28, 103.53))),
        r".*\bpixel_std": ("the pixels' deviation, known",
        lambda t: _is_close_to_values(t, (58.395, 57.12, 57.375))),
        r".*image_encoder\.(norm_head|head)\..*": ("MobileSAM's head for classes", lambda _: True),
        r".*\.num_batches_tracked": ("a counter of training", lambda _: True),
        r".*\.attention_bias_idxs": ("distances in a window, computed", _is_window_distance_table),
        r".*\.ab": ("gathered biases of attention", lambda t: t.dim() == 3),
    }  # fmt: skip
    unread = set(reference.source.unread_tensor_names()) & set(other.source.unread_tensor_names())
    return _summarize_unused_tensors(unread, reference.source.container.get, patterns)


def apply_unused_tensor_verdict(
    report: dict[str, Any], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Add the dropped tensors to the report; refuse the engine if one may matter."""
    report = report | {"unused_tensors": [*report.get("unused_tensors", []), *rows]}
    bad = next((row for row in rows if not row["ok"]), None)
    if bad is None or not report["accepted"]:
        return report
    more = f" and {bad['count'] - 1} more" if bad["count"] > 1 else ""
    verdict = f"a tensor that is not used may matter: {bad['names'][0]}{more}"
    reason = f"{verdict} ({bad['what']}); does config.json belong to these weights?"
    return report | {"accepted": False, "verdict": verdict, "reason": reason}


def _summarize_unused_tensors(
    names: Iterable[str], get: Callable[[str], Tensor], patterns: HarmlessPatterns
) -> list[dict[str, Any]]:
    """Summarize per pattern and outcome: {"what", "count", "names" (the first few), "ok"}."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in sorted(names):
        what, ok = "unused", False
        for pattern, (label, check) in patterns.items():
            if re.fullmatch(pattern, name):
                ok = check(get(name))
                what = label if ok else f"{label}, but with other values"
                break
        groups.setdefault((what, ok), []).append(name)
    return [
        {"what": what, "count": len(group), "names": group[:MAX_NAMES_SHOWN], "ok": ok}
        for (what, ok), group in groups.items()
    ]


def _is_close(tensor: Tensor, expected: Tensor) -> bool:
    return tensor.numel() == expected.numel() and torch.allclose(
        tensor.flatten().float(), expected.float(), **ALLCLOSE_TOLERANCES
    )


def _is_rope_frequencies(reference: ReferenceModel, tensor: Tensor) -> bool:
    """Return whether the tensor is the config's rotary frequencies, scaled or not."""
    rope = getattr(reference, "rope", None)
    if rope is None:
        return False
    plain = 1.0 / rope.theta ** (torch.arange(0, rope.rotary_dim, 2) / rope.rotary_dim)
    return _is_close(tensor, plain) or _is_close(tensor, rope.frequencies(1, 1, torch.float32)[0])


def _is_causal_mask(tensor: Tensor) -> bool:
    """Return whether […, n, n] is a causal mask."""
    square = tensor.reshape(-1, *tensor.shape[-2:])[0] if tensor.dim() >= 2 else tensor[None]
    count = square.shape[-1]
    return tensor.numel() == count * count and torch.equal(
        square != 0, torch.ones(count, count).tril() != 0
    )


def _is_logn_table(reference: ReferenceModel, tensor: Tensor) -> bool:
    length = getattr(reference, "seq_length", None)
    if length is None:
        return False
    place = torch.arange(1, tensor.numel() + 1, dtype=torch.float64)
    return _is_close(tensor, torch.where(place > length, place.log() / math.log(length), 1.0))


def _is_arange(tensor: Tensor) -> bool:
    return torch.equal(tensor.flatten().long(), torch.arange(tensor.numel()))


def _is_close_to_values(tensor: Tensor, values: tuple[float, ...]) -> bool:
    return _is_close(tensor, torch.tensor(values))


def _is_window_distance_table(tensor: Tensor) -> bool:
    """Return whether [w², w²] are window distances |Δy| · w + |Δx|."""
    side = math.isqrt(tensor.shape[0])
    places = torch.tensor(list(product(range(side), repeat=2)))
    apart = (places[:, None] - places[None]).abs()
    return torch.equal(tensor.long(), apart[..., 0] * side + apart[..., 1])
