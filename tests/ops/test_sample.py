"""Sampling: the distribution, each filter, and exact ids of every implementation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmill.ops import registry
from modelmill.ops.sample import (
    FIXED_POINT_BITS,
    SampleInputs,
    filtered_fixed_point_weights,
    sample,
)
from tests.hypothesis_examples import examples

VARIANTS = sorted(
    n for n, m in registry.implementations("sample").items() if m.unavailable_reason("cpu") is None
)


def sampling_params(rows: int, **options: float) -> dict[str, torch.Tensor]:
    """The same parameters for every row; neutral values by default."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    dtypes = {"top_k": torch.int32}
    return {
        n: torch.full((rows,), v, dtype=dtypes.get(n, torch.float32)) for n, v in values.items()
    }


def noise(count: int) -> torch.Tensor:
    """Evenly spread numbers: a draw for each shows the distribution function itself."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def _by_name(run: Any) -> Any:
    """The op with each input by its own name."""
    return lambda logits, **args: run(SampleInputs(logits, **args))


def _variant(name: str) -> Any:
    return _by_name(sample if name == "torch" else registry.implementations("sample")[name].run)


def test_a_weight_is_the_exponential() -> None:
    logits = torch.linspace(-20, 0, 9001)[None]
    actual = (
        filtered_fixed_point_weights(logits, **sampling_params(1))[0].double()
        * 2.0**-FIXED_POINT_BITS
    )
    want = logits[0].double().exp()
    assert float(((actual - want).abs() / want).max()) < 1e-2  # few bits are left at the far end
    near = want > 1e-5
    assert float(((actual - want).abs() / want)[near].max()) < 2e-6
    assert filtered_fixed_point_weights(
        torch.tensor([[5.0, 5.0, -math.inf]]), **sampling_params(1)
    ).tolist() == [[1 << FIXED_POINT_BITS, 1 << FIXED_POINT_BITS, 0]]


@pytest.mark.parametrize("variant", ["torch", *VARIANTS])
def test_draws_follow_the_distribution(variant: str) -> None:
    run = _variant(variant)
    count = 60 if variant == "triton" else 20_000
    shares = torch.tensor([0.5, 0.0, 0.3, 0.2, 0.0])
    drawn = run(
        torch.log(shares).expand(count, 5).contiguous(),
        **sampling_params(count),
        noise=noise(count),
    )
    counts = torch.bincount(drawn, minlength=5)
    expected = shares * count
    assert counts[1] == counts[4] == 0
    # even noise: every count is off by less than one
    assert float((counts - expected).abs().max()) <= 1
    if variant != "triton":
        generator = torch.Generator().manual_seed(5)
        random = torch.rand(count, dtype=torch.float64, generator=generator)
        observed = torch.bincount(
            run(
                torch.log(shares).expand(count, 5).contiguous(),
                **sampling_params(count),
                noise=random,
            )
        )
        inside = shares > 0
        chi = float(
            (
                (observed - expected[: len(observed)])[inside[: len(observed)]] ** 2
                / expected[inside]
            ).sum()
        )
        assert chi < 13.8  # two degrees of freedom, one in a thousand


def test_each_filter_keeps_what_it_says() -> None:
    shares = torch.tensor([0.1, 0.4, 0.05, 0.2, 0.2, 0.05])
    logits = shares.log()[None]

    def kept_ids(**options: float) -> list[int]:
        return (
            filtered_fixed_point_weights(logits, **sampling_params(1, **options))[0]
            .nonzero()[:, 0]
            .tolist()
        )

    assert kept_ids() == [0, 1, 2, 3, 4, 5]
    assert kept_ids(top_k=1) == [1]
    assert kept_ids(top_k=2) == [1, 3, 4]  # the second largest occurs twice
    assert kept_ids(top_k=6) == kept_ids(top_k=99) == [0, 1, 2, 3, 4, 5]
    assert kept_ids(top_p=0.3) == [1]
    assert kept_ids(top_p=0.5) == [1, 3]  # of equal ones the lower id
    assert kept_ids(top_p=0.7) == [1, 3, 4]
    assert kept_ids(top_p=1e-9) == kept_ids(top_p=1.2e-38) == [1]
    assert kept_ids(top_k=3, top_p=0.7) == [1, 3]  # 0.7 of the 0.8 that top-k leaves
    assert kept_ids(min_p=0.4) == [1, 3, 4]
    assert kept_ids(min_p=1.0) == [1]
    assert kept_ids(temperature=0.5, min_p=0.4) == [1]


# inf − inf, which is not used
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("variant", ["torch", *VARIANTS])
def test_values_that_are_no_numbers(variant: str) -> None:
    run = _variant(variant)
    inf, nan = math.inf, math.nan
    rows = [
        [nan, 1.0, nan, -inf],
        [-inf] * 4,
        [nan] * 4,
        [0.0, inf, nan, inf],
        [-inf, -inf, 2.0, -inf],
        [nan, 3, 3, 1],
    ]
    logits = torch.tensor(rows)
    for options in (
        {},
        {"top_k": 2},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"top_k": 3, "top_p": 0.9, "min_p": 0.1},
    ):
        ids = run(
            logits,
            **sampling_params(6, **options),
            noise=torch.full((6,), 0.9, dtype=torch.float64),
        ).tolist()
        assert ids[:3] == [1, 0, 0]
        assert ids[3] == (1 if "top_p" in options and "top_k" not in options else 3)
        assert ids[4] == 2
    assert run(logits, **sampling_params(6, temperature=0.0), noise=noise(6)).tolist() == [
        1,
        0,
        0,
        1,
        2,
        1,
    ]


@pytest.mark.skipif("cpu" not in VARIANTS, reason="needs a C++ compiler: apt-get install g++")
@settings(max_examples=examples(150, 40), deadline=None)
@given(data=st.data())
def test_ids_from_cpp_are_the_references(data: st.DataObject) -> None:
    """Any mix of parameters, ties and scales."""
    args = _draw_inputs(
        data,
        data.draw(st.integers(1, 4)),
        data.draw(st.one_of(st.integers(1, 40), st.integers(41, 9000))),
    )
    inputs = SampleInputs(**args)
    assert torch.equal(registry.implementations("sample")["cpu"].run(inputs), sample(inputs))


# inf − inf, which is not used
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.skipif("triton" not in VARIANTS, reason="Triton's interpreter is off")
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_ids_from_triton_are_the_references(data: st.DataObject) -> None:
    """The same through Triton's interpreter: fewer and shorter rows, the tail of a chunk among
    them.
    """
    args = _draw_inputs(
        data,
        data.draw(st.integers(1, 2)),
        data.draw(st.sampled_from([1, 7, 64, 1023, 1024, 1025, 1500])),
    )
    inputs = SampleInputs(**args)
    assert torch.equal(registry.implementations("sample")["triton"].run(inputs), sample(inputs))


def _draw_inputs(data: st.DataObject, rows: int, vocab: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 20), "seed"))
    logits = torch.randn(rows, vocab, generator=generator) * data.draw(
        st.sampled_from([1e-6, 0.1, 1.0, 4.0, 40.0])
    )
    logits += data.draw(st.sampled_from([0.0, 10.0, -1000.0]), "shift")
    if data.draw(st.booleans(), "ties"):
        logits = logits.round()
    if data.draw(st.booleans(), "gone"):
        logits[torch.rand(rows, vocab, generator=generator) < 0.3] = -math.inf

    def each(*values: float) -> list[float]:
        return data.draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows))

    return {
        "logits": logits,
        "temperature": torch.tensor(each(0.0, 0.3, 1.0, 1.7), dtype=torch.float32),
        "top_k": torch.tensor(each(0, 1, 2, 50, 1500, 100_000), dtype=torch.int32),
        "top_p": torch.tensor(
            each(1.2e-38, 1e-6, 0.3, 0.9, 0.999999, 1.0, 1.0), dtype=torch.float32
        ),
        "min_p": torch.tensor(each(0.0, 0.0, 0.05, 1.0), dtype=torch.float32),
        "noise": torch.tensor(each(0.0, 0.25, 0.7, np.nextafter(1.0, 0.0)), dtype=torch.float64),
    }


HARD: dict[str, Any] = {
    "normal": lambda x: x * 2,
    "peaked": lambda x: x * 30,
    "flat": lambda x: x * 1e-3,
    "equal": lambda x: x * 0,
    "rounded": lambda x: (x * 2).round(),
    "outlier": lambda x: torch.where(
        torch.arange(x.shape[1], device=x.device) == 777, 25.0, x * 1e-4
    ),
    "gone": lambda x: torch.where(x > 2.5, x, -math.inf),
    "without end": lambda x: torch.where(x > 4.0, math.inf, x),
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", list(HARD))
def test_on_a_gpu_the_ids_are_the_references(shape: str) -> None:
    """The vocabulary of a large model, against the reference on the CPU."""
    run = _by_name(registry.implementations("sample")["triton"].run)
    mixes = [
        (0, 1.0),
        (50, 1.0),
        (0, 0.9),
        (50, 0.9),
        (5000, 1.0),
        (100_000, 0.5),
        (0, 0.05),
        (1, 0.5),
        (0, 0.999999),
    ]
    for rows, vocab in ((9, 151_936), (3, 50_257)):
        logits = HARD[shape](
            torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows))
        )
        for turn in range(9 // rows):
            chosen = [mixes[(i + 3 * turn) % 9] for i in range(rows)]
            args = sampling_params(rows)
            args["temperature"] = torch.tensor([0.9, 1.0, 0.4] * (rows // 3))
            args["top_k"] = torch.tensor([k for k, _ in chosen], dtype=torch.int32)
            args["top_p"] = torch.tensor([p for _, p in chosen])
            args["min_p"] = torch.tensor([0.0, 0.0, 0.02] * (rows // 3))
            expected = sample(SampleInputs(logits, **args, noise=noise(rows)))
            there = {n: v.cuda() for n, v in args.items()}
            actual = run(logits.cuda(), **there, noise=noise(rows).cuda())
            assert torch.equal(actual.cpu(), expected), chosen
            for i in range(rows):
                one = {n: v[i : i + 1].clone() for n, v in there.items()}
                alone = run(logits[i : i + 1].cuda(), **one, noise=noise(rows)[i : i + 1].cuda())
                assert alone.item() == expected[i].item()
