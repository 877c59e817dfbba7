"""``modelmill inspect``: describes a checkpoint or an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from modelmill.cli.acceptance_tables import show_acceptance
from modelmill.cli.engine_options import resolve_or_pull_model
from modelmill.cli.options import CommonArgs
from modelmill.cli.output import print_facts, print_json, print_table, show_progress
from modelmill.core.byte_size import format_bytes
from modelmill.core.config import option_field
from modelmill.core.errors import ModelmillError

HELP = (
    "Show what a checkpoint or an engine is: architecture, sizes, dtypes, tokenizer, chat "
    "template, acceptance."
)
EPILOG = """Examples:

  modelmill inspect model.engine

  modelmill inspect model.gguf --tensors"""

SIZE_KEYS = (
    ("layers", ("num_hidden_layers", "n_layer")),
    ("hidden size", ("hidden_size", "n_embd")),
    ("inner size", ("intermediate_size", "n_inner")),
    ("heads", ("num_attention_heads", "n_head")),
    ("KV heads", ("num_key_value_heads",)),
    ("vocabulary", ("vocab_size", "padded_vocab_size")),
    ("longest sequence", ("max_position_embeddings", "n_positions", "seq_length")),
)
EXAMPLE_CHAT = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Command-line options of ``modelmill inspect``."""

    path: Path = option_field(help="a checkpoint or an engine", positional=True, metavar="PATH")
    tensors: bool = option_field(False, "list every tensor", flags=("--tensors",))
    verify: bool = option_field(
        False, "read every file of an engine and compare its sha256", flags=("--verify",)
    )


def run(args: Args) -> int:
    """Print the facts as tables or JSON."""
    from modelmill.artifact.store import is_engine_folder

    facts = _engine_facts(args) if is_engine_folder(args.path) else _checkpoint_facts(args)
    print_json(facts) if args.json else _show_facts(facts)
    return 0


def _engine_facts(args: Args) -> dict[str, Any]:
    from modelmill.artifact.store import open_artifact
    from modelmill.artifact.verify import verify_file_hashes

    artifact = open_artifact(args.path)
    if args.verify:
        with show_progress("verifying") as on_progress:
            verify_file_hashes(artifact, force=True, on_progress=on_progress)
    manifest = artifact.manifest
    tensors = [_tensor_facts(name, each.shape, str(each.dtype).removeprefix("torch."),
        each.nbytes) for name, each in
               ((name, artifact.tensor(name)) for name in artifact.names())]  # fmt: skip
    return {
        "kind": "engine",
        "engine_kind": manifest.engine_type,
        "path": str(args.path),
        "model_type": manifest.model_type,
        "sizes": _model_sizes(manifest.config, manifest.model_type),
        "max_model_len": manifest.max_model_len,
        "build": manifest.build,
        "weights": dict(Counter(manifest.weight_formats.values())),
        "packing": manifest.packing,
        **_summarize_tensors(tensors, args.tensors),
        **tokenizer_and_chat_facts(artifact.tokenizer_files()),
        "generation": manifest.generation,
        "sampling": sampling_facts(
            manifest.generation,
            manifest.source.get("container"),
            manifest.engine_type == "language",
        ),
        "source": manifest.source,
        "versions": manifest.versions,
        "digest": manifest.digest(),
        "verified": args.verify or None,
        "tuning": tuning_facts(args.path),
        "acceptance": artifact.acceptance_report(),
    }


