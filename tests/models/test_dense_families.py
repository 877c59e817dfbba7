"""Every family of the folder ``families`` against an independent implementation, in float32.

transformers is that implementation, or, for families that it lacks, a plain one in float64 written
from the paper. Each case runs prompts whole, in chunks, decoded, and mixed in one batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from modelmill.accept.teacher_forced_scorer import TeacherForcedScorer
from modelmill.core.config import RunConfig
from modelmill.core.errors import CheckpointError
from modelmill.core.kv_page_counts import max_sequence_pages_in_groups
from modelmill.core.module_lookup import import_module_if_exists
from modelmill.parallel.tp_group import SINGLE_RANK
from modelmill.runtime.engine_core import EngineCore
from tests.accept.build_and_accept import build_and_accept
from tests.hypothesis_examples import examples, is_quick
from tests.models.all_families import CASES
from tests.models.config_keys import config_warnings
from tests.models.idle_fields import IDLE
from tests.models.saved_family import (
    REPRESENTATIVES,
    Saved,
    compare,
    drawn_ids,
    label,
)
from tests.parallel import test_shard_model
from tests.parallel.thread_tp_group import run_on_ranks
from tests.runtime import tiny
from tests.trust.error_lines import check_one_line

transformers = pytest.importorskip("transformers")


def pairs(attribute: str) -> list[Any]:
    """(family, key) of each member of an attribute, or (family, number) of a tuple's."""
    return [
        pytest.param(name, key, id=f"{label(name)}-{key}")
        for name, case in CASES.items()
        for key in _keys(getattr(case, attribute))
    ]


def _keys(members: Any) -> Any:
    return range(len(members)) if isinstance(members, tuple) else members


each_family = pytest.mark.parametrize("name", CASES, ids=label)
CALIBRATION = {"calibration_samples": 8, "calibration_length": 32}
RECIPES: dict[str, dict[str, Any]] = {
    "none": {},
    "int8": {},
    "fp8": {},
    "int4": {"group_size": 32, "method": "awq+gptq", **CALIBRATION},
    "smoothquant": CALIBRATION,
    "rptq": CALIBRATION,
}
FAULT_BITS = [("bfloat16", "none"), *(("float32", recipe) for recipe in RECIPES)]
BITS = [(dtype, recipe) for dtype in ("float32", "bfloat16") for recipe in RECIPES]


class SavedCases(dict[str, Saved]):
    """The families by name, each written when a test first reads it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> Saved:
        self[name] = Saved(CASES[name], self._folder / name)
        return self[name]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Saved]:
    return SavedCases(tmp_path_factory.mktemp("families"))


LATE = 64
"""Of the 70 tokens of the longest sequence, those before the decoded ones in ``make test``."""


@each_family
def test_logits(name: str, saved: Mapping[str, Saved]) -> None:
    each = saved[name]
    # beyond every window and original length; make test decodes more for the representatives only
    start = LATE if is_quick() and name not in REPRESENTATIVES else 5
    compare(each.open(), each.logits, drawn_ids(each.case.base["vocab_size"]), (None, start))
    whole = each.open(max_num_batched_tokens=256)
    # no chunk more is here than above before the decoded tokens, which would be computed once more
    compare(whole, each.logits, drawn_ids(each.case.base["vocab_size"]), (None,))


@pytest.mark.parametrize(("name", "number"), pairs("switches"))
def test_logits_of_every_switch(name: str, number: int, tmp_path: Path) -> None:
    case = CASES[name]
    changes = case.switches[number]
    logits = case.save(tmp_path / "hf", **changes)
    report, written = build_and_accept(tmp_path / "hf", tmp_path / "e", "float32", "none")
    assert written, report.get("reason", report)
    config = RunConfig(device="cpu", max_num_batched_tokens=32, kv_cache_bytes=1 << 22)
    vocab = int({**case.base, **changes}["vocab_size"])
    # decoded beyond every window and original length of the cases; test_logits decodes it all
    compare(
        EngineCore.open(tmp_path / "e", config),
        logits,
        drawn_ids(vocab),
        (None, examples(full=37, quick=LATE)),
    )


@each_family
def test_every_field_is_named(name: str) -> None:
    """Fields of the configuration class: in the base, a switch, or without effect."""
    case = CASES[name]
    if name not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
        return
    named = {*case.base, *(key for each in case.switches for key in each), *IDLE, *case.refused}
    config = type(transformers.AutoConfig.for_model(name))
    assert {each.name for each in fields(config)} - named == case.unnamed_fields


@each_family
def test_no_key_of_the_class_is_unread(name: str) -> None:
    case = CASES[name]
    for changes in ({}, *case.switches):
        assert config_warnings(case.raw(**changes)) == [], changes


@pytest.mark.parametrize(("name", "key"), pairs("refused"))
def test_other_values_are_refused_by_name(name: str, key: str) -> None:
    raw = CASES[name].raw() | {key: CASES[name].refused[key]}
    with pytest.raises(CheckpointError) as error:
        config_warnings(raw)
    line = check_one_line(error.value)
    assert key.partition(".")[0] in line
    assert "config.json" in line


@each_family
def test_a_warm_prefix_and_preempted_answers(name: str, saved: Mapping[str, Saved]) -> None:
    """Greedy answers: each token is the independent implementation's, within rounding."""
    each = saved[name]
    prompts = [tuple(ids) for ids in drawn_ids(each.case.base["vocab_size"], (40, 33, 25, 17))]
    engine = each.open(page_size=8, max_model_len=64)
    engine_small = small_engine(each)
    params = tiny.params(max_tokens=20)
    cold = tiny.run(engine, tiny.requests(prompts, params))
    warm = tiny.run(engine, tiny.requests(prompts, params))
    engine.add(tiny.requests(prompts[:1], params)[0])
    assert tiny.drain(engine)[-1].cached_tokens >= 32
    preempted = tiny.run(engine_small, tiny.requests(prompts, params))
    assert (engine_small.stats().preemptions > 0) == (engine.page_bytes > 0)
    for answers in (cold, warm, preempted):
        for (number, _), answer in answers.items():
            if not answer:
                continue
            prompt = prompts[int(number)]
            rows = each.logits([*prompt, *answer])[len(prompt) - 1 : -1]
            best = rows.max(-1).values
            chosen = rows[torch.arange(len(answer)), torch.tensor(answer, dtype=torch.long)]
            assert float((best - chosen).max()) < 1e-3


