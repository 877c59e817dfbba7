"""Weight files written by an attacker: whatever a header says of its tensors, an engine opens or is
one line.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.artifact.manifest import MANIFEST_FILE, Manifest
from modelmill.builder import build_engine
from modelmill.builder.plan import make_build_plan
from modelmill.checkpoint.open import open_checkpoint
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.errors import ModelmillError
from modelmill.runtime.engine_core import EngineCore
from tests.checkpoint.checkpoint_factory import LLAMA_CONFIG, llama_state, write_folder
from tests.trust.error_lines import check_one_line

CALIBRATED = {"calibration_samples": 4, "calibration_length": 64}
RECIPES: dict[str, dict[str, Any]] = {
    "none": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "method": "nearest", "group_size": 32},
    "fp8": {"quantization": "fp8"},
    "smoothquant": {"quantization": "smoothquant", **CALIBRATED},
    "rptq": {"quantization": "rptq", **CALIBRATED},
    "rptq-w4a8": {"quantization": "rptq", "bits": "w4a8", "mode": "dynamic", **CALIBRATED},
}
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1}
SMALL = RunConfig(device="cpu", kv_cache_bytes=1 << 18, max_num_seqs=2)
Header = dict[str, Any]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One engine a recipe, tied, so that there is an alias as well."""
    folder = tmp_path_factory.mktemp("forged")
    state = llama_state()
    del state["lm_head.weight"]
    hf = write_folder(folder / "hf", state, {**LLAMA_CONFIG, "tie_word_embeddings": True})
    engines = {}
    for name, options in RECIPES.items():
        config = BuildConfig(target="cpu", **{"dtype": "float32", **options})
        build_engine.build(make_build_plan(open_checkpoint(hf), config), folder / name, None)
        engines[name] = folder / name
    return engines


def headers(engine: Path) -> dict[str, Header]:
    """File → its header."""
    headers = {}
    for path in sorted((engine / "weights").glob("*.safetensors")):
        data = path.read_bytes()
        headers[path.name] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return headers


def forged(good: Path, out: Path, file: str, header: Header, **changes: Any) -> Path:
    """A copy of an engine with another header in one file; hashes, sizes and digest fit."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(good, out)
    data = (good / "weights" / file).read_bytes()
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    data = len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]
    (out / "weights" / file).write_bytes(data)
    manifest = Manifest.from_json((good / MANIFEST_FILE).read_text(), "e")
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    files = {**manifest.files, f"weights/{file}": entry}
    (out / MANIFEST_FILE).write_text(replace(manifest, files=files, **changes).to_json())
    return out


def open_and_answer(engine: Path) -> str:
    """The error's line; empty where it opens and answers."""
    try:
        loop = EngineCore.open(engine, SMALL)
    except ModelmillError as error:
        return check_one_line(error)
    TeacherForcedScorer(loop).compute_logits([[1, 2, 3, 4]], decode_from=2)
    return ""


def test_the_good_ones_answer(engines: dict[str, Path]) -> None:
    for engine in engines.values():
        assert open_and_answer(engine) == ""


def with_shape(header: Header, name: str, shape: list[int], dtype: str | None = None) -> Header:
    """A header in which one tensor has another shape and dtype."""
    entry = header[name] | {"shape": shape} | ({} if dtype is None else {"dtype": dtype})
    return {**header, name: entry}