def _checkpoint_facts(args: Args) -> dict[str, Any]:
    from modelmill.builder.model_config import derive_missing_config
    from modelmill.checkpoint.open import open_checkpoint

    checkpoint = derive_missing_config(open_checkpoint(resolve_or_pull_model(args.path)))
    infos = [checkpoint.tensor_info(name) for name in checkpoint.names()]
    return {
        "kind": "checkpoint",
        "path": str(args.path),
        "container": checkpoint.container,
        "model_type": checkpoint.model_type,
        "architectures": checkpoint.config.get("architectures"),
        "sizes": _model_sizes(checkpoint.config, checkpoint.model_type),
        **_summarize_tensors(
            [_tensor_facts(each.name, each.shape, each.dtype, each.nbytes) for each in infos],
            args.tensors,
        ),
        **tokenizer_and_chat_facts(checkpoint.tokenizer_files()),
        "generation": checkpoint.generation_config,
        "sampling": sampling_facts(
            checkpoint.generation_config, checkpoint.container, checkpoint.model_type != "sam"
        ),
        "config": checkpoint.config,
    }


def sampling_facts(
    generation: Mapping[str, Any], container: Any, language: bool
) -> dict[str, Any] | None:
    """Describe the sampling defaults; an invalid generation_config is reported, not raised."""
    from modelmill.core.generation_defaults import parse_generation_config

    if not language:
        return None
    try:
        return parse_generation_config(generation, str(container)).to_dict()
    except ModelmillError as error:
        return {"values": {}, "text": f"broken: {error}", "source": "checkpoint", "unused": {}}


def tuning_facts(engine: Path) -> dict[str, Any]:
    """Return the devices with tuned launch configs, and for each GPU here whether they apply."""
    import torch

    from modelmill.artifact.autotune_store import tuned_devices
    from modelmill.loader.tuned_launch_configs import look_up_tuning

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = dict.fromkeys(torch.cuda.get_device_name(index) for index in range(count))
    return {
        "devices": tuned_devices(engine),
        "here": {name: look_up_tuning(engine, name).message for name in here},
    }


def format_tuning(facts: Mapping[str, Any]) -> str | None:
    """Format ``tuning_facts`` for people; None if there is nothing to show."""
    return "\n".join(facts["here"].values()) or ", ".join(facts["devices"]) or None


def _tensor_facts(name: str, shape: Any, dtype: str, nbytes: int) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "dtype": dtype, "bytes": nbytes}


def _summarize_tensors(tensors: list[dict[str, Any]], listed: bool) -> dict[str, Any]:
    by_dtype: Counter[str] = Counter()
    for each in tensors:
        by_dtype[each["dtype"]] += each["bytes"]
    return {
        "tensor_count": len(tensors),
        "parameters": sum(prod(each["shape"]) for each in tensors),
        "bytes": sum(each["bytes"] for each in tensors),
        "bytes_by_dtype": dict(by_dtype),
        **({"tensors": tensors} if listed else {}),
    }


