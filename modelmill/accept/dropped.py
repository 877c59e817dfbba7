"""Tensors of a checkpoint that no one multiplied with, and why each of them does not matter.

The reference remembers what it read. What is left was dropped by the build, or the build would have named it: computed
buffers that old files save (compared with what is computed), copies (compared), and parts that these models do not use.
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

from modelmill.accept.reference import Reference
from modelmill.accept.reference.reader import ReaderReference
from modelmill.accept.reference.sam import SamReference

NEAR: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-7}
"""Of computed numbers that a file may hold in 16 bits: bfloat16 keeps 3 digits, float16 steps of 6e-8."""
MASKED = -1e3  # a score that hides a key: −1e4 in the originals
SHOWN = 3

Check = Callable[[Tensor], bool]
Kinds = Mapping[str, tuple[str, Check]]
"""Regular expression for names → what it is, and whether its values say so, too."""


def dropped_of_language(reference: Reference) -> list[dict[str, Any]]:
    """Rows on what the reference of a language model did not read; see ``row_of``."""
    kinds: Kinds = {
        r"(.*\.)?rotary_emb\.inv_freq": ("rotary frequencies, computed", lambda t: _frequencies(reference, t)),
        r"(.*\.)?attn\.masked_bias": ("a mask's score, computed", lambda t: t.numel() == 1 and float(t) <= MASKED),
        r"(.*\.)?attn\.bias": ("a causal mask, computed", _causal),
        r"(.*\.)?logn_tensor": ("logn factors, computed", lambda t: _logn(reference, t)),
        r".*\.bias": ("biases of zero beside packed matrices", lambda t: not bool(t.any())),
    }
    source = reference.source
    return _rows(source.unread(), source.container.get, kinds)


def dropped_of_eyes(reference: ReaderReference) -> list[dict[str, Any]]:
    """The same for MiniGPT-4's and BLIP-2's eyes."""
    last = int(reference.tower["depth"])
    unused: tuple[tuple[str, str], ...] = (
        (rf"(visual_encoder\.)?blocks\.{last}\..*", "the tower's block behind the last that is used"),
        (r"(visual_encoder\.)?(norm|fc_norm|head)\..*", "the tower's head for classes"),
        (r"Qformer\.bert\.embeddings\.(word|position)_embeddings\..*", "the Q-Former's embeddings of text"),
        (r"Qformer\.bert\.encoder\.layer\.\d+\.(intermediate|output)\..*", "the Q-Former's branch for text"),
        (r"Qformer\.(cls|bert\.pooler)\..*", "the Q-Former's head for text"),
        (r"(vision_proj|text_proj|itm_head|t5_proj|opt_proj)\..*|temp", "heads of the Q-Former's training"),
    )
    kinds: dict[str, tuple[str, Check]] = {pattern: (what, lambda _: True) for pattern, what in unused}
    kinds[r".*\.position_ids"] = ("positions, counted", _counted)
    source = reference.source
    return _rows([n for n in source.unread() if not n.startswith("llama_model.")], source.container.get, kinds)


def dropped_of_sam(reference: SamReference, other: SamReference) -> list[dict[str, Any]]:
    """The same for SAM and MobileSAM; other: a second reference that may have read what the first did not."""
    matrix = reference.get("prompt_encoder.pe_layer.positional_encoding_gaussian_matrix")
    kinds: Kinds = {
        r"prompt_encoder\.shared_embedding\.positional_embedding": (
            "the Fourier matrix once more", lambda t: torch.equal(t.float(), matrix),
        ),
        r".*\bpixel_mean": ("the pixels' mean, known", lambda t: _is(t, (123.675, 116.28, 103.53))),
        r".*\bpixel_std": ("the pixels' deviation, known", lambda t: _is(t, (58.395, 57.12, 57.375))),
        r".*image_encoder\.(norm_head|head)\..*": ("MobileSAM's head for classes", lambda _: True),
        r".*\.num_batches_tracked": ("a counter of training", lambda _: True),
        r".*\.attention_bias_idxs": ("distances in a window, computed", _distances),
        r".*\.ab": ("gathered biases of attention", lambda t: t.dim() == 3),
    }  # fmt: skip
    unread = set(reference.source.unread()) & set(other.source.unread())
    return _rows(unread, reference.source.container.get, kinds)


def with_dropped(report: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The report with what was dropped; refused where something was that may matter."""
    report = report | {"dropped": [*report.get("dropped", []), *rows]}
    bad = next((row for row in rows if not row["ok"]), None)
    if bad is None or not report["accepted"]:
        return report
    more = f" and {bad['count'] - 1} more" if bad["count"] > 1 else ""
    verdict = f"a tensor that is not used may matter: {bad['names'][0]}{more}"
    reason = f"{verdict} ({bad['what']}); does config.json belong to these weights?"
    return report | {"accepted": False, "verdict": verdict, "reason": reason}


def _rows(names: Iterable[str], get: Callable[[str], Tensor], kinds: Kinds) -> list[dict[str, Any]]:
    """One row a kind of tensor and outcome: {"what", "count", "names" (the first few), "ok"}."""
    found: dict[tuple[str, bool], list[str]] = {}
    for name in sorted(names):
        what, ok = "nobody reads it", False
        for pattern, (label, check) in kinds.items():
            if re.fullmatch(pattern, name):
                ok = check(get(name))
                what = label if ok else f"{label}, but with other values"
                break
        found.setdefault((what, ok), []).append(name)
    return [
        {"what": what, "count": len(group), "names": group[:SHOWN], "ok": ok} for (what, ok), group in found.items()
    ]


def _near(tensor: Tensor, expected: Tensor) -> bool:
    return tensor.numel() == expected.numel() and torch.allclose(tensor.flatten().float(), expected.float(), **NEAR)


def _frequencies(reference: Reference, tensor: Tensor) -> bool:
    """Those of the config's rotation, scaled or not: files of both kinds were written."""
    rope = getattr(reference, "rope", None)
    if rope is None:
        return False
    plain = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2) / rope.dim)
    return _near(tensor, plain) or _near(tensor, rope.frequencies(1, 1, torch.float32)[0])


def _causal(tensor: Tensor) -> bool:
    """[…, n, n]: every position sees itself and those before it."""
    square = tensor.reshape(-1, *tensor.shape[-2:])[0] if tensor.dim() >= 2 else tensor[None]
    count = square.shape[-1]
    return tensor.numel() == count * count and torch.equal(square != 0, torch.ones(count, count).tril() != 0)


def _logn(reference: Reference, tensor: Tensor) -> bool:
    length = getattr(reference, "seq_length", None)
    if length is None:
        return False
    place = torch.arange(1, tensor.numel() + 1, dtype=torch.float64)
    return _near(tensor, torch.where(place > length, place.log() / math.log(length), 1.0))


def _counted(tensor: Tensor) -> bool:
    return torch.equal(tensor.flatten().long(), torch.arange(tensor.numel()))


def _is(tensor: Tensor, values: tuple[float, ...]) -> bool:
    return _near(tensor, torch.tensor(values))


def _distances(tensor: Tensor) -> bool:
    """[w², w²]: between two places of a window, |Δy| · w + |Δx|."""
    side = math.isqrt(tensor.shape[0])
    places = torch.tensor(list(product(range(side), repeat=2)))
    apart = (places[:, None] - places[None]).abs()
    return torch.equal(tensor.long(), apart[..., 0] * side + apart[..., 1])
