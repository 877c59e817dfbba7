# ruff: noqa: B023  what is defined in a loop is called at once
"""The exchange kernels, with several ranks on one GPU: each has its own buffer and its own
stream.
"""

from __future__ import annotations

import pytest
import torch

from modelmill.ops.add_rms_norm import add_rms_norm

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"


@pytest.fixture
def ranks(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    """Buffers of ranks that all live on one device, and a stream for each; small blocks are at hand
    in every stream.
    """
    from modelmill.ops.triton.communication.custom_all_reduce import MAX_PROGRAMS, AllReduceBuffers

    size, region = request.param, 4096
    stores = [
        torch.zeros(
            AllReduceBuffers.count_buffer_words(size, region), dtype=torch.int64, device=DEVICE
        )
        for _ in range(size)
    ]
    addresses = tuple(s.data_ptr() for s in stores)
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    counts = [torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=DEVICE) for _ in range(size)]
    streams = [torch.cuda.Stream() for _ in range(size)]
    torch.cuda.synchronize()
    yield (
        [AllReduceBuffers(r, addresses, counts[r], stop, region) for r in range(size)],
        streams,
        stores,
    )
    stop.fill_(1)
    torch.cuda.synchronize()


def run(ranks, call):  # type: ignore[no-untyped-def]
    """``call(rank)`` on each rank's stream, all waiting for each other on the device."""
    buffers, streams, _ = ranks
    for stream in streams:
        with torch.cuda.stream(stream):
            # a first allocation may wait for the device, which waits for us
            del_me = [
                torch.empty(n, dtype=torch.uint8, device=DEVICE) for n in (256, 1 << 20, 1 << 21)
            ]
            del del_me
    torch.cuda.synchronize()
    out = []
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            out.append(call(rank, buffers[rank]))
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("ranks", [2, 3, 4], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_are_right_and_the_same(ranks, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    from modelmill.ops.triton.communication import custom_all_reduce

    size = len(ranks[0])
    generator = torch.Generator().manual_seed(1)
    limit = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    # compile and load the kernels first, with the abort flag set so that no rank waits
    ranks[0][0].abort.fill_(1)
    shapes = [(1, 4096), (5, 4096), (1, 96), (3, 768), (1, 2730), (20, 64)]
    # rounds; more programs than run at once would wait for ever
    shapes += [(300, 512)] if size == 2 else []
    for tokens, width in shapes:
        x = torch.zeros(tokens, width, dtype=dtype, device=DEVICE)
        run(ranks, lambda r, b: custom_all_reduce.all_reduce_rows(x, None, b))
        run(
            ranks,
            lambda r, b: custom_all_reduce.all_reduce_rows(
                x, (x.clone(), x[0].contiguous(), 1e-5), b
            ),
        )
    ranks[0][0].abort.fill_(0)
    for _ in range(3):
        for tokens, width in shapes:
            parts = [
                torch.randn(tokens, width, generator=generator).to(DEVICE, dtype)
                for _ in range(size)
            ]
            expected = torch.stack([p.double() for p in parts]).sum(0)
            plain = run(ranks, lambda r, b: custom_all_reduce.all_reduce_rows(parts[r], None, b)[0])
            for output in plain:
                assert torch.equal(output, plain[0])
                assert float((output.double() - expected).norm() / expected.norm()) < limit
            residual = torch.randn(tokens, width, generator=generator).to(DEVICE, dtype)
            weight = torch.rand(width, generator=generator).to(DEVICE, dtype)
            residuals = [residual.clone() for _ in range(size)]
            fused = run(
                ranks,
                lambda r, b: custom_all_reduce.all_reduce_rows(
                    parts[r], (residuals[r], weight, 1e-5), b
                ),
            )
            fused_expected = add_rms_norm(expected, residual.double(), weight.double(), 1e-5)
            for output in fused:
                for actual, first, target in zip(output, fused[0], fused_expected, strict=True):
                    assert torch.equal(actual, first)
                    assert float((actual.double() - target).norm() / target.norm()) < 2 * limit


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathers_put_columns_side_by_side(ranks, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    from modelmill.ops.triton.communication import custom_all_reduce
    from modelmill.parallel.shard import cumulative_offsets

    size = len(ranks[0])
    shapes = [(1, (4096, 4000, 4000, 3980)), (3, (16, 16, 16, 2)), (2, (2064, 2048, 2048, 2048))]
    shapes += [(70, (9000, 8976))] if size == 2 else []
    for tokens, widths in shapes:
        rank_widths = widths[:size]
        full = torch.randn(
            tokens, sum(rank_widths), generator=torch.Generator().manual_seed(tokens)
        ).to(DEVICE, dtype)
        parts = [p.contiguous() for p in full.split(rank_widths, 1)]
        starts = torch.tensor(cumulative_offsets(rank_widths), dtype=torch.int32, device=DEVICE)
        ranks[0][0].abort.fill_(1)
        run(
            ranks,
            lambda r, b: custom_all_reduce.all_gather_columns(parts[r], starts, rank_widths, b),
        )
        ranks[0][0].abort.fill_(0)
        for _ in range(3):
            for output in run(
                ranks,
                lambda r, b: custom_all_reduce.all_gather_columns(parts[r], starts, rank_widths, b),
            ):
                assert torch.equal(output, full)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_no_request_waits_once_stopped(ranks) -> None:  # type: ignore[no-untyped-def]
    """A rank whose neighbour never comes ends all the same."""
    from modelmill.ops.triton.communication import custom_all_reduce

    x = torch.randn(1, 4096, device=DEVICE)
    ranks[0][0].abort.fill_(1)
    custom_all_reduce.all_reduce_rows(x, None, ranks[0][0])
    torch.cuda.synchronize()
    ranks[0][0].abort.fill_(0)
    event = torch.cuda.Event()
    custom_all_reduce.all_reduce_rows(x, None, ranks[0][0])
    event.record()
    assert not event.query()
    ranks[0][0].abort.fill_(1)
    event.synchronize()
