"""A recipe is one file: a toy with an own weight format, option and tolerances.

The file lies in a temporary folder that is added to the package's path before anything else of it
is imported, as if it stood in the package; nothing else is edited.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.accept.build_and_accept import save_tiny

ROOT = Path(__file__).resolve().parent.parent.parent
TOY = '''
"""A toy: each row on evenly spaced levels between its smallest and its largest weight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from modelmill.core.recipe_declaration import FormatTolerances, RecipeDeclaration, RecipeOption
from modelmill.quant.recipe import Recipe
from modelmill.weights.base import StoredTensorDimsAndDtypes, WeightFormat, slice_tensor

DECLARATION = RecipeDeclaration(
    weight_format="toy",
    tolerances=FormatTolerances(weight=(0.02, 0.03, 0.005), block=(0.05, 0.05, 0.01)),
    options={"levels": RecipeOption(128, "levels of a row (toy)", choices=(64, 128, 256))},
)


@dataclass(frozen=True)
class ToyWeight(WeightFormat):
    weight: torch.Tensor
    low: torch.Tensor
    step: torch.Tensor
    format: str = "toy"

    STORED_TENSORS: ClassVar[StoredTensorDimsAndDtypes] = {
        "weight": (2, (torch.uint8,)),
        "low": (1, (torch.float32,)),
        "step": (1, (torch.float32,)),
    }

    @classmethod
    def pack(cls, weight, dtype, *, levels=128):
        low, high = weight.amin(1), weight.amax(1)
        step = (high - low).clamp(min=1e-8) / (levels - 1)
        codes = ((weight - low[:, None]) / step[:, None]).round().to(torch.uint8)
        return cls(codes, low, step)

    @classmethod
    def packed_tensor_specs(cls, shape, dtype, *, levels=128):
        vector = (shape[:1], torch.float32)
        return {"weight": (shape, torch.uint8), "low": vector, "step": vector}

    @classmethod
    def from_tensors(cls, tensors):
        return cls(tensors["weight"], tensors["low"], tensors["step"])

    @property
    def shape(self):
        return self.weight.shape[0], self.weight.shape[1]

    def tensors(self):
        return {"weight": self.weight, "low": self.low, "step": self.step}

    def dequantize(self):
        return self.weight.float() * self.step[:, None] + self.low[:, None]

    def matmul(self, x, bias, ops):
        return ops.linear(x, self.dequantize().to(x.dtype), bias)

    def to(self, device):
        return ToyWeight(self.weight.to(device), self.low.to(device), self.step.to(device))

    def slice(self, rows, columns):
        low, step = slice_tensor(self.low, rows), slice_tensor(self.step, rows)
        return ToyWeight(slice_tensor(self.weight, rows, columns), low, step)


class ToyRecipe(Recipe):
    weight_format = "toy"

    def __init__(self, config):
        self.pack_options = {"levels": config.levels}

    def quantize(self, weight, statistics):
        return ToyWeight.pack(weight, torch.float32, **self.pack_options)


RECIPE = ToyRecipe
'''
# what is planted before a command line starts, in our own code alone
FAULTS = {
    "two rows swapped when stored": """
pack = toy.ToyWeight.pack.__func__
def swapped(cls, weight, dtype, **layout):
    packed = pack(cls, weight, dtype, **layout)
    order = torch.arange(len(weight))
    order[0], order[1] = 1, 0
    return replace(packed, weight=packed.weight[order])
toy.ToyWeight.pack = classmethod(swapped)
""",
    "a product without the offset": """
def without_offset(self, x, bias, ops):
    return ops.linear(x, (self.weight.float() * self.step[:, None]).to(x.dtype), bias)
toy.ToyWeight.matmul = without_offset
""",
}
DRIVER = """
import contextlib, io, json, sys
import modelmill.quant
modelmill.quant.__path__.append(sys.argv[1])
from modelmill.cli.main import run_command_line

def plant(fault):
    import modelmill.quant.toy as toy
    unplanted = {name: vars(toy.ToyWeight)[name] for name in ("pack", "matmul")}
    exec("from dataclasses import replace; import torch\\n" + fault, {"toy": toy})
    return toy.ToyWeight, unplanted

results = []
for words, fault in json.loads(sys.argv[2]):
    planted, unplanted = plant(fault) if fault else (None, {})
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = run_command_line(words)
    for name, member in unplanted.items():
        setattr(planted, name, member)
    results.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy")
    (path / "toy.py").write_text(TOY)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("hf"))


class Result(NamedTuple):
    """Of a command line."""

    code: int
    out: str
    err: str


class Results(NamedTuple):
    """Of the command lines that share a process."""

    help: Result
    built: Result
    ran: Result
    other_recipe: Result
    unknown_value: Result
    refused: dict[str, Result]


def command_lines(folder: Path, lines: list[tuple[tuple[object, ...], str]]) -> list[Result]:
    """Run command lines in a process of their own, with the toy's folder in the package's path.

    Args:
        folder: The toy's.
        lines: Words of each line, and the fault that is planted while it runs, or "".
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CI": "1", "COLUMNS": "100"}
    words = json.dumps([(list(map(str, line)), fault) for line, fault in lines])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder), words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Result(*each) for each in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def results(folder: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All command lines, in one process: each would import torch again."""
    out = tmp_path_factory.mktemp("built")
    engine, prompts = out / "e", out / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [3, 1, 4]}\n')
    words = ("build", checkpoint, "-o", engine, "--dtype", "float32", "--target", "cpu")
    more = ("--max-tokens", 4, "--device", "cpu", "--json")
    refused = ("build", checkpoint, "-o", out / "r", "--dtype", "float32", "--target", "cpu")
    dry_run = ("build", checkpoint, "--dry-run", "--levels")
    *unplanted, first, second = command_lines(
        folder,
        [
            (("build", "--help"), ""),
            ((*words, "-q", "toy", "--levels", 256, "--json"), ""),
            (("run", engine, "--file", prompts, *more), ""),
            ((*dry_run, 64, "-q", "int8"), ""),
            ((*dry_run, 100, "-q", "toy"), ""),
            *(((*refused, "-q", "toy"), fault) for fault in FAULTS.values()),
        ],
    )
    assert not (out / "r").exists()
    return Results(*unplanted, dict(zip(FAULTS, (first, second), strict=True)))


def test_its_flag_appears_in_help(results: Results) -> None:
    shown = results.help.out
    assert "--levels" in shown
    assert "levels of a row (toy)" in shown
    assert "rptq, toy, keep, auto" in " ".join(shown.split())


def test_it_builds_is_accepted_and_runs(results: Results) -> None:
    built, ran = results.built, results.ran
    assert built.code == 0, built.err
    report = json.loads(built.out)
    assert report["acceptance"]["accepted"]
    assert report["plan"]["build"]["levels"] == 256
    assert report["plan"]["bytes_by_format"].keys() == {"toy", "plain", "dense"}
    compared = {row["name"]: row["tolerance"] for row in report["acceptance"]["layers"]}
    assert any(name.endswith("down_proj.weight.worst_block") for name in compared)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("fault", FAULTS)
def test_acceptance_finds_a_fault_in_its_format(results: Results, fault: str) -> None:
    refused = results.refused[fault]
    assert refused.code not in (0, 2)
    assert "bug at layer 0, module attn.q_proj: rel_l2" in refused.err


def test_its_option_is_refused_by_other_recipes_and_checked(results: Results) -> None:
    other, unknown = results.other_recipe, results.unknown_value
    assert other.code == 2
    assert "--levels is for -q toy, not for -q int8; leave it out" in other.err
    assert unknown.code == 2
