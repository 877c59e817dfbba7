"""Segmentation engines are judged stage by stage: honest ones pass, planted faults are named,
overflow is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modelmill.accept.reference.sam import SamReference
from modelmill.accept.reference.sam_decoder import SamDecoderReference
from modelmill.accept.segmentation import compare_segmentation_engine, draw_sample_image
from modelmill.artifact.store import Artifact, open_artifact
from modelmill.checkpoint.open import Checkpoint, open_checkpoint
from modelmill.core.config import BuildConfig
from modelmill.core.errors import AcceptanceError
from modelmill.llm import build_engine
from modelmill.vision.sam_loader import open_sam_model
from modelmill.weights.base import from_tensors
from tests.models.sam_seeded import small_file, small_state, tiny_state

CASES = (
    *("float32", "float16", "bfloat16"),
    *("float32-int8", "float16-int8", "bfloat16-int8", "float32-fp8", "bfloat16-fp8"),
)


class MadeEngines(dict[str, tuple[Artifact, Checkpoint]]):
    """An engine in each dtype, plain and with each recipe; built and judged when first read."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._source = small_file(folder)

    def __missing__(self, case: str) -> tuple[Artifact, Checkpoint]:
        from modelmill.builder.plan import make_build_plan

        dtype, _, recipe = case.partition("-")
        config = BuildConfig(dtype=dtype, quantization=recipe or "none")
        engine = self._folder / f"{case}.engine"
        report = build_engine(self._source, engine, config)
        assert report["accepted"], report["reason"]
        plan = make_build_plan(open_checkpoint(self._source), config)
        self[case] = (open_artifact(engine), plan.checkpoint)
        return self[case]


@pytest.fixture(scope="module")
def built_engines(tmp_path_factory: pytest.TempPathFactory) -> MadeEngines:
    return MadeEngines(tmp_path_factory.mktemp("sam"))


@pytest.mark.parametrize("case", CASES)
def test_the_report_tells_of_embedding_masks_and_scores(built_engines: dict, case: str) -> None:
    artifact, _ = built_engines[case]
    dtype, _, recipe = case.partition("-")
    report = artifact.acceptance_report()
    masks = report["masks"]
    assert report["verdict"] == "rounding differences only"
    assert 0 < masks["embedding_rel_l2"] < masks["embedding_bound"]
    least = {"int8": 0.93, "fp8": 0.84}.get(
        recipe, {"float32": 0.999, "float16": 0.98, "bfloat16": 0.93}[dtype]
    )
    assert masks["mask_iou_mean"] > max(least, masks["mask_iou_bound"])
    assert masks["score_difference"] < (0.35 if recipe else 0.1)
    rows = {row["name"] for row in report["layers"]}
    assert ("image_encoder.blocks.1.mlp.lin2.weight" in rows) == bool(recipe)
    assert {"attn", "mlp", "norm1.eps", "sparse", "masks.0"} <= {
        row["module"] for row in report["layers"]
    }


def _scaled(model) -> None:
    linear = model.image_encoder.blocks[1].mlp.lin2
    weight_format, tensors = linear.weight.format, linear.weight.tensors()
    part = "weight" if weight_format == "dense" else "scale"
    linear.weight = from_tensors(weight_format, tensors | {part: tensors[part] * 1.05})


def _biases(model) -> None:
    qkv = model.image_encoder.blocks[1].attn.qkv
    q, k, v = qkv.bias.chunk(3)
    qkv.bias = torch.cat((v, k, q))


def _swap_rel_pos(model) -> None:
    attn = model.image_encoder.blocks[0].attn
    attn.rel_pos_h, attn.rel_pos_w = attn.rel_pos_w, attn.rel_pos_h


def _eps(model) -> None:
    model.image_encoder.blocks[1].norm2.eps = 1e-5


def _neck_eps(model) -> None:
    model.image_encoder.neck[3].eps = 1e-5


def _decoder_eps(model) -> None:
    model.mask_decoder.transformer.layers[1].norm4.eps = 1e-6


def _corners(model) -> None:
    rows = model.prompt_encoder.point_embeddings
    rows[0].weight, rows[1].weight = rows[1].weight, rows[0].weight


