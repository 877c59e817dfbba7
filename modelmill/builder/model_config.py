"""The model of a checkpoint: its family, and the config that the family reads.

A family reads its config through a ``ReadTrackingConfig``, which records each key. Of the rest,
DESCRIPTION, TRAINING and RUNTIME keys do not change logits, nor do those of INERT_KEY_DEFAULTS with
the listed value. Those of SUPPORTED_VALUES change logits unless they have one of the listed values,
and those that name a router's rule (``router_keys``) unless it is the family's. Any other key is
named in a warning, since its meaning is unknown. A family may add
``UNUSED_CONFIG_KEYS`` (names) and ``SUPPORTED_VALUES`` (as here).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from modelmill.builder.router_keys import router_rule_values
from modelmill.checkpoint.container import MAX_LISTED_NAMES, format_names
from modelmill.checkpoint.open import Checkpoint
from modelmill.checkpoint.rename import find_source_name
from modelmill.core.errors import CheckpointError, RequestError, UnknownArchitecture
from modelmill.core.generation_defaults import parse_generation_config
from modelmill.core.model_family import checkpoint_tensor_rules, read_family_options
from modelmill.core.module_lookup import (
    import_module_if_exists,
    list_module_names,
    most_similar_name,
)
from modelmill.core.quoting import quote
from modelmill.core.read_tracking_config import ReadTrackingConfig

DESCRIPTION_KEYS = frozenset((
    "architectures", "model_type", "transformers_version", "name_or_path", "torch_dtype", "dtype",
    "quantization_config", "language", "tokenizer_class", "bos_token_id", "eos_token_id",
    "pad_token_id",
    "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "decoder_start_token_id",
    "image_token_id",
    "image_token_index", "prefix", "model_name", "id2label", "label2id", "num_labels",
    "problem_type",
    "finetuning_task", "task_specific_params", "transformers.js_config", "is_llama_config",
    "max_sequence_length",
    "vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "finetuned", "eos_token_ids",
    "auto_map", "end_token_id",
))  # fmt: skip
"""What the file is and where it comes from.

Special tokens are read from other files; the checkpoint's reader itself reads quantization_config
and dtype.
"""

TRAINING_KEYS = frozenset((
    "initializer_range", "initializer_factor", "attention_dropout", "attn_dropout",
    "hidden_dropout", "resid_dropout",
    "embedding_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "classifier_dropout",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "emb_dropout_prob", "attn_dropout_prob",
    "layerdrop",
    "gradient_checkpointing", "pretraining_tp", "bf16", "fp16", "fp32", "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "summary_last_dropout",
    "unsloth_fixed",
    "unsloth_version",
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
))  # fmt: skip
"""Used by training alone."""

IMPLEMENTATION_CHOICE_KEYS = frozenset((
    "use_cache", "return_dict", "use_return_dict", "output_hidden_states", "output_attentions",
    "output_scores", "torchscript", "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward",
    "attn_implementation", "experts_implementation", "use_flash_attn", "is_decoder",
    "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32",
    "tie_last_hidden_states", "tie_encoder_decoder", "cross_attention_hidden_size", "output_past",
))  # fmt: skip
"""Choices among implementations of the same computation."""

INERT_KEY_DEFAULTS: Mapping[str, Any] = {
    "max_length": 20, "min_length": 0, "do_sample": False, "early_stopping": False, "num_beams": 1,
    "num_beam_groups": 1, "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "num_return_sequences": 1, "return_dict_in_generate": False, "remove_invalid_values": False,
    "attention_bias": False, "mlp_bias": False, "expert_used_count": 0, "expert_count": 0,
    "mlp_only_layers": [],
}  # fmt: skip
"""Copies of generation defaults in old files, and switches that are off; other values are named."""

ATTENTION_DIRECTION_KEYS: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "causal": (True,),
    "use_bidirectional_attention": (False,),
    "bidirectional": (False,),
    "is_bidirectional": (False,),
    "attn_type": ("causal", "full", "full_attention"),
    "attention_type": ("causal", "full", "full_attention"),
}
"""The direction of attention, and the values that mean causal."""

SUPPORTED_VALUES: Mapping[str, tuple[Any, ...]] = {
    **ATTENTION_DIRECTION_KEYS,
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "per_layer_config": ({}, []),
    "pruned_heads": ({}, []),
    "layer_types": (),
    "mlp_layer_types": (),
    "sliding_window": (),
    "attention_chunk_size": (),
    "no_rope_layers": ([],),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "query_pre_attn_scalar": (),
    "scale_emb": (1,),
    "scale_depth": (),
    "clip_qkv": (),
    "alibi": (False,),
    "use_alibi": (False,),
    "parallel_attn": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "use_mrope": (False,),
    "qk_layernorm": (False,),
    "lm_head_bias": (False,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0,),
    "kv_lora_rank": (),
    "apply_residual_connection_post_layernorm": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "rope_interleaved": (False,),
    "swiglu_limit": (),
    # GGUF keys, without the architecture's prefix
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "expert_weights_scale": (0, 1),
    "expert_gating_func": (0, 1),  # a softmax, where no other is read
    "expert_group_count": (0, 1),
    "attention.temperature_scale": (0,),
}
"""Keys that change the computation of some models, and the values that change nothing (as null)."""

INEFFECTIVE_GGUF_KEYS = frozenset(("attention.sliding_window",))
"""GGUF keys that seem to change the computation and do not, in llama.cpp neither.

