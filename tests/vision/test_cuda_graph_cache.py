"""Calls as CUDA graphs: what a replay gives is what the call gives."""

from __future__ import annotations

import pytest
import torch

from modelmill.models import sam
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.registry import select_backends
from modelmill.vision import cuda_graph_cache
from modelmill.vision.cuda_graph_cache import CudaGraphCache
from modelmill.vision.prompts import Prompt, make_prompt
from modelmill.vision.sam_model import SamModel
from tests.models.sam_seeded import small_state
from tests.models.test_sam import make_model


def test_off_it_calls() -> None:
    calls = []

    def call(x: torch.Tensor) -> tuple[torch.Tensor]:
        calls.append(x)
        return (x + 1,)

    off = CudaGraphCache(enabled=False)
    for _ in range(3):
        assert float(off("add", call, torch.ones(1))[0]) == 2
    assert len(calls) == 3
    assert len(off) == 0


@pytest.mark.gpu
def test_replays_are_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph_cache, "MAX_GRAPHS", 2)
    calls = []

    def call(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(x.shape)
        return x @ y, x.sum()

    on = CudaGraphCache(enabled=True)
    generator = torch.Generator("cuda").manual_seed(0)
    for turn in range(4):
        for rows in (3, 5):
            x = torch.randn(rows, 4, device="cuda", generator=generator)
            y = torch.randn(4, 2, device="cuda", generator=generator)
            product, total = on("product", call, x, y)
            assert torch.allclose(product, x @ y, atol=1e-5)
            assert torch.allclose(total, x.sum(), atol=1e-5)
            if turn == 0:
                assert len(on) == 0  # asked for once
    assert len(on) == 2
    num_calls = len(calls)
    on("product", call, torch.ones(3, 4, device="cuda"), torch.ones(4, 2, device="cuda"))
    assert len(calls) == num_calls
    on("other", call, torch.ones(3, 4, device="cuda"), torch.ones(4, 2, device="cuda"))
    assert len(on) == 1  # the one used longest ago went


@pytest.mark.gpu
def test_what_waits_for_the_host_is_called() -> None:
    def call(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * float(x.sum()),)

    on = CudaGraphCache(enabled=True)
    x = torch.full((2,), 3.0, device="cuda")
    for _ in range(3):
        assert on("waits", call, x)[0].tolist() == [18.0, 18.0]
    assert not on.enabled


@pytest.mark.gpu
def test_a_model_with_graphs_computes_what_one_without_computes() -> None:
    model = make_model(small_state(), device="cuda")
    models = [
        SamModel(model, VisionContext(select_backends("cuda")), sam.IMAGE_MEAN, sam.IMAGE_STD)
        for _ in range(2)
    ]
    models[1].cuda_graph_cache.enabled = False
    pictures = [torch.randint(0, 256, (100, 160, 3), dtype=torch.uint8) for _ in range(11)]
    prompts = [
        make_prompt([(20.0, 30.0)]),
        Prompt(box=(10.0, 10.0, 90.0, 70.0)),
        make_prompt([(50.0, 60.0)]),
        make_prompt([(5.0, 6.0)]),
    ]
    for part in (pictures[:9], pictures[9:], pictures[:1]):
        for sam_model in models:
            sam_model.embedding_cache.clear()
        embeddings = [sam_model.embed_images(part) for sam_model in models]
        for one, other in zip(*embeddings, strict=True):
            assert torch.allclose(one.embedding, other.embedding, atol=1e-4)
            for first, second in zip(
                *(sam_model.predict_all(one, prompts) for sam_model in models), strict=True
            ):
                assert [m.score for m in first] == pytest.approx(
                    [m.score for m in second], abs=1e-4
                )
                for mask, plain in zip(first, second, strict=True):
                    assert float((mask.pixels == plain.pixels).float().mean()) > 0.999
    assert len(models[0].cuda_graph_cache) >= 3
    assert len(models[1].cuda_graph_cache) == 0