def _token(model) -> None:
    rows = model.mask_decoder.mask_tokens
    rows.weight = rows.weight.roll(1, 0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (_scaled, (1, "mlp")),
        (_biases, (1, "attn")),
        (_swap_rel_pos, (0, "attn")),
        (_eps, (1, "norm2.eps")),
        (_neck_eps, (None, "neck.3.eps")),
        (_decoder_eps, (None, "transformer.layers.1.norm4.eps")),
        (_corners, (None, "sparse")),
        (_token, (None, "masks.0")),
    ],
)
def test_planted_faults_are_named(
    built_engines: dict, case: str, fault: Callable, where: tuple
) -> None:
    artifact, checkpoint = built_engines[case]
    sam_model = open_sam_model(artifact, "cpu")
    fault(sam_model.model)
    report = compare_segmentation_engine(artifact, sam_model, checkpoint)
    assert not report["accepted"]
    if fault is _scaled and "-" in case:  # what is held is compared with the checkpoint's
        where = (1, "mlp.lin2.weight")
    assert (report["layer"], report["module"]) == where, report["reason"]


def test_matrices_in_each_others_place_are_named(built_engines: dict) -> None:
    artifact, checkpoint = built_engines["bfloat16-int8"]
    sam_model = open_sam_model(artifact, "cpu")
    blocks = sam_model.model.image_encoder.blocks
    blocks[0].attn.proj.weight, blocks[1].attn.proj.weight = (
        blocks[1].attn.proj.weight,
        blocks[0].attn.proj.weight,
    )
    report = compare_segmentation_engine(artifact, sam_model, checkpoint)
    assert (report["layer"], report["module"]) == (0, "attn.proj.weight"), report["reason"]


def row_scaled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    scale = tensors["scale"].clone()
    scale[5] *= 1.3
    return {"scale": scale}


def rows_swapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    order = [*range(len(tensors["scale"]))]
    order[3], order[9] = order[9], order[3]
    return {name: tensors[name][order].contiguous() for name in ("weight", "scale")}


@pytest.mark.parametrize("case", ["bfloat16-int8", "bfloat16-fp8"])
@pytest.mark.parametrize("change", [row_scaled, rows_swapped])
def test_rows_that_a_matrix_hides_are_named(
    built_engines: dict, case: str, change: Callable
) -> None:
    artifact, checkpoint = built_engines[case]
    sam_model = open_sam_model(artifact, "cpu")
    linear = sam_model.model.image_encoder.blocks[1].mlp.lin1
    tensors = linear.weight.tensors()
    linear.weight = from_tensors(linear.weight.format, tensors | change(tensors))
    report = compare_segmentation_engine(artifact, sam_model, checkpoint)
    assert not report["accepted"]
    assert (report["layer"], report["module"]) == (1, "mlp.lin1.weight"), report["reason"]
    wrong = {row["name"] for row in report["layers"] if not row["ok"]}
    assert "image_encoder.blocks.1.mlp.lin1.weight.worst_block" in wrong


@pytest.mark.parametrize("case", ["float32", "bfloat16", "bfloat16-int8", "float32-fp8"])
def test_what_connects_the_modules_is_judged(built_engines: dict, case: str) -> None:
    artifact, checkpoint = built_engines[case]
    sam_model = open_sam_model(artifact, "cpu")
    sam_model.model.image_encoder.pos_embed = sam_model.model.image_encoder.pos_embed.transpose(
        1, 2
    )
    report = compare_segmentation_engine(artifact, sam_model, checkpoint)
    assert not report["accepted"]
    assert "between the modules" in report["verdict"]


def test_an_overflow_in_float16_is_refused_and_nothing_written(tmp_path: Path) -> None:
    state = small_state()
    # every weight fits, what they compute does not
    state["image_encoder.blocks.0.mlp.lin1.weight"] *= 3e4
    save_file(state, tmp_path / "big.safetensors")
    with pytest.raises(
        AcceptanceError, match=r"overflow at layer 0, module mlp: .*float16.*bfloat16"
    ):
        build_engine(
            tmp_path / "big.safetensors", tmp_path / "big.engine", BuildConfig(dtype="float16")
        )
    assert not (tmp_path / "big.engine").exists()
    assert build_engine(
        tmp_path / "big.safetensors", tmp_path / "big.engine", BuildConfig(dtype="float32")
    )["accepted"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["float32", "bfloat16-int8"])