A llama of a GGUF has full attention. They are named, since the weights may have been trained
otherwise.
"""

ROWS_PER_COMPARED_BLOCK = 4096
"""Rows compared at a time, so that a vocabulary is never converted as a whole."""


def derive_missing_config(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with a config: its own, or one derived from the tensors' shapes.

    Raises:
        CheckpointError: if it has no config.json and no family recognizes its tensors.
    """
    if checkpoint.config:
        return checkpoint
    shapes = {name: checkpoint.tensor_info(name).shape for name in checkpoint.names()}
    for name in list_module_names("modelmill.models"):
        config_from_shapes = read_family_options(
            import_module_if_exists("modelmill.models", name)
        ).config_from_shapes
        config = None if config_from_shapes is None else config_from_shapes(shapes)
        if config is not None:
            return replace(checkpoint, config=config)
    raise CheckpointError(
        f"{checkpoint.path.parent / 'config.json'}: is missing, and the tensors of "
        f"{checkpoint.path.name} are of no "
        "known model; put the checkpoint's config.json beside the weights"
    )


def config_dtype_name(config: Mapping[str, Any]) -> str:
    """Return the dtype that a config.json names, in either spelling; "" without one."""
    named = config.get("torch_dtype") or config.get("dtype") or ""
    return str(named).removeprefix("torch.")


def find_family(checkpoint: Checkpoint) -> ModuleType:
    """Return the module models/<model_type>.py.

    Raises:
        UnknownArchitecture: with the unknown names and the nearest known family.
    """
    family = import_module_if_exists("modelmill.models", checkpoint.model_type or "")
    if family is not None:
        return family
    known = list_module_names("modelmill.models")
    named = checkpoint.config.get("architectures")
    architectures = (
        format_names([str(n) for n in named])
        if isinstance(named, list) and named
        else "no architecture named"
    )
    near = most_similar_name(checkpoint.model_type or "", known)
    guess = f"; the nearest known family is {near}" if near else ""
    raise UnknownArchitecture(
        f"{checkpoint.path}: model_type {checkpoint.model_type!r} ({architectures}) is not "
        f"known{guess}; docs/families.md lists the known ones"
    )


