"""What makes a model fit that does not: another recipe, more GPUs, or more memory.

Each way that is named was planned, so that it does fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from modelmill.builder import memory_plan
from modelmill.builder.plan import BuildPlan, make_build_plan
from modelmill.core.byte_size import format_bytes
from modelmill.core.config import BuildConfig
from modelmill.core.errors import ModelmillError
from modelmill.core.model_family import LANGUAGE_ENGINE_TYPE

SMALLER_RECIPES = ("int8", "int4")
SUGGESTED_TP_SIZES = (2, 4, 8, 16, 32, 64)


def describe_plan(plan: BuildPlan, ranks: int = 1, expert_parallel: bool = False) -> dict[str, Any]:
    """Return ``BuildPlan.describe``, with advice where the model does not fit.

    Args:
        plan: the plan.
        ranks: over which the engine will be split.
        expert_parallel: whether they divide whole experts.
    """
    facts = plan.describe(ranks, expert_parallel)
    memory = facts["memory"]
    if plan.engine_type == LANGUAGE_ENGINE_TYPE and not _fits_in_memory(memory):
        memory["fits"] += _suggest_fitting_options(plan, ranks, expert_parallel)
    return facts


def _suggest_fitting_options(plan: BuildPlan, ranks: int, expert_parallel: bool) -> str:
    """Return what makes the model fit; recipes before GPUs before memory."""
    smaller = list(_smaller_plans(plan))
    for recipe, other in smaller:
        if _fits_in_memory(memory_report_on_largest_rank(other, ranks, expert_parallel)):
            return f"; -q {recipe} fits"
    ways = []
    tried = [("", plan), *((f" -q {recipe}", other) for recipe, other in smaller)]
    if plan.config.target == "cuda":
        most = SUGGESTED_TP_SIZES[-1] + 1
        for flag, other in tried:
            # smaller weights are a way of their own only over fewer GPUs
            more = (n for n in SUGGESTED_TP_SIZES if ranks < n < most)
            count = next((n for n in more if _fits_on_ranks(other, n, expert_parallel)), None)
            if count is not None:
                ways.append(f"--tp {count}{flag} ({count} such GPUs)")
                most = count
    if not ways:
        for flag, other in tried:
            report = memory_report_on_largest_rank(other, ranks, expert_parallel)
            size = format_bytes(_required_device_bytes(report))
            ways.append(f"{size} with{flag}" if flag else size)
        ways[0] = f"a device of {ways[0]}"
    what = "no recipe fits" if smaller else "no smaller recipe fits"
    return f"; {what}; what does: {' or '.join(ways)}"


def _smaller_plans(plan: BuildPlan) -> Iterator[tuple[str, BuildPlan]]:
    """Yield the recipes that make smaller weights, with their plans."""
    for recipe in SMALLER_RECIPES:
        if recipe == plan.config.quantization:
            continue
        config = BuildConfig(
            quantization=recipe,
            dtype=plan.config.dtype,
            target=plan.config.target,
            max_model_len=plan.config.max_model_len,
            kv_cache_dtype=plan.config.kv_cache_dtype,
            tower=plan.config.tower,
        )
        try:
            other = make_build_plan(plan.checkpoint, config)
        except ModelmillError:
            continue  # a checkpoint that is quantized already takes no other recipe
        if other.weight_bytes < plan.weight_bytes:
            yield recipe, other


def memory_report_on_largest_rank(
    plan: BuildPlan, ranks: int, expert_parallel: bool
) -> dict[str, Any]:
    """Return the memory report of a plan, of the largest of some ranks."""
    if ranks == 1:
        return plan.memory_report
    return memory_plan.largest_rank_memory_report(plan, ranks, expert_parallel)


def _fits_on_ranks(plan: BuildPlan, ranks: int, expert_parallel: bool) -> bool:
    """Return whether a model fits over some ranks; False if it cannot be split so."""
    try:
        return _fits_in_memory(memory_report_on_largest_rank(plan, ranks, expert_parallel))
    except ModelmillError:
        return False


def _fits_in_memory(memory: dict[str, Any]) -> bool:
    """Return whether the weights fit, and one token beside them."""
    starved = str(memory["fits"]).startswith(memory_plan.DOES_NOT_FIT_PREFIX)
    return not starved and bool(memory["kv_tokens"])


def _required_device_bytes(memory: dict[str, Any]) -> int:
    """Return the memory that a device must have, of which a part stays free."""
    needed = memory["weights"] + memory["expanded"] + memory["workspace"]
    return int(needed / memory_plan.GPU_MEMORY_UTILIZATION) + 1
