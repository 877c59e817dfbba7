"""``modelmill doctor``: the environment, and what it lacks."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmill.cli.options import CommonArgs
from modelmill.cli.output import print_facts, print_json, print_table, show_progress
from modelmill.cli.plan_tables import format_layers_by_kv_window
from modelmill.core import env, packages
from modelmill.core.byte_size import format_bytes
from modelmill.core.config import option_field
from modelmill.core.model_family import LANGUAGE_ENGINE_TYPE
from modelmill.core.page_groups import sum_group_counts_by_window

if TYPE_CHECKING:
    from modelmill.artifact.store import Artifact

HELP = (
    "Show the environment: devices, versions, kernels available, what is missing and how to get it."
)

REQUIRED_PACKAGES = (
    "torch", "numpy", "safetensors", "tokenizers",
    "tiktoken", "sentencepiece", "jinja2", "huggingface_hub",
)  # fmt: skip
OPTIONAL_PACKAGES = {
    "triton": ("fast kernels on a GPU", "gpu"),
    "pynvml": ("readings of the GPU", "gpu"),
    "transformers": ("--reference", "eval"),
    "rouge_score": ("summarize", "eval"),
    "matplotlib": ("--plot", "report"),
}
DISTRIBUTION_NAMES = {"pynvml": "nvidia-ml-py", "rouge_score": "rouge-score"}
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Command-line options of ``modelmill doctor``."""

    engine: Path | None = option_field(
        None, "an engine: whether it fits this machine", positional=True, metavar="ENGINE"
    )
    report: bool = option_field(False, "print what an issue needs, as text to paste, without paths")


def run(args: Args) -> int:
    """Print the environment; exit code 1 if a required package is missing."""
    with show_progress("looking around", lines=True) as on_progress:
        from modelmill.loader.device import ensure_cpu_kernels_compiled

        ensure_cpu_kernels_compiled("cpu", on_progress)
        facts = {
            **collect_facts(),
            **({} if args.engine is None else {"engine": engine_facts(args.engine)}),
        }
    if args.json:
        print_json(facts)
    elif args.report:
        print("\n".join(markdown_report_lines(facts)))
    else:
        _show_report(facts)
    return 1 if any(not each["needs"] for each in facts["missing"]) else 0


