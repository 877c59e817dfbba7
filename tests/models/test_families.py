"""Every family against an independent float32 reference: logits within 1e-4, prefill and decode,
alone and mixed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.builder.build_engine import build
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.runtime.engine_core import EngineCore
from tests.accept.build_and_accept import QWEN as SMALL_QWEN
from tests.accept.qwen_v1_plain import plain_qwen_logits, seeded_qwen
from tests.hypothesis_examples import examples
from tests.models.tiny_models import FAMILIES, save_hf, save_raw

LENGTHS = (1, 7, 33, 70)
QWEN = {**SMALL_QWEN, "seq_length": 32, "max_position_embeddings": 32}


def engine(folder: Path, out: Path, **build_options: object) -> EngineCore:
    """Build without acceptance (these tests are the judge) and open."""
    build(
        make_build_plan(
            open_checkpoint(folder), BuildConfig(dtype="float32", target="cpu", **build_options)
        ),
        out,
        None,
    )
    return EngineCore.open(
        out, RunConfig(device="cpu", max_num_batched_tokens=32, kv_cache_bytes=1 << 22)
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """Chunked prefill of a mixed batch, then decode, through the pages."""
    model = save_hf(name, tmp_path / "hf")
    loop = engine(tmp_path / "hf", tmp_path / "e")
    draw = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 160, (n,), generator=draw).tolist() for n in LENGTHS]
    if name == "llama-dynamic":
        # beyond max_position_embeddings=40 the rotation depends on the length of the whole prompt
        _compare_whole(model, loop, ids)
        return
    for actual, row in zip(
        TeacherForcedScorer(loop).compute_logits(ids, decode_from=5), ids, strict=True
    ):
        with torch.no_grad():
            expected = model(torch.tensor([row])).logits[0]
        assert (actual - expected).abs().max() < 1e-4
    _compare_whole(model, loop, ids)


def _compare_whole(model: torch.nn.Module, loop: EngineCore, ids: list[list[int]]) -> None:
    for actual, row in zip(TeacherForcedScorer(loop).compute_logits(ids), ids, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([row])).logits[0]
        assert (actual - expected).abs().max() < 1e-4


def test_dynamic_ntk_decodes_as_transformers(tmp_path: Path) -> None:
    """LLaMA's "dynamic" scaling: each decoded token past the trained length gets a base of its
    own.
    """
    model = save_hf("llama-dynamic", tmp_path / "hf")
    loop = engine(tmp_path / "hf", tmp_path / "e")
    ids = torch.randint(0, 160, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    actual = TeacherForcedScorer(loop).compute_logits([ids], decode_from=35)[0]
    with torch.no_grad():
        out = model(torch.tensor([ids[:35]]), use_cache=True)
        rows = [out.logits[0]]
        for token in ids[35:]:
            out = model(
                torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True
            )
            rows.append(out.logits[0])
    assert (actual - torch.cat(rows)).abs().max() < 1e-4


@pytest.mark.parametrize(
    "switches", [{}, {"use_dynamic_ntk": False}, {"use_logn_attn": False}], ids=str
)
def test_qwen_v1_at_every_length(switches: dict[str, bool], tmp_path: Path) -> None:
    """0.5, 1, 1.5, 3 and in ``make test-all`` 5 × seq_length, alone and mixed in one batch, prompt
    and decode across the boundaries.
    """
    config = (
        QWEN
        | switches
        | ({} if switches.get("use_dynamic_ntk", True) else {"max_position_embeddings": 256})
    )
    tensors = seeded_qwen(config, 1)
    folder = save_raw(tmp_path / "hf", tensors, config)
    loop = engine(folder, tmp_path / "e", max_model_len=200)
    draw = torch.Generator().manual_seed(4)
    prompts = [int(f * 32) for f in (0.5, 1, 1.5, 3, 5)[: examples(full=5, quick=4)]]
    ids = [torch.randint(0, 120, (n + 9,), generator=draw).tolist() for n in prompts]
    expected = [
        plain_qwen_logits(tensors, config, row, prompt=n)
        for row, n in zip(ids, prompts, strict=True)
    ]
    alone = [
        TeacherForcedScorer(loop).compute_logits([row], decode_from=n)[0]
        for row, n in zip(ids, prompts, strict=True)
    ]
    mixed = TeacherForcedScorer(loop).compute_logits(ids, decode_from=prompts)
    for one, many, logits in zip(alone, mixed, expected, strict=True):
        assert (one - logits).abs().max() < 1e-4
        assert (many - logits).abs().max() < 1e-4


def test_old_qwen_keys_are_accepted(tmp_path: Path) -> None:
    """The first release's config names, and hub files without the ``transformer.`` prefix."""
    tensors = seeded_qwen(QWEN, 1)
    old = dict(QWEN)
    for new, was in {"hidden_size": "n_embd", "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
                     "intermediate_size": "ffn_hidden_size",
                     "max_position_embeddings": "n_positions",
                     "vocab_size": "padded_vocab_size"}.items():  # fmt: skip
        old[was] = old.pop(new)
    bare = {k.removeprefix("transformer."): v for k, v in tensors.items()}
    loop = engine(save_raw(tmp_path / "hf", bare, old), tmp_path / "e")
    ids = list(range(20))
    expected = plain_qwen_logits(tensors, QWEN, ids, prompt=20)
    assert (TeacherForcedScorer(loop).compute_logits([ids])[0] - expected).abs().max() < 1e-4