# what the issue's list of forged engines showed, each a traceback before
NAMED: dict[str, Callable[[Header], tuple[Header, dict[str, Any]]]] = {
    "a matrix of one dimension": lambda h: (
        with_shape(h, "layers.0.attn.o_proj.weight", [32 * 32]),
        {},
    ),
    "a matrix of three dimensions": lambda h: (
        with_shape(h, "layers.0.attn.o_proj.weight", [2, 16, 32]),
        {},
    ),
    "a matrix of whole numbers": lambda h: (
        with_shape(h, "layers.0.attn.o_proj.weight", [32, 32], "I32"),
        {},
    ),
    "a norm of whole numbers": lambda h: (
        with_shape(h, "layers.0.attn_norm.weight", [32], "I32"),
        {},
    ),
    "an alias to a norm": lambda h: (h, {"aliases": {"head.weight": "norm.weight"}}),
    "an alias to a matrix": lambda h: (
        h,
        {"aliases": {"head.weight": "layers.0.attn.o_proj.weight"}},
    ),
    "an alias of a matrix": lambda h: (
        {k: v for k, v in h.items() if not k.startswith("layers.0.attn.o_proj.")},
        {"aliases": {"head.weight": "embed.weight", "layers.0.attn.o_proj.weight": "embed.weight"}},
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_what_was_found_once_is_one_line_that_says_rebuild(
    case: str, engines: dict[str, Path], tmp_path: Path
) -> None:
    good = engines["none"]
    file = "layer-0000.safetensors"
    header, changes = NAMED[case](headers(good)[file])
    assert "rebuild" in open_and_answer(forged(good, tmp_path / "e", file, header, **changes))


@st.composite
def forgeries(draw: st.DrawFn, headers: dict[str, Header]) -> tuple[str, Header]:
    """A file and its header with one or two tensors described differently, within the file."""
    file = draw(st.sampled_from(sorted(headers)))
    header = dict(headers[file])
    names = sorted(name for name in header if not name.startswith("__"))
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(names))
        entry = dict(header.get(name) or headers[file][name])
        nbytes = math.prod(entry["shape"]) * SIZES[entry["dtype"]]
        match draw(st.sampled_from(["shape", "dtype", "place", "name", "lost"])):
            case "shape":
                count = math.prod(entry["shape"])
                first = draw(
                    st.sampled_from([n for n in range(1, count + 1) if count % n == 0][:12])
                )
                entry["shape"] = draw(st.sampled_from([[count], [first, count // first],
                    [count // first, first],
                                                       [1, first, count // first], [count, 1],
                                                       []]))  # fmt: skip
            case "dtype":
                entry["dtype"] = draw(st.sampled_from([d for d in SIZES if nbytes % SIZES[d] == 0]))
                count = nbytes // SIZES[entry["dtype"]]
                last = (
                    entry["shape"][-1] if entry["shape"] and count % entry["shape"][-1] == 0 else 1
                )
                entry["shape"] = draw(
                    st.sampled_from([[count // last, last], [count], entry["shape"]])
                )
            case "place":
                entry["data_offsets"] = header.get(draw(st.sampled_from(names)), entry)[
                    "data_offsets"
                ]
            case "name":
                other = draw(
                    st.sampled_from([*names, f"{name}.weight", name.rpartition(".")[0] + ".scale"])
                )
                header[other], entry = entry, header.get(other) or entry
            case "lost":
                header.pop(name, None)
                continue
        header[name] = entry
    return file, header


@pytest.mark.parametrize("recipe", RECIPES)
def test_any_header_is_an_engine_or_one_line(
    recipe: str, engines: dict[str, Path], tmp_path: Path
) -> None:
    good = engines[recipe]

    @settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    @given(forgeries(headers(good)))
    def tried(forgery: tuple[str, Header]) -> None:
        file, header = forgery
        open_and_answer(forged(good, tmp_path / "e", file, header))

    tried()


@pytest.mark.parametrize(
    ("recipe", "suffix"), [("rptq", "perm"), ("rptq", "sizes"), ("int4", "sizes")]
)
def test_numbers_that_lead_outside_are_refused(
    recipe: str, suffix: str, engines: dict[str, Path]
) -> None:
    """Kernels follow these numbers without a look, so they are checked when the engine opens."""
    from modelmill.artifact.store import open_artifact
    from modelmill.core.errors import CorruptArtifact
    from modelmill.weights.base import from_tensors

    artifact = open_artifact(engines[recipe])
    module = "layers.0.attn.o_proj"
    tensors = {
        name.removeprefix(f"{module}."): artifact.tensor(name).clone()
        for name in artifact.names()
        if name.startswith(f"{module}.")
    }
    weight_format = artifact.manifest.weight_formats[module]
    from_tensors(weight_format, tensors)
    for value in (-2, 0, 1 << 20):
        bad = {**tensors, suffix: tensors[suffix].clone()}
        bad[suffix][0] = value
        if (recipe, suffix, value) in (("rptq", "perm", 0), ("rptq", "sizes", 1 << 20)):
            # a channel twice: copies are what rptq makes; another width: the model's shapes say so
            continue
        with pytest.raises(CorruptArtifact):
            from_tensors(weight_format, bad)
