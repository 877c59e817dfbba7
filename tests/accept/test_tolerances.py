"""Honest rounding stays within the published bounds; every planted fault leaves them, in every
dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from modelmill.accept.error_metrics import (
    ErrorMetrics,
    compare_logits,
    compare_tensors,
    confident_top1_agreement,
)
from modelmill.accept.reference import ReferenceModel, open_reference
from modelmill.accept.tolerances import DTYPES_WITH_BOUNDS, logits_bound, module_bound
from modelmill.core.errors import UsageError
from tests.accept.faultless_modules import FaultlessModules, arithmetic_of
from tests.accept.memory_checkpoint import memory_checkpoint
from tests.accept.reference_faults import FAULTS, fault_rows, norm_probe
from tests.accept.seeded_checkpoint import seeded_decoder

SETTINGS = [(dtype, recipe) for dtype in DTYPES_WITH_BOUNDS for recipe in ("none", "int8")]
IDS = torch.randint(0, 200, (48,), generator=torch.Generator().manual_seed(9))


@pytest.fixture(scope="module", params=["gauss", "heavy"])
def reference(request: pytest.FixtureRequest) -> ReferenceModel:
    return open_reference(
        memory_checkpoint(*seeded_decoder(layers=3, hidden=128, shape=request.param, seed=5))
    )


def walk(
    reference: ReferenceModel, faultless: FaultlessModules
) -> Iterator[tuple[str, ErrorMetrics]]:
    """Every module-local row of an honest engine, its norm probes, and at the end its own
    logits.
    """
    exact, stream = reference.embed(IDS), reference.embed(IDS).to(faultless.dtype)
    for index in range(reference.num_layers):
        weights = reference.layer_weights(index)
        trace = reference.run_layer(index, weights, exact, len(IDS))
        yield from faultless.module_errors(index, weights, trace)
        for name in ("input_norm", "mlp_norm"):
            x = norm_probe(reference, index, name)
            expected = reference.run_norm(index, name, x)
            yield (
                name,
                compare_tensors(name, faultless.module(index, weights, name, (x,)), expected),
            )
        stream = faultless.layer(index, weights, stream, trace)
        exact = trace["output"].output
    expected = reference.head(exact)["logits"].output
    final = faultless.head(stream)
    bound = logits_bound(
        str(faultless.dtype)[6:], faultless.recipe, num_layers=reference.num_layers
    )
    assert compare_logits("logits", final, expected).rel_l2 <= bound.rel_l2
    agreement = confident_top1_agreement(final, expected, bound.margin)
    assert agreement.all_agree
    assert agreement.num_sure > len(IDS) // 4


@pytest.mark.parametrize(("dtype", "recipe"), SETTINGS)
def test_faultless_rounding_is_within(reference: ReferenceModel, dtype: str, recipe: str) -> None:
    with torch.no_grad():
        for name, row in walk(
            reference, FaultlessModules(reference, getattr(torch, dtype), recipe)
        ):
            assert not module_bound(
                arithmetic_of(name), dtype, recipe, length=len(IDS)
            ).describe_violations(row), name


@pytest.mark.parametrize(("dtype", "recipe"), SETTINGS)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_out_of_bounds(
    reference: ReferenceModel, fault: str, dtype: str, recipe: str
) -> None:
    with torch.no_grad():
        for row in fault_rows(reference, fault, IDS, getattr(torch, dtype), recipe):
            bound = module_bound(
                arithmetic_of(row.name.split()[-1]), dtype, recipe, length=len(IDS)
            )
            assert bound.describe_violations(row), row
            assert bound.error_to_bound_ratio(row) > 2, row


def test_nan_is_out_of_bounds() -> None:
    row = compare_tensors("q", torch.tensor([float("nan")]), torch.ones(1))
    assert len(module_bound("linear", "bfloat16", "int8").describe_violations(row)) == 3


def test_each_number_that_is_nan_is_out_of_bounds() -> None:
    nan = float("nan")
    metrics = replace(compare_tensors("q", torch.ones(1), torch.ones(1)), rel_l2=nan, gain=nan)
    assert len(module_bound("linear", "bfloat16", "int8").describe_violations(metrics)) == 2


@pytest.mark.parametrize("arithmetic", ["norm", "linear", "attention"])
def test_float32_is_exact_to_more_than_four_digits(arithmetic: str) -> None:
    expected = torch.randn(64, 64)
    row = compare_tensors("q", expected + 1e-4 * torch.randn(64, 64), expected)
    assert module_bound(arithmetic, "float32").describe_violations(row)


def test_what_is_not_published_says_so() -> None:
    with pytest.raises(UsageError, match="float8"):
        module_bound("linear", "float8")
    with pytest.raises(UsageError, match="int3"):
        logits_bound("float16", "int3", num_layers=2)