def read_model_config(checkpoint: Checkpoint, family: ModuleType) -> tuple[Any, list[str]]:
    """Return the family's config, and warnings about keys that it does not read.

    Raises:
        CheckpointError: if a key requires an unsupported computation.
    """
    view = ReadTrackingConfig(checkpoint.config)
    sizes = family.config_from_hf(view)
    view.mark_unread(checkpoint.unread_config)
    where = checkpoint.path.name if checkpoint.container.endswith("gguf") else "config.json"
    return sizes, reject_or_warn_unread_keys(view, family, where, sizes)


def reject_or_warn_unread_keys(
    view: ReadTrackingConfig, family: ModuleType, file_name: str, model_config: Any
) -> list[str]:
    """Return warnings about a config that ``family`` has read.

    Args:
        view: the config.
        family: what has read it.
        file_name: the file, for messages.
        model_config: what the family made of it.

    Raises:
        CheckpointError: for a key that requires an unsupported computation.
    """
    options = read_family_options(family)
    rules = router_rule_values(model_config)
    neutral = {
        **SUPPORTED_VALUES,
        **{key: rules[key] for key in rules if key not in options.UNUSED_CONFIG_KEYS},
        **options.SUPPORTED_VALUES,
    }
    harmless = (
        DESCRIPTION_KEYS
        | TRAINING_KEYS
        | IMPLEMENTATION_CHOICE_KEYS
        | frozenset(options.UNUSED_CONFIG_KEYS)
    )
    unknown = []
    for key, value in view.unread().items():
        # alone, within an object or after an architecture's name
        names = (key, key.partition(".")[2], key.rpartition(".")[2])
        allowed = next((neutral[name] for name in names if name in neutral), None)
        if not INEFFECTIVE_GGUF_KEYS.isdisjoint(names):
            unknown.append(key)
        elif allowed is not None:
            if names[-1] == "layer_types" and _is_every_layer_full_attention(
                value, options, view, file_name
            ):
                continue
            if not any(_is_same_json_value(value, each) for each in allowed):
                raise CheckpointError(f"{file_name}: {_unsupported_message(key, value, allowed)}")
        elif not any(
            name in harmless or name.startswith("_") or _is_inert_default(name, value)
            for name in names
        ):
            unknown.append(key)
    return [*view.remarks, *_unread_warning(unknown, file_name)]


def _is_every_layer_full_attention(
    types: Any, options: Any, view: ReadTrackingConfig, file_name: str
) -> bool:
    """Return whether each layer is named as what a family computes that does not read the list.

    Raises:
        CheckpointError: if it names more or fewer layers than there are.
    """
    has_attention = "layer_types" not in options.SUPPORTED_VALUES
    if not (isinstance(types, list) and types and has_attention):
        return False
    if any(each != "full_attention" for each in types):
        return False
    layers = view.get("num_hidden_layers")
    if layers is not None and layers != len(types):
        raise CheckpointError(
            f"{file_name}: layer_types names {len(types)} layers where num_hidden_layers={layers}; "
            "correct one of them"
        )
    return True


def _unsupported_message(key: str, value: Any, allowed: tuple[Any, ...]) -> str:
    shown = f"{key if key.isprintable() else quote(key)}={quote(value, 60)}"
    if key.rpartition(".")[2] in ATTENTION_DIRECTION_KEYS:
        return (
            f"{shown} enables attention to later tokens, too (embedding models such as gte-Qwen2 "
            "do), which is not "
            f"computed; supported: {', '.join(map(repr, allowed))}"
        )
    known = (
        f"leave it out, or set it to {' or '.join(map(repr, allowed))}"
        if allowed
        else "leave it out"
    )
    return (
        f"{shown} changes what is computed, and is not supported; {known}, if the weights were "
        "trained so"
    )


def _is_inert_default(name: str, value: Any) -> bool:
    return name in INERT_KEY_DEFAULTS and _is_same_json_value(value, INERT_KEY_DEFAULTS[name])


