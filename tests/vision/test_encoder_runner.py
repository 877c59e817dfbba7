"""What the engine makes of pictures: batches, what is kept, and on a GPU the same through recorded
graphs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from modelmill.core.config import RunConfig
from modelmill.core.types import ImageEmbeddingSpan, Request, SamplingParams
from modelmill.eval.bench_targets import greedy_request
from modelmill.loader.model_loader import build_model
from modelmill.nn.linear import Linear
from modelmill.nn.synthetic_step import fill_random_weights
from modelmill.nn.vision_context import VisionContext
from modelmill.ops.registry import Ops, select_backends
from modelmill.runtime.cuda_graphs import DecodeGraphs
from modelmill.runtime.engine_core import EngineCore
from modelmill.vision.encoder_runner import MAX_BATCH, VisionEncoderRunner
from modelmill.weights import base

SIDE, QUERIES, WIDTH = 4, 2, 3
TINY = {
    "vision_encoder": {
        "width": 176,
        "depth": 3,
        "heads": 2,
        "inner": 320,
        "image": 56,
        "patch": 14,
    },
    "qformer": {
        "width": 64,
        "depth": 4,
        "heads": 4,
        "inner": 96,
        "image_width": 176,
        "cross_attention_frequency": 2,
        "queries": 8,
    },
}
PUBLISHED: dict[str, dict[str, int]] = {"vision_encoder": {}, "qformer": {}}


class FakeVisionModel(nn.Module):
    """A model whose embeddings are the image's mean; it counts the images."""

    image_size, image_tokens = SIDE, QUERIES

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def encode_images(self, pictures: torch.Tensor, ops: Ops) -> torch.Tensor:
        """[B, 3, S, S] → [B, QUERIES, WIDTH]."""
        assert pictures.shape[1:] == (3, SIDE, SIDE)
        self.batches.append(len(pictures))
        return pictures.float().mean((1, 2, 3))[:, None, None].expand(-1, QUERIES, WIDTH)


def image_request(*pictures: Any, salt: str = "") -> Request:
    inserts = tuple(
        ImageEmbeddingSpan(i * QUERIES, QUERIES, f"digest{p.flat[0]}-{p.flat[1]}", p)
        for i, p in enumerate(pictures)
    )
    params = SamplingParams(max_tokens=1).with_defaults({})
    return Request(
        id="a", prompt=(0,) * 99, params=params, embedding_spans=inserts, cache_salt=salt
    )


def picture(value: int) -> np.ndarray:
    return np.full((SIDE, SIDE, 3), value, np.uint8)


def test_every_picture_is_read_once_in_batches() -> None:
    model = FakeVisionModel()
    runner = VisionEncoderRunner(model, select_backends("cpu"), "cpu")
    shown = [picture(i) for i in range(2 * MAX_BATCH + 3)]
    results = runner.replace_images_with_embeddings(
        [image_request(*shown[:5]), image_request(), image_request(*shown)]
    )
    assert model.batches == [MAX_BATCH, MAX_BATCH, 3]
    for request, images in zip(results, (shown[:5], [], shown), strict=True):
        assert [float(insert.handle[0, 0]) for insert in request.embedding_spans] == [
            float(p.mean()) for p in images
        ]
    again = runner.replace_images_with_embeddings([image_request(shown[7])])
    assert len(model.batches) == 3, "the picture was seen lately"
    assert torch.equal(again[0].embedding_spans[0].handle, results[2].embedding_spans[7].handle)
    runner.replace_images_with_embeddings([image_request(shown[7], salt="another tenant")])
    assert model.batches[3:] == [1], "what one tenant has shown is not known to another"


def test_only_the_latest_stay() -> None:
    model = FakeVisionModel()
    runner = VisionEncoderRunner(
        model, select_backends("cpu"), "cpu", cache_bytes=2 * QUERIES * WIDTH * 4
    )
    for value in (1, 2, 3, 2, 3, 1):
        runner.replace_images_with_embeddings([image_request(picture(value))])
    assert model.batches == [1, 1, 1, 1], "two have room; 1 was forgotten"
    assert runner.cached_bytes == 2 * QUERIES * WIDTH * 4


def test_what_is_lent_on_the_device_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    size = QUERIES * WIDTH * 4
    monkeypatch.setattr("modelmill.vision.encoder_runner.MAX_DEVICE_EMBEDDING_BYTES", 3 * size)
    runner = VisionEncoderRunner(FakeVisionModel(), select_backends("cpu"), "cpu")
    first = runner.encode_images([picture(1), picture(2)])
    assert len(runner._device_embeddings) == 2
    more = runner.encode_images([picture(3), picture(4)])
    assert len(runner._device_embeddings) == 2, "these went to the CPU"
    assert [float(each[0, 0]) for each in (*first, *more)] == [1, 2, 3, 4]
    del first
    again = runner.encode_images([picture(5), picture(6), picture(7)])
    assert len(runner._device_embeddings) == len(again) == 3