def collect_facts() -> dict[str, Any]:
    """Return all facts, as JSON data."""
    import psutil
    import torch

    from modelmill import __version__
    from modelmill.core import memory_limits
    from modelmill.eval.report import cpu_name
    from modelmill.ops.cpu.common.openmp import describe_wait_policy

    cache, memory = env.cache_dir(), memory_limits.read_memory_info()
    return {
        "modelmill": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {
            name: _package_version(name) for name in (*REQUIRED_PACKAGES, *OPTIONAL_PACKAGES)
        },
        "cpu": {
            "name": cpu_name(),
            "cores": psutil.cpu_count(logical=False),
            "threads": torch.get_num_threads(),
            "waiting": describe_wait_policy(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "memory": memory.total,
            "memory_free": memory.free,
        },
        "gpus": _gpu_facts(torch),
        "cuda": torch.version.cuda,
        "compiler": _find_cxx_compiler(),
        "cpu_kernels": _cpu_kernel_facts(),
        "kernels": _op_variant_facts(torch),
        "cache": {"path": str(cache), "disk_free": _free_disk_bytes(cache)},
        "missing": _missing_dependency_facts(torch),
        "outside": [asdict(each) for each in packages.untested_versions()],
    }


def engine_facts(path: Path) -> dict[str, Any]:
    """How an engine stands to this machine.

    Raises ArtifactError, IncompatibleArtifact (another packing, schema).
    """
    from modelmill.artifact.store import open_artifact
    from modelmill.cli.inspect import tuning_facts

    artifact = open_artifact(path)
    manifest = artifact.manifest
    return {
        "path": str(path),
        "packing": manifest.packing,
        "target": manifest.build["target"],
        "versions": manifest.versions,
        "tuning": tuning_facts(path),
        "kv_windows": _count_layers_by_kv_window(artifact)
        if manifest.engine_type == LANGUAGE_ENGINE_TYPE
        else [],
        "experts": _describe_unfused_experts(artifact),
    }


def _describe_unfused_experts(artifact: Artifact) -> str | None:
    """Which experts a GPU computes one after another, and why; None: none, or no GPU's engine."""
    from modelmill.builder.expert_loop import unfused_experts_remark
    from modelmill.loader.model_loader import build_rank_model
    from modelmill.parallel.tp_group import SINGLE_RANK

    manifest = artifact.manifest
    if manifest.engine_type != LANGUAGE_ENGINE_TYPE or manifest.build["target"] != "cuda":
        return None
    return unfused_experts_remark(
        build_rank_model(artifact, SINGLE_RANK),
        manifest.weight_formats,
        manifest.build.get("activation_scales"),
        set(artifact.names()),
    )


def _count_layers_by_kv_window(artifact: Artifact) -> list[dict[str, int | None]]:
    """How many layers keep the KV pages of how many tokens, at the engine's longest sequence."""
    import torch

    from modelmill.loader.model_loader import build_rank_model
    from modelmill.nn.kv import kv_cache_dtype
    from modelmill.nn.whole_model_decode import model_kv_shape
    from modelmill.ops import registry
    from modelmill.parallel.tp_group import SINGLE_RANK

    manifest = artifact.manifest
    target = manifest.build["target"]
    decode_op = registry.select_backends("cpu").decode if target == "cpu" else None
    model = build_rank_model(artifact, SINGLE_RANK)
    # which other dtype pages have makes no difference to how layers share them
    kv_dtype = kv_cache_dtype(manifest.build.get("kv_cache_dtype", "auto"), torch.float32)
    formats = manifest.weight_formats.values()
    shape = model_kv_shape(model, manifest.max_model_len, decode_op, kv_dtype, formats=formats)
    layers = [len(group.layers) for group in shape.groups] or [shape.layers]
    by_window = sum_group_counts_by_window(shape.group_windows, layers)
    return [{"window": window, "layers": count} for window, count in by_window.items() if count]


def _gpu_facts(torch: Any) -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        facts_of = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"{facts_of.major}.{facts_of.minor}"
        gpus.append(
            {"name": facts_of.name, "capability": capability, "memory": total, "memory_free": free}
        )
    return gpus


def _op_variant_facts(torch: Any) -> list[dict[str, Any]]:
    """Return the chosen variant of each op and device, and why others are unavailable."""
    from modelmill.ops import registry

    rows = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        chosen = registry.select_backends(device).backends
        for op in registry.op_names():
            reasons = {
                name: module.unavailable_reason(device)
                for name, module in registry.implementations(op).items()
            }
            available = ["torch", *(name for name, reason in reasons.items() if reason is None)]
            refused = {name: reason for name, reason in reasons.items() if reason is not None}
            rows.append(
                {
                    "op": op,
                    "device": device,
                    "chosen": chosen[op],
                    "available": available,
                    "unavailable": refused,
                }
            )
    return rows


def _cpu_kernel_facts() -> dict[str, str | None]:
    """Return the origin and path of the compiled CPU kernels, or why there are none."""
    from modelmill.ops.cpu.common import build

    library = build.load_or_compile_library()
    if isinstance(library, str):
        return {"origin": None, "path": None, "reason": library}
    return {"origin": library.origin, "path": str(library.path), "reason": None}


def _find_cxx_compiler() -> str | None:
    named = env.cxx_from_env()
    return next(
        (path for path in (shutil.which(name) for name in (named, *COMPILERS) if name) if path),
        None,
    )


def _missing_dependency_facts(torch: Any) -> list[dict[str, Any]]:
    """What is absent: its name, what needs it (None: everything) and how to get it."""
    absent: list[dict[str, Any]] = [
        {"name": name, "needs": None, "get": f"pip install {name}"}
        for name in REQUIRED_PACKAGES
        if find_spec(name) is None
    ]
    on_gpu = torch.cuda.is_available()
    for name, (needs, extra) in OPTIONAL_PACKAGES.items():
        if find_spec(name) is None and (on_gpu or name not in ("triton", "pynvml")):
            get = packages.install_command(extra)
            absent.append({"name": name, "needs": needs, "get": get})
    if _cpu_kernel_facts()["origin"] is None and _find_cxx_compiler() is None:
        get = "apt install g++ (or set CXX), or install a wheel for this machine"
        absent.append({"name": "a C++ compiler", "needs": "compiled CPU kernels", "get": get})
    return absent


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(DISTRIBUTION_NAMES.get(name, name))
    except metadata.PackageNotFoundError:
        return None


def _free_disk_bytes(path: Any) -> int | None:
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def _format_cpu_kernels(report: dict[str, str | None]) -> str:
    if report["origin"] is None:
        return f"none, so that torch computes, several times slower: {report['reason']}"
    return f"{report['origin']}: {report['path']}"


def markdown_report_lines(facts: Mapping[str, Any]) -> list[str]:
    """The facts that matter to an issue, in Markdown; no path of this machine."""
    cpu, prebuilt = facts["cpu"], facts["cpu_kernels"]
    versions = [f"{name} {version}" for name, version in facts["packages"].items() if version]
    gpus = [
        f"{g['name']} ({format_bytes(g['memory'])}, sm {g['capability']})" for g in facts["gpus"]
    ]
    chosen: dict[tuple[str, str], list[str]] = {}
    for kernel in facts["kernels"]:
        chosen.setdefault((kernel["device"], kernel["chosen"]), []).append(kernel["op"])
    lines = [
        f"* modelmill {facts['modelmill']}, Python {facts['python']}, {facts['system']}",
        f"* CPU: {cpu['name']}, {cpu['cores']} cores, {cpu['threads']} threads, "
        f"{cpu['capability']}, {format_bytes(cpu['memory'])}; "
        f"kernels: {prebuilt['origin'] or 'none'}",
        f"* GPU: {', '.join(gpus) or 'none'}; CUDA {facts['cuda'] or 'none'}",
        f"* compiler: {Path(facts['compiler']).name if facts['compiler'] else 'none'}",
        f"* packages: {', '.join(versions)}",
    ]
    lines += [
        f"* {device} {backend}: {', '.join(ops)}" for (device, backend), ops in chosen.items()
    ]
    lines += [f"* missing: {each['name']}" for each in facts["missing"]]
    lines += [f"* not tested: {each['name']} {each['version']}" for each in facts["outside"]]
    return lines


def _show_report(report: dict[str, Any]) -> None:
    _show_machine(report)
    rows = [
        [
            k["device"],
            k["op"],
            k["chosen"],
            ", ".join(k["available"]),
            "; ".join(f"{n}: {r}" for n, r in k["unavailable"].items()),
        ]
        for k in report["kernels"]
    ]
    print_table(("device", "op", "chosen", "available", "not available"), rows, title="Kernels")
    if "engine" in report:
        _show_engine(report["engine"])
    if report["missing"]:
        missing = [
            [each["name"], each["needs"] or "everything", each["get"]] for each in report["missing"]
        ]
        print_table(("missing", "needed for", "how to get it"), missing)
    else:
        print("nothing is missing")
    if report["outside"]:
        rows = [
            [each["name"], each["version"], each["tested"], _version_fix_hint(each)]
            for each in report["outside"]
        ]
        print_table(
            ("outside what was tested", "installed", "tested", "how to get a tested one"), rows
        )


def _show_machine(report: dict[str, Any]) -> None:
    cpu, cache = report["cpu"], report["cache"]
    gpus = [
        f"{g['name']}, {format_bytes(g['memory'])}, {format_bytes(g['memory_free'])} free, sm "
        f"{g['capability']}"
        for g in report["gpus"]
    ]
    cores = f"{cpu['cores']} cores, {cpu['threads']} threads used, {cpu['capability']}"
    disk_free = format_bytes(cache["disk_free"] or 0)
    versions = (f"{name} {version}" for name, version in report["packages"].items() if version)
    print_facts(
        [
            (
                "modelmill",
                f"{report['modelmill']} on Python {report['python']}, {report['system']}",
            ),
            ("CPU", f"{cpu['name']}: {cores}"),
            ("threads wait", cpu["waiting"]),
            ("memory", f"{format_bytes(cpu['memory'])}, {format_bytes(cpu['memory_free'])} free"),
            ("GPU", "\n".join(gpus) or "none"),
            ("CUDA", report["cuda"]),
            ("compiler", report["compiler"] or "none"),
            ("CPU kernels", _format_cpu_kernels(report["cpu_kernels"])),
            ("cache", f"{cache['path']}, {disk_free} free on its disk"),
            ("packages", ", ".join(versions)),
        ]
    )


def _show_engine(engine: dict[str, Any]) -> None:
    from modelmill.cli.inspect import format_tuning

    versions = ", ".join(f"{name} {version}" for name, version in engine["versions"].items())
    lines: list[tuple[str, str | None]] = [
        ("packing", f"{engine['packing']}: read here"),
        ("built", f"for {engine['target']} with {versions}"),
    ]
    pages = [
        format_layers_by_kv_window(each["layers"], each["window"]) for each in engine["kv_windows"]
    ]
    lines += [("KV pages", "; ".join(pages) or None), ("experts", engine["experts"])]
    tuned = format_tuning(engine["tuning"]) or "none: default launch configs"
    print_facts([*lines, ("tuning", tuned)], title=engine["path"])


def _version_fix_hint(outside: dict[str, Any]) -> str:
    if outside["name"] == packages.INTERPRETER_NAME:
        return f"another Python ({outside['tested']})"
    return f"pip install '{outside['name']}{outside['tested']}'"