def _is_same_json_value(value: Any, other: Any) -> bool:
    """Return whether values are equal and both or neither are booleans."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _unread_warning(keys: list[str], file_name: str) -> list[str]:
    """Return one line for all unknown keys."""
    if not keys:
        return []
    shown = [
        key if key.isprintable() and len(key) <= 60 else quote(key, 60)
        for key in sorted(keys)[:MAX_LISTED_NAMES]
    ]
    more = f" and {len(keys) - len(shown)} more" if len(keys) > len(shown) else ""
    says = (
        "is a key that is not read and has"
        if len(keys) == 1
        else "are keys that are not read and have"
    )
    return [f"{file_name}: {', '.join(shown)}{more} {says} no effect"]


def check_generation_config(checkpoint: Checkpoint, vocab_size: int) -> None:
    """Check that requests can use the checkpoint's generation defaults.

    vocab_size: tokens of the model.

    Raises:
        CheckpointError: if a default is invalid.
    """
    for file, values in (
        ("generation_config.json", checkpoint.generation_config),
        ("config.json", checkpoint.config),
    ):
        _check_eos_ids(f"{checkpoint.path}: {file}", values.get("eos_token_id"))
    try:
        defaults = parse_generation_config(checkpoint.generation_config, checkpoint.container)
        outside = next(
            (id for id in defaults.processors.iter_token_ids() if id >= vocab_size), None
        )
        if outside is not None:
            raise RequestError(
                f"its token ids must be between 0 and {vocab_size - 1}, not {outside}"
            )
    except RequestError as error:
        raise CheckpointError(
            f"{checkpoint.path}: generation_config.json: {error}; correct it there"
        ) from None


def _check_eos_ids(where: str, value: Any) -> None:
    """Check the ids that end an answer; None is none."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    wrong = next((each for each in ids if type(each) is not int), None)
    if wrong is not None:
        raise CheckpointError(
            f"{where}: eos_token_id must be a token id or a list of them, not {quote(value, 60)}; "
            "correct it there"
        )


def resolve_tied_head(
    checkpoint: Checkpoint, family: ModuleType, model_config: Any
) -> tuple[Any, list[str]]:
    """Return the config with ``tied`` as the tensors have it, and warnings about it.

    Merging an adapter that changed the head leaves ``tie_word_embeddings: true`` beside a separate
    head (huggingface/peft#2777). The tensors decide, as in transformers 5: equal ones are tied,
    different ones are not.

    Both matrices are read if the config ties them and the checkpoint has both; one storage under
    two names (PyTorch files) is detected without reading.
    """
    if not getattr(model_config, "tied", False):
        return model_config, []
    untied = replace(model_config, tied=False)
    tensors, names = checkpoint_tensor_rules(family), checkpoint.names()
    sources = {rule.target: rule.sources for rule in tensors.rules(untied)}
    [head], [embed] = (
        [find_source_name(source, names, tensors.prefixes) for source in sources[target]]
        for target in ("head.weight", "embed.weight")
    )
    if (
        head is None
        or embed is None
        or tensor_values_equal(checkpoint.get(head), checkpoint.get(embed))
    ):
        return model_config, []
    return untied, [
        f"config.json says tie_word_embeddings=true, but {format_names([head])} differs from "
        f"{format_names([embed])}: "
        "the head of its own is used"
    ]


def tensor_values_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same values in any dtype; a NaN equals nothing."""
    if one.shape != other.shape:
        return False
    if (
        one.dtype == other.dtype
        and one.data_ptr() == other.data_ptr()
        and one.stride() == other.stride()
    ):
        return True
    one, other = torch.atleast_1d(one), torch.atleast_1d(other)
    blocks = zip(
        one.split(ROWS_PER_COMPARED_BLOCK), other.split(ROWS_PER_COMPARED_BLOCK), strict=True
    )
    return all(bool((a.float() == b.float()).all()) for a, b in blocks)