def config_of(sizes: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Of a MiniGPT-4 whose language model is small."""
    return {
        "model_type": "minigpt4", "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 96, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "image_embedder": sizes,
    }  # fmt: skip


def random_model(config: dict[str, Any]) -> Any:
    """A model in float32 on the CPU; its activations keep near 1."""
    model: Any = fill_random_weights(build_model("minigpt4", config), {}, torch.float32, "cpu")
    kernel = model.image_embedder.visual_encoder.patch_embed.proj.weight
    kernel *= kernel[0].numel() ** -0.5
    return model


def to_gpu(plain: Any, config: dict[str, Any], dtype: torch.dtype) -> Any:
    """The same model on the GPU in another type."""
    model: Any = build_model("minigpt4", config)
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            module.weight = base.pack_as_format(
                "dense", plain.get_submodule(name).weight.weight.to("cuda"), dtype
            )
    for name, buffer in list(plain.named_buffers()):
        parent, _, leaf = name.rpartition(".")
        is_float = name in ("mean", "std") or "ln_vision" in name
        setattr(model.get_submodule(parent), leaf, buffer.to("cuda", None if is_float else dtype))
    return model.eval()


def random_pictures(count: int, side: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return list(
        torch.randint(0, 256, (count, side, side, 3), dtype=torch.uint8, generator=generator)
    )


@pytest.fixture(scope="module", params=[TINY, PUBLISHED], ids=["tiny", "published"])
def known(
    request: pytest.FixtureRequest,
) -> tuple[Any, dict[str, Any], list[torch.Tensor], torch.Tensor]:
    """(a model on the CPU, its config, pictures, their embeddings in float32)."""
    config = config_of(request.param)
    plain = random_model(config)
    pictures = random_pictures(3, plain.image_size)
    with torch.inference_mode():
        expected = plain.encode_images(
            torch.stack(pictures).permute(0, 3, 1, 2), select_backends("cpu")
        )
    return plain, config, pictures, expected


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 2e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)],
    ids=str,
)
def test_on_a_gpu_as_in_float32_on_the_cpu(
    known: Any, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    plain, config, pictures, expected = known
    model, ops = to_gpu(plain, config, dtype), select_backends("cuda")
    for graphs in (True, False):
        embeddings = VisionEncoderRunner(model, ops, "cuda", graphs=graphs).encode_images(pictures)
        for actual, reference in zip(embeddings, expected, strict=True):
            off = float((actual.float().cpu() - reference).norm() / reference.norm())
            print(f"{dtype}, graphs {graphs}: off by {off:.3g}")
            assert off <= bound


@pytest.mark.gpu
def test_a_graph_serves_every_number_of_pictures() -> None:
    config = config_of(TINY)
    model, ops = to_gpu(random_model(config), config, torch.bfloat16), select_backends("cuda")
    runner, plain = (
        VisionEncoderRunner(model, ops, "cuda", graphs=True),
        VisionEncoderRunner(model, ops, "cuda"),
    )
    runner.warm_up(2)
    for count in (1, 2, 3, 7, 16, 5, 1):
        pictures = random_pictures(count, 56)
        alone = [plain.encode_images([each])[0] for each in pictures]
        for actual, reference in zip(runner.encode_images(pictures), alone, strict=True):
            assert (
                float((actual.float() - reference.float()).norm() / reference.float().norm()) < 2e-2
            )


@pytest.mark.gpu
def test_an_op_that_waits_for_the_host_is_launched_instead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_of(TINY)
    model, ops = to_gpu(random_model(config), config, torch.float32), select_backends("cuda")
    expected = VisionEncoderRunner(model, ops, "cuda").encode_images(random_pictures(1, 56))

    def waiting(images: torch.Tensor, vision: VisionContext) -> torch.Tensor:
        assert torch.isfinite(images.sum()).item()
        output: torch.Tensor = type(model.image_embedder).forward(
            model.image_embedder, images, vision
        )
        return output

    model.image_embedder.forward = waiting
    with caplog.at_level("WARNING"):
        output = VisionEncoderRunner(model, ops, "cuda", graphs=True).encode_images(
            random_pictures(1, 56)
        )
    assert torch.equal(output[0], expected[0])
    assert "without CUDA graphs" in caplog.text


def run_requests(graphs: bool) -> list[int | None]:
    """Tokens of two requests with a picture each."""
    config = config_of(TINY)
    run = RunConfig(kv_cache_bytes=1 << 22, max_model_len=128, device="cuda", cuda_graphs=graphs)
    engine_core = EngineCore(
        to_gpu(random_model(config), config, torch.bfloat16), run, max_model_len=128
    )
    tokens: list[int | None] = []
    for number, each in enumerate(random_pictures(2, 56)):
        request = greedy_request(str(number), [*range(1, 20), *[0] * 8, *range(20, 40)], 12)
        engine_core.add(
            replace(
                request, embedding_spans=(ImageEmbeddingSpan(19, 8, str(number), each.numpy()),)
            )
        )
        while engine_core.has_work:
            tokens += [token.token_id for token in engine_core.step()]
    return tokens


@pytest.mark.gpu
def test_an_answer_after_a_picture_is_decoded_by_graphs() -> None:
    with mock.patch.object(
        DecodeGraphs, "replay", autospec=True, side_effect=DecodeGraphs.replay
    ) as replayed:
        ids = run_requests(graphs=True)
    assert replayed.call_count >= 2 * 11, "all tokens but the first of each answer"
    assert ids == run_requests(graphs=False)
    assert len(ids) == 24
