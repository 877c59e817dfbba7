"""The benchmark of Segment Anything, with a model of two narrow layers."""

from __future__ import annotations

import torch

from benchmarks import sam


def test_a_click_and_an_embedding_become_rows() -> None:
    spec = sam.SamVitSpec(width=32, depth=2, heads=2, global_attn_indexes=(1,), inner=32)
    side = sam.modelmill_side("bfloat16", spec, "cpu", {})
    with torch.inference_mode():
        (row,) = sam.encoder_rows([side], [1], 1, "cpu")
        assert row["images_per_s"] == round(1e3 / row["value"], 2)
        click = sam.click_row(side, 2)
    assert click["work"] == "click"
    assert click["spread"]["runs"] == 2
    assert click["spread"]["min"] <= click["value"] <= click["spread"]["max"]


def test_a_dry_run_keeps_one_layer_of_the_whole_picture() -> None:
    assert sam.vit_h_spec(None) is sam.VIT_H
    assert (sam.vit_h_spec(3).depth, sam.vit_h_spec(3).global_attn_indexes) == (3, (2,))


def test_pictures_differ_by_seed() -> None:
    first, again, other = (sam.random_image(seed) for seed in (0, 0, 1))
    assert first.shape == (1200, 1800, 3)
    assert (first == again).all()
    assert (first != other).any()