def _model_sizes(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return the model's sizes from its config, under modelmill's names."""
    if model_type == "sam":
        from modelmill.models.sam import config_from_hf

        encoder = config_from_hf(config).encoder
        encoder_name = (
            "MobileSAM's TinyViT"
            if hasattr(encoder, "widths")
            else f"ViT, {encoder.depth} × {encoder.width}"
        )
        return {
            "encoder": encoder_name,
            "picture": f"{encoder.image} × {encoder.image}",
            "embedding": f"{encoder.tokens_per_side}²",
        }
    sizes = {}
    for label, keys in SIZE_KEYS:
        value = next((config[key] for key in keys if config.get(key) is not None), None)
        if value is not None:
            sizes[label] = value
    return sizes


def tokenizer_and_chat_facts(files: dict[str, bytes]) -> dict[str, Any]:
    """Describe tokenizer and chat template; a broken one is reported, not raised."""
    from modelmill.text.chat_format_loader import load_chat_format
    from modelmill.text.tokenizer_loader import load_tokenizer

    if not files:
        return {"tokenizer": None, "chat_template": None}
    try:
        tokenizer = load_tokenizer(files)
    except ModelmillError as error:
        return {"tokenizer": {"error": str(error)}, "chat_template": None}
    tokenizer_facts = {
        "kind": tokenizer.tokenizer_type,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "eos_ids": list(tokenizer.eos_ids),
        "special": len(tokenizer.special),
        "files": sorted(files),
    }
    try:
        chat = load_chat_format(files, tokenizer)
        if chat is None:
            return {"tokenizer": tokenizer_facts, "chat_template": None}
        example, stops = chat.render(EXAMPLE_CHAT, add_generation_prompt=True), list(chat.stop_ids)
        chat.close()
    except ModelmillError as error:
        return {"tokenizer": tokenizer_facts, "chat_template": {"error": str(error)}}
    return {"tokenizer": tokenizer_facts, "chat_template": {"example": example, "stop_ids": stops}}


def _show_facts(report: dict[str, Any]) -> None:
    engine = report["kind"] == "engine"
    segmentation = report["model_type"] == "sam"
    build = report.get("build", {})
    sampling = report["sampling"] or {"text": None, "unused": {}}
    weights = ", ".join(
        f"{count} {weight_format}" for weight_format, count in report.get("weights", {}).items()
    )
    dtypes = ", ".join(
        f"{dtype} {format_bytes(count)}" for dtype, count in report["bytes_by_dtype"].items()
    )
    architectures = ", ".join(report.get("architectures") or [])
    print_facts(
        [
            (
                "architecture",
                report["model_type"] + (f" ({architectures})" if architectures else ""),
            ),
            ("container", report.get("container")),
            *report["sizes"].items(),
            ("parameters", report["parameters"]),
            ("tensors", f"{report['tensor_count']}, {format_bytes(report['bytes'])} ({dtypes})"),
            ("dtype", build.get("dtype")),
            ("recipe", f"{build['quantization']}: {weights}" if engine else None),
            ("target", build.get("target")),
            (
                "built for up to",
                f"{report['max_model_len']} tokens" if engine and not segmentation else None,
            ),
            ("tokenizer", None if segmentation else _format_tokenizer(report)),
            (
                "chat template",
                None if segmentation else _format_chat_template(report["chat_template"]),
            ),
            ("generation", _join_pairs(report["generation"])),
            ("sampling", sampling["text"]),
            (
                "without effect",
                "; ".join(f"{name} {why}" for name, why in sampling["unused"].items()) or None,
            ),
            (
                "source",
                _join_pairs({k: v for k, v in report.get("source", {}).items() if k != "warnings"}),
            ),
            *(("warning", each) for each in report.get("source", {}).get("warnings", ())),
            ("versions", _join_pairs(report.get("versions", {}))),
            ("tuning", format_tuning(report["tuning"]) if engine else None),
            ("files", "verified: every sha256 is right" if report.get("verified") else None),
        ],
        title=f"{report['path']}: {'an engine' if engine else 'a checkpoint'}",
    )
    if engine:
        show_acceptance(report["acceptance"])
    if "tensors" in report:
        rows = [
            [t["name"], "×".join(map(str, t["shape"])), t["dtype"], t["bytes"]]
            for t in report["tensors"]
        ]
        print_table(("tensor", "shape", "dtype", "bytes"), rows)


def _format_tokenizer(report: dict[str, Any]) -> str:
    facts = report["tokenizer"]
    if facts is None:
        return f"none: ids-only {report['kind']} (no tokenizer)"
    if "error" in facts:
        return f"broken: {facts['error']}"
    ends = ", ".join(map(str, facts["eos_ids"])) or "none"
    return (
        f"{facts['kind']}, {facts['vocab_size']} tokens, {facts['special']} special; ends at {ends}"
    )


def _format_chat_template(chat: dict[str, Any] | None) -> str:
    if chat is None:
        return "none"
    return f"broken: {chat['error']}" if "error" in chat else repr(chat["example"])


def _join_pairs(values: Mapping[str, Any]) -> str | None:
    return (
        ", ".join(f"{name} {value}" for name, value in values.items() if value is not None) or None
    )
