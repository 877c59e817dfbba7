"""A family of another layer shape is one file beside its reference: nothing else is edited.

The two files lie in temporary folders that are added to the packages' paths, as if they stood in
them. The layers mix a gated mixer without KV cache and attention, have a norm behind the branch and
an MLP of three matrices, two of which read one site.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import modelmill.accept.reference as reference_package
import modelmill.models as models_package
from modelmill.accept import run
from modelmill.artifact.store import open_artifact
from modelmill.builder import memory_plan
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.cli.main import run_command_line
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.eval import profile as profiling
from modelmill.loader.model_loader import build_model, load_model
from modelmill.nn.fusion import fuse_model
from modelmill.nn.layer_spec import LayerSpec, layer_spec
from modelmill.nn.shard_model import shard_model
from modelmill.ops.registry import select_backends
from modelmill.parallel.tp_group import TPGroup
from modelmill.quant.activation_smoothing import apply_smoothing
from modelmill.quant.calibrate import collect_input_statistics
from modelmill.quant.calibration_state import CalibrationState, QuantizableLayer
from modelmill.runtime.engine_core import EngineCore
from tests.accept.build_and_accept import build_and_accept
from tests.models.toy_family import CONFIG, MODEL, REFERENCE, save_toy

CALIBRATION = {"calibration_samples": 8, "calibration_length": 32}
RECIPES: dict[str, dict[str, Any]] = {
    "none": {},
    "int8": {},
    "int4": {"group_size": 32, "method": "gptq", **CALIBRATION},
    "smoothquant": CALIBRATION,
    "auto": {"layer_recipes": {"0": "int4-g32", "1": "int8"}, **CALIBRATION},
}


@pytest.fixture(scope="module", autouse=True)
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The toy's model file; both of its files are importable meanwhile."""
    files = {models_package: MODEL, reference_package: REFERENCE}
    folders = []
    for package, text in files.items():
        folder = tmp_path_factory.mktemp(package.__name__.rpartition(".")[2])
        (folder / "toy.py").write_text(text)
        package.__path__.append(str(folder))
        folders.append(str(folder))
    from modelmill.models import toy  # type: ignore[attr-defined]

    yield toy
    for package, folder in zip(files, folders, strict=True):
        package.__path__.remove(folder)
        sys.modules.pop(f"{package.__name__}.toy", None)
        vars(package).pop("toy", None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy(tmp_path_factory.mktemp("toy") / "hf")


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "engine"
    _, written = build_and_accept(checkpoint, folder, "float32", "none")
    assert written
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_builds_and_is_accepted(recipe: str, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "e"
    report, written = build_and_accept(checkpoint, out, "float32", recipe, **RECIPES[recipe])
    assert written, report.get("reason", report)
    compared = {row["name"] for row in report["layers"]}
    assert compared >= {
        "layers.0.mix.a_proj", "layers.0.mix.b_proj", "layers.0.mix.gate", "layers.2.mix.out_proj",
        "layers.1.attn.q_proj", "layers.1.attn.rope_cache.k", "layers.1.attn.core",
        "layers.0.post_norm", "layers.1.post_norm.eps", "layers.2.mix.residual",
        "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.0.mlp.act", "layers.2.output",
    }  # fmt: skip
    if recipe in ("int4", "smoothquant"):
        facts, scales = open_artifact(out).read_quant_reports_and_scales_by_layer()[0]
        assert facts.keys() == {
            "mix.in_proj", "mix.out_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        }  # fmt: skip
        assert set(scales) <= {"mix_in", "mix_out", "ffn", "ffn_down"}
        assert bool(scales) == (recipe == "smoothquant")


def scaled_norm(toy: Any, patch: pytest.MonkeyPatch) -> None:
    plain = toy.PostNorm.forward
    patch.setattr(toy.PostNorm, "forward", lambda self, x, step: 1.05 * plain(self, x, step))


def another_gate(toy: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(toy.SigmoidGate, "forward", lambda _, ab, __: ab.chunk(2, -1)[0].tanh())


def swapped_names(toy: Any, patch: pytest.MonkeyPatch) -> None:
    names = toy.CHECKPOINT_NAMES
    patch.setitem(names, "mlp.gate_proj", names["mlp.up_proj"])
    patch.setitem(names, "mlp.up_proj", ("ffn.gate",))


@pytest.mark.parametrize(
    ("fault", "recipe", "module"),
    [
        (scaled_norm, "none", "post_norm"),
        (another_gate, "none", "mix.gate"),
        (another_gate, "int4", "mix.gate"),
        (swapped_names, "int8", "mlp.gate_proj"),
        (swapped_names, "none", "mlp.gate_proj"),
    ],
)
def test_a_fault_in_its_odd_modules_is_named(
    fault: Any, recipe: str, module: str, family: Any, checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fault(family, monkeypatch)
    report, written = build_and_accept(
        checkpoint, tmp_path / "e", "float32", recipe, **RECIPES[recipe]
    )
    assert not written
    assert f"bug at layer 0, module {module}" in report["refusal"]


def test_smoothing_keeps_what_its_layers_compute(engine: Path) -> None:
    model: Any = load_model(open_artifact(engine), "cpu")
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 120, (60,), generator=draw).tolist()]
    flow = CalibrationState.from_ids(model, ids, select_backends("cpu"), "cpu")
    for layer in model.layers:
        block, probe = QuantizableLayer(layer), flow.fork()
        statistics = {}
        for site in block.sites:
            probe.forward_to_site(block, site)
            statistics[site] = collect_input_statistics(probe.site_inputs(), site)
        before = flow.fork()
        before.forward_layer(block)
        folded = apply_smoothing(block, statistics, dict.fromkeys(block.sites, 0.5), torch.float32)
        assert set(folded) == set(block.sites)
        flow.forward_layer(block)
        for batch, expected in zip(flow.batches, before.batches, strict=True):
            torch.testing.assert_close(batch.x, expected.x, rtol=1e-4, atol=2e-5)


def test_tensor_parallelism_divides_it_by_its_spec() -> None:
    whole = build_model("toy", CONFIG)
    sums: dict[str, torch.Tensor] = {}
    x = torch.randn(5, 80, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(48, 80, generator=torch.Generator().manual_seed(1))
    for rank in range(2):
        model = build_model("toy", CONFIG)
        shard_model(model, TPGroup(rank, 2), lambda _: 1)
        assert model.kv.kv_heads == 1  # type: ignore[union-attr]
        shapes = {name: m.shape for name, m in model.named_modules() if hasattr(m, "shape")}
        assert shapes["layers.0.mix.in_proj"] == (64, 48)
        assert shapes["layers.0.mix.out_proj"] == (48, 32)
        assert shapes["layers.1.attn.qkv_proj"] == (48, 48)
        assert shapes["layers.0.mlp.gate_proj"] == shapes["layers.0.mlp.up_proj"] == (40, 48)
        shard = model.get_submodule("layers.0.mix.in_proj").weight_shard
        assert shard.rows == ((rank * 32, rank * 32 + 32), (64 + rank * 32, 96 + rank * 32))  # type: ignore[union-attr]
        down = model.get_submodule("layers.0.mlp.down_proj").weight_shard
        columns = slice(*down.columns)  # type: ignore[union-attr]
        part = x[:, columns] @ weight[:, columns].T
        sums["down"] = sums.get("down", torch.zeros(5, 48)) + part
    torch.testing.assert_close(sums["down"], x @ weight.T)
    assert fuse_model(whole) is whole, "no fused op computes such a layer"


def test_its_modules_are_profiled_and_it_runs(
    engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(profiling, "CPU_ROUNDS", 2)
    monkeypatch.setattr("modelmill.ops.timing.BANDWIDTH_COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr("modelmill.ops.timing.MATMUL_SIZE", {"cpu": 32})
    words = ["profile", str(engine), "--device", "cpu", "--batch", "2", "--prompt", "24"]
    assert run_command_line(words) == 0
    shown = capsys.readouterr().out
    for module in ("mix.in_proj", "mix.out_proj", "attn.core", "post_norm", "mlp.gate_proj"):
        assert f"layers.*.{module}" in shown
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [3, 1, 4]}\n')
    more = ["--max-tokens", "4", "--device", "cpu", "--json"]
    assert run_command_line(["run", str(engine), "--file", str(prompts), *more]) == 0
    assert json.loads(capsys.readouterr().out)


def test_only_layers_with_attention_have_a_cache(engine: Path, checkpoint: Path) -> None:
    artifact = open_artifact(engine)
    loop = EngineCore.open(artifact, RunConfig(kv_cache_bytes=1 << 20, max_model_len=64))
    kv = loop.model_runner.kv
    assert (len(kv.k), kv.k[0].shape[1], kv.k[0].shape[3]) == (1, 2, 12), "of three layers"
    per_token = 2 * 2 * 12 * 4
    made = make_build_plan(open_checkpoint(checkpoint), BuildConfig(dtype="float32"))
    assert made.memory_report["kv_per_token"] == loop.page_bytes // loop.page_size == per_token
    tokens = (run.NUM_SEQUENCES + 2) * (run.SEQUENCE_LENGTH + 64)
    assert run._kv_cache_bytes(artifact) == per_token * tokens


def test_memory_is_planned_for_the_largest_of_its_layers(checkpoint: Path) -> None:
    tensors = make_build_plan(open_checkpoint(checkpoint), BuildConfig(dtype="float32")).tensors
    sizes = [memory_plan.module_float32_bytes(tensors, f"layers.{layer}.") for layer in range(3)]
    assert sizes[0] == sizes[2] > sizes[1] > 0
    without_mixer = [planned for planned in tensors if not planned.module.startswith("layers.0.")]
    without_mixer = [p for p in without_mixer if not p.module.startswith("layers.2.")]
    assert memory_plan.largest_layer_float32_bytes(tensors) == sizes[0]
    assert memory_plan.largest_layer_float32_bytes(without_mixer) == sizes[1]


def test_a_tensor_that_the_spec_lacks_is_named(family: Any, monkeypatch: Any) -> None:
    plain = family.mlp_modules
    monkeypatch.setattr(family, "mlp_modules", lambda *sizes: plain(*sizes)[1:])
    layer = build_model("toy", CONFIG).get_submodule("layers.0")
    spec = layer_spec(layer)
    assert isinstance(spec, LayerSpec)
    with pytest.raises(ValueError, match=r"differ in mlp\.gate_proj\.weight"):
        spec.check_module_tree(layer)
