"""Launch configs: what an autotune file may choose, and that every choice computes the same."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelmill.ops import registry
from modelmill.ops.case import randn
from modelmill.ops.int8_linear import quantize
from modelmill.ops.launch_configs import (
    TORCH_DTYPES,
    TunedLaunchConfigs,
    filter_by_candidates,
    format_key,
    parse_key,
)

pytest.importorskip("triton")
from modelmill.ops.triton.common import launch_configs
from modelmill.ops.w8a8_linear import Linear8BitInputs

TUNABLE = ("linear", "int8_linear", "linear_swiglu")
KEYS = st.tuples(
    st.integers(1, 512),
    st.integers(1, 1 << 18),
    st.integers(1, 1 << 18),
    st.sampled_from(list(TORCH_DTYPES.values())),
)


@given(KEYS)
def test_a_key_survives_its_text(key: Any) -> None:
    assert parse_key(format_key(key)) == key


@pytest.mark.parametrize(
    "text", ["", "8x4096", "ax4->4 bfloat16", "8x4096->64 int3", "1x2->3 bfloat16 more"]
)
def test_another_text_is_no_key(text: str) -> None:
    with pytest.raises(ValueError):
        parse_key(text)


@given(st.integers(1, 2000))
def test_rows_share_the_bucket_that_holds_them(rows: int) -> None:
    bucket = launch_configs.row_bucket(rows)
    assert bucket >= min(rows, 256)
    assert bucket == 1 or bucket in launch_configs.GEMM_CONFIGS_BY_ROW_BUCKET


@pytest.mark.parametrize("op", TUNABLE)
def test_a_variant_takes_only_what_it_offers(op: str) -> None:
    module = registry.implementations(op)["triton"]
    key = (1, 4096, 4096, torch.bfloat16)
    offered = module.candidates(key)
    assert len(offered) == len(set(offered)) > 1
    chosen = {
        key: offered[-1],
        (1, 64, 64, torch.bfloat16): (7, 7, 7),
        (3, 64, 64, torch.bfloat16): (16, 32, 256, 5, 4),
    }
    assert filter_by_candidates(module, chosen) == {key: offered[-1]}


def test_an_op_without_sizes_takes_none() -> None:
    module = registry.implementations("rms_norm")["triton"]
    assert filter_by_candidates(module, {(1, 64, 64, torch.bfloat16): (1, 1, 1)}) == {}


@pytest.mark.parametrize("op", ["w8a8_linear", "fp8_linear"])
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_every_choice_computes_the_same_in_8_bits(op: str, rows: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module, reference = (
        registry.implementations(op)["triton"],
        import_module(f"modelmill.ops.{op}"),
    )
    args = reference.random_inputs(rows, 96, 70, device=device) | {"dtype": torch.float32}
    inputs = Linear8BitInputs(**args)
    expected = registry.reference(op)(inputs)
    key = module.gemm_key(args["x"], args["weight"])
    assert len(module.candidates(key)) > 1
    for choice in module.candidates(key):
        actual = module.run(inputs, configs={key: choice})
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    assert module.candidates((256, 70, 96, args["x"].dtype)) == ()
    assert module.candidates((1, 70, 96, torch.bfloat16)) == ()


@pytest.mark.parametrize("op", TUNABLE)
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_every_choice_computes_the_same(op: str, rows: int) -> None:
    """Compiled on a GPU, else interpreted: odd sizes, bias, more rows than one program."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = registry.implementations(op)["triton"]
    n, k, dtype = 70, 90, torch.float16
    x = randn(rows, k, device=device, dtype=dtype, seed=1)
    weight = randn(n, k, device=device, dtype=dtype, seed=2, scale=k**-0.5)
    args: dict[str, Any] = {"x": x, "weight": weight}
    if op == "int8_linear":
        args["weight"], args["scale"] = quantize(weight)
    args["bias"] = randn(n, device=device, dtype=dtype, seed=3)
    expected = registry.reference(op)(**args)
    key = (launch_configs.row_bucket(rows), n, k, dtype)
    for choice in module.candidates(key):
        actual = module.run(**args, configs={key: choice})
        torch.testing.assert_close(
            actual, expected, rtol=1e-2, atol=1e-2, msg=lambda m, c=choice: f"{c}: {m}"
        )


def test_the_choice_reaches_the_kernel_and_no_other_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requested_configs = []
    module = registry.implementations("linear")["triton"]
    monkeypatch.setattr(
        module, "run", lambda *args, configs=None, **more: requested_configs.append(configs)
    )
    monkeypatch.setattr(module, "supports", lambda *args, **more: True)
    monkeypatch.setattr(module, "unavailable_reason", lambda device_type: None)
    key = (1, 4096, 4096, torch.bfloat16)
    tuning = TunedLaunchConfigs(
        "a GPU", {"linear": {key: (4, 1024, 4)}, "int8_linear": {key: (9, 9, 9)}}
    )
    ops = registry.select_backends("cpu", {"linear": "triton"}, tuning)
    ops.linear(torch.zeros(1, 1), torch.zeros(1, 1))
    registry.select_backends("cpu", {"linear": "triton"}).linear(
        torch.zeros(1, 1), torch.zeros(1, 1)
    )
    assert requested_configs == [{key: (4, 1024, 4)}, None]


def test_a_gpu_with_less_shared_memory_gets_fewer_stages() -> None:
    x, weight = (
        torch.empty(8, 4096, dtype=torch.bfloat16),
        torch.empty(4096, 4096, dtype=torch.bfloat16),
    )
    default = (16, 32, 256, 5, 4)
    assert launch_configs.fit_stages(default, x, weight, 227 << 10) == default
    small = launch_configs.fit_stages(default, x, weight, 99 << 10)
    assert small[:3] == default[:3]
    assert small[3] * 256 * (16 + 32) * 2 <= 99 << 10
