"""Every family on a GPU: the CPU's tokens, with decode steps as CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from modelmill.parallel.tp_group import SINGLE_RANK
from modelmill.runtime.engine_core import EngineCore
from tests.models.all_families import CASES
from tests.parallel.test_shard_model import make_shard
from tests.runtime import tiny


def make_engine(name: str, device: str, weight_format: str = "dense") -> EngineCore:
    """An engine of a family's seeded model."""
    model = make_shard(name, weight_format, SINGLE_RANK, device, CASES[name].raw())
    return tiny.make_engine(model)  # type: ignore[arg-type]


def answers(engine: EngineCore) -> dict[str, object]:
    """Answers to prompts that come together, so that steps are mixed."""
    todo = tiny.requests(tiny.prompts(8, 1, 12, seed=3, vocab=engine.vocab), tiny.params())
    return dict(tiny.run(engine, todo))


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", ["dense", "int8"])
@pytest.mark.parametrize("name", CASES)
def test_a_family_answers_as_on_a_cpu(name: str, weight_format: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = answers(make_engine(name, "cpu", weight_format))
    engine = make_engine(name, "cuda:0", weight_format)
    assert answers(engine) == expected
    graphs = engine.model_runner.decode_graphs
    assert graphs is not None, "an op of a decode step cannot be captured"
    assert graphs._graphs