def test_engines_of_mobilesams_layout_are_accepted(tmp_path: Path, case: str) -> None:
    accepted(tmp_path, "tiny", case, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("layout", ["vit", "tiny"])
@pytest.mark.parametrize(
    "case", ["float32", "float16", "bfloat16", "bfloat16-int8", "bfloat16-fp8", "float16-int8"]
)
def test_engines_are_accepted_on_a_gpu(tmp_path: Path, layout: str, case: str) -> None:
    accepted(tmp_path, layout, case, "cuda")


def accepted(folder: Path, layout: str, case: str, target: str) -> None:
    dtype, _, recipe = case.partition("-")
    save_file(tiny_state() if layout == "tiny" else small_state(), folder / "sam.safetensors")
    config = BuildConfig(dtype=dtype, quantization=recipe or "none", target=target)
    report = build_engine(folder / "sam.safetensors", folder / "sam.engine", config)
    masks = report["masks"]
    print(
        layout,
        case,
        target,
        {name: masks[name] for name in sorted(masks) if name.endswith(("_l2", "_mean", "bound"))},
    )
    assert report["accepted"], report["reason"]


def test_an_overflow_between_the_modules_is_called_one(
    built_engines: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, checkpoint = built_engines["float16"]
    sam_model = open_sam_model(artifact, "cpu")
    embed = sam_model.model.encode_image
    monkeypatch.setattr(sam_model.model, "encode_image", lambda x, vision: embed(x, vision) * 1e5)
    report = compare_segmentation_engine(artifact, sam_model, checkpoint)
    assert not report["accepted"]
    assert "overflow between the modules" in report["reason"]
    assert "--dtype bfloat16" in report["reason"]


@torch.inference_mode()
def test_the_reference_is_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.models.test_sam import SMALL

    config = transformers.SamConfig(vision_config=SMALL)
    config.prompt_encoder_config.image_size, config.prompt_encoder_config.image_embedding_size = (
        160,
        10,
    )
    config.mask_decoder_config.layer_norm_eps = 1e-5
    model = transformers.SamModel(config).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(
            0,
            0.5 * parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3,
            generator=generator,
        )
    places = model.shared_image_embedding.positional_embedding
    model.prompt_encoder.shared_embedding.positional_embedding.data.copy_(places)
    model.save_pretrained(tmp_path)
    reference = SamReference(open_checkpoint(tmp_path))
    pixels = reference.normalize_image(draw_sample_image(160))
    stages = list(reference.encoder_stages(pixels))
    expected = model.vision_encoder(pixels)[0]
    assert (stages[-1].expected[0] - expected).abs().max() < 1e-5 * expected.abs().max()
    points, labels = torch.tensor([[[30.0, 40.0], [0.0, 0.0]]]), torch.tensor([[1, -1]])
    decoder = SamDecoderReference(reference)
    sparse, dense, at = (s.expected[0] for s in decoder.prompt_encoder_stages(points, labels, None))
    *_, last = decoder.mask_decoder_stages(expected, at, sparse, dense)
    outputs = model(
        pixel_values=pixels, input_points=points[:, None, :1], input_labels=labels[:, None, :1]
    )
    for actual, hf_output in zip(
        last.expected, (outputs.pred_masks[0], outputs.iou_scores[0]), strict=True
    ):
        assert (actual[:, 1:] - hf_output).abs().max() < 1e-4 * hf_output.abs().max()


def test_tables_made_for_another_size_are_stretched_as_the_reference_does(tmp_path: Path) -> None:
    state = small_state()
    for name in ("rel_pos_h", "rel_pos_w"):  # block 1 sees the whole image, of 10 × 10 tokens
        state[f"image_encoder.blocks.1.attn.{name}"] = torch.randn(31, 16) * 0.5
    save_file(state, tmp_path / "wide.safetensors")
    report = build_engine(
        tmp_path / "wide.safetensors", tmp_path / "wide.engine", BuildConfig(dtype="float32")
    )
    assert report["accepted"], report["reason"]
