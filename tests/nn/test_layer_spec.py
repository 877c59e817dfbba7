"""What a layer is made of is declared once; what walks the declaration names no module itself."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modelmill.accept.quantized_reference import dequantize_engine_layer_weights
from modelmill.accept.reference import ModuleWeights
from modelmill.loader.model_loader import build_model
from modelmill.nn.layer_spec import LinearSpec, ModuleSpec, NormSpec, layer_spec
from modelmill.nn.layer_stack import linear_quant_site
from tests.parallel.test_shard_model import FAMILIES

ROOT = Path(__file__).resolve().parent.parent.parent / "modelmill"
WALKERS = ("quant", "accept", "builder", "eval", "nn/shard_model.py", "artifact")
NAMES = re.compile(
    r"\b(q_proj|k_proj|v_proj|qkv_proj|o_proj|gate_proj|up_proj|gate_up_proj|fc_proj|down_proj"
    r"|attn_norm|mlp_norm|input_norm|qkv|gate_up|attn\.core|attn\.rope_cache|mlp\.act)\b"
)
# file → why it names a part of a layer
REASONS = {
    "eval/op_cases.py": "gate_up is a parameter of the op silu_mul",
    "eval/large_op_cases.py": "qkv is a parameter of the op rope_cache",
    "quant/rptq.py": "the help of --splits-per-channel explains its cost by an example",
}


def walkers() -> list[Path]:
    paths = [ROOT / each for each in WALKERS]
    files = [path for path in paths if path.is_file()]
    return files + [
        path for folder in paths for path in folder.rglob("*.py") if path.parent.name != "reference"
    ]


def named_parts(path: Path) -> set[str]:
    """The parts of a layer that a file's strings name, docstrings apart; so do attributes."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                names |= set(NAMES.findall(node.value))
        elif isinstance(node, ast.Attribute) and node.attr.endswith(("_proj", "_norm")):
            names |= set(NAMES.findall(node.attr))
    return names


def test_no_part_of_a_layer_is_named_outside_its_declaration() -> None:
    named = {str(p.relative_to(ROOT)): parts for p in walkers() if (parts := named_parts(p))}
    assert named.keys() == REASONS.keys(), named


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_every_family_is_declared(family: str) -> None:
    model = build_model(*FAMILIES[family])
    for layer in model.get_submodule("layers").children():
        spec = layer_spec(layer)
        spec.check_module_tree(layer)
        for linear in spec.modules_of_type(LinearSpec):
            rows, _ = layer.get_submodule(linear.path).shape
            assert sum(part.rows for part in linear.parts) == rows
    site = linear_quant_site(model, "layers.1.mlp.down_proj")
    assert site is not None
    assert (site.name, site.heavy_tailed) == ("down", True)
    assert linear_quant_site(model, "head") is None


def test_a_norm_whose_output_something_else_reads_takes_no_scales() -> None:
    model = build_model(*FAMILIES["llama"])
    spec = layer_spec(model.get_submodule("layers.0"))
    assert isinstance(spec.scale_fold_target("up"), NormSpec)
    router = ModuleSpec(path="mlp.router", reads=("mlp_input",), writes=("routes",))
    routed = replace(spec, modules=(*spec.modules, router))
    assert routed.scale_fold_target("up") is None
    assert routed.scale_fold_order == ("o", "down", "qkv")


def test_a_weight_of_the_reference_that_no_module_names_is_refused() -> None:
    model = build_model(*FAMILIES["llama"])
    weight = ModuleWeights(torch.zeros(1))
    with pytest.raises(ValueError, match="has weights router, which no module"):
        list(dequantize_engine_layer_weights(model, 0, {"q": weight, "router": weight}))