def small_engine(each: Saved) -> EngineCore:
    """An engine with too few pages for all answers at once, of a model that has pages."""
    shape = each.open(max_model_len=64).kv_shape
    longest = max_sequence_pages_in_groups(64, 8, shape.group_windows, 32)
    more = 2 if shape.groups else 3  # pages of one group hold fewer layers
    return each.open(
        page_size=8,
        max_model_len=64,
        enable_prefix_caching=False,
        kv_cache_bytes=max((longest + more) * shape.page_bytes(8, torch.float32), 1),
    )


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@each_family
def test_pages_of_8_bits(name: str, kv_dtype: str, saved: Mapping[str, Saved]) -> None:
    each = saved[name]
    ids = drawn_ids(each.case.base["vocab_size"])
    engine = each.open(kv_cache_dtype=kv_dtype)
    for actual, row in zip(
        TeacherForcedScorer(engine).compute_logits(ids, decode_from=5), ids, strict=True
    ):
        expected = each.logits(row)
        error = float((actual - expected).square().mean() / expected.square().mean()) ** 0.5
        assert error < (2 if kv_dtype == "fp8" else 1) * each.case.kv_tolerance


@pytest.mark.parametrize("size", [2, 3, 4])
@each_family
def test_split_over_ranks_equals_whole(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = CASES[name].raw()
    monkeypatch.setitem(test_shard_model.FAMILIES, name, (name, raw))
    make, logits = test_shard_model.make_shard, test_shard_model.logits
    expected = logits(make(name, "dense", SINGLE_RANK), SINGLE_RANK)
    outputs = run_on_ranks(size, lambda group: logits(make(name, "dense", group), group))
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=CASES[name].split_tolerance)


@pytest.mark.parametrize(("dtype", "recipe"), BITS)
@each_family
def test_every_recipe_is_built_and_accepted(
    name: str, dtype: str, recipe: str, saved: Mapping[str, Saved], tmp_path: Path
) -> None:
    report, written = build_and_accept(
        saved[name].folder, tmp_path / "e", dtype, recipe, **RECIPES[recipe]
    )
    assert written, report.get("reason", report)


@pytest.mark.parametrize(("dtype", "recipe"), FAULT_BITS)
@pytest.mark.parametrize(("name", "fault"), pairs("faults"))
def test_a_planted_fault_is_refused_by_name(
    name: str, fault: str, dtype: str, recipe: str, tmp_path: Path, saved: Mapping[str, Saved]
) -> None:
    planted, checkpoint = CASES[name].faults[fault], saved[name].folder
    if planted.case:
        checkpoint = tmp_path / "hf"
        CASES[name].save(checkpoint, **planted.case)
    family = import_module_if_exists("modelmill.models", name)
    assert family is not None
    real = family.config_from_hf
    with mock.patch.object(family, "config_from_hf", lambda raw: planted.change(real(raw))):
        report, written = build_and_accept(
            checkpoint, tmp_path / "e", dtype, recipe, **RECIPES[recipe]
        )
    assert not written
    assert (report["layer"], report["module"] in planted.modules) == (planted.layer, True), report[
        "reason"
    ]
