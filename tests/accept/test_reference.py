"""The reference against transformers on small seeded configs, and on real weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modelmill.accept.reference import ReferenceModel, open_reference
from modelmill.core.errors import TensorMismatch, UnknownArchitecture
from tests.accept.memory_checkpoint import MemoryCheckpoint, MemoryContainer, memory_checkpoint
from tests.accept.reference_forward import reference_logits

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha-bias": (
        "llama",
        {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-head-dim": ("llama", {"head_dim": 16}),
    "llama-theta": ("llama", {"rope_theta": 100000.0, "rms_norm_eps": 1e-5}),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama-dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama-yarn": ("llama", {"rope_scaling": YARN, "max_position_embeddings": 96}),
    "llama-yarn-betas": (
        "llama",
        {"rope_scaling": YARN | {"beta_fast": 8, "beta_slow": 2, "truncate": False}},
    ),
    "llama-yarn-factor": ("llama", {"rope_scaling": YARN | {"attention_factor": 1.3}}),
    "llama-yarn-mscale": ("llama", {"rope_scaling": YARN | {"mscale": 0.8, "mscale_all_dim": 0.4}}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-bias-tied": (
        "qwen3",
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "gpt2": ("gpt2", {}),
    "gpt2-scaled": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
    ),
}


def original(model_type: str, changes: dict[str, Any]) -> Any:
    """A seeded transformers model with weights (biases and norms too) away from their plain
    defaults.
    """
    transformers = pytest.importorskip("transformers")
    sizes = dict(SMALL)
    if model_type == "gpt2":
        sizes = {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
        sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(model_type, **(sizes | changes))
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = 0.2 if weight.ndim == 1 else 2.5 * weight.shape[-1] ** -0.5 / 3
            plain = "norm" in name or "ln_" in name
            centre = 1.0 if plain and not name.endswith("bias") else 0.0
            offset = centre if weight.ndim == 1 else weight
            weight.copy_(offset + spread * torch.randn_like(weight))
    return model


def reference_of(model: Any, config: dict[str, Any] | None = None) -> ReferenceModel:
    return open_reference(memory_checkpoint(model.state_dict(), config or model.config.to_dict()))


def raw_config(model: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """The config as hub files of the past wrote it: rope_theta and rope_scaling instead of
    rope_parameters.
    """
    config = model.config.to_dict()
    parameters = config.pop("rope_parameters", None)
    if parameters:
        config["rope_theta"] = parameters["rope_theta"]
        config["rope_scaling"] = changes.get("rope_scaling")
    return config


@torch.no_grad()
def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids[None], use_cache=False).logits[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [9, 41])
def test_logits_equal_transformers(case: str, length: int) -> None:
    model_type, changes = CASES[case]
    model = original(model_type, changes)
    ids = torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(3))
    expected = logits_of(model, ids)
    assert expected.std() > 0.1
    for config in (model.config.to_dict(), raw_config(model, changes)):
        torch.testing.assert_close(
            reference_logits(reference_of(model, config), ids), expected, atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("case", ["llama-dynamic", "llama", "mistral-window", "gpt2"])
def test_decode_equals_transformers_with_its_cache(case: str) -> None:
    """Dynamic NTK: a prefill knows its prompt, every decoded token its own length."""
    model_type, changes = CASES[case]
    model = original(model_type, changes)
    ids = torch.randint(3, 97, (40,), generator=torch.Generator().manual_seed(4))
    prompt = 19
    with torch.no_grad():
        out = model(ids[None, :prompt], use_cache=True)
        rows = [out.logits[0]]
        for place in range(prompt, len(ids)):
            out = model(
                ids[None, place : place + 1], past_key_values=out.past_key_values, use_cache=True
            )
            rows.append(out.logits[0])
    logits = reference_logits(reference_of(model), ids, prompt_length=prompt)
    torch.testing.assert_close(logits, torch.cat(rows), atol=1e-4, rtol=0)


def test_names_without_the_outer_prefix() -> None:
    ids = torch.tensor([5, 6, 7, 8])
    for model_type, prefix in (("gpt2", "transformer."), ("llama", "model.")):
        model = original(model_type, {})
        bare = {name.removeprefix(prefix): tensor for name, tensor in model.state_dict().items()}
        logits = reference_logits(
            open_reference(memory_checkpoint(bare, model.config.to_dict())), ids
        )
        torch.testing.assert_close(logits, logits_of(model, ids), atol=1e-4, rtol=0)


def gguf_checkpoint(model: Any, model_type: str) -> MemoryCheckpoint:
    """The model under GGUF names, its q and k rows interleaved as llama.cpp's converter leaves
    them.
    """
    gguf = pytest.importorskip("gguf")
    config = model.config.to_dict()
    architecture = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gpt2": "GPT2"}[
        model_type
    ]
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, architecture), model.config.num_hidden_layers
    )
    tensors = {}
    for name, tensor in model.state_dict().items():
        if model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = (
                config["num_attention_heads"] if "q_proj" in name else config["num_key_value_heads"]
            )
            split = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
            tensor = split.swapaxes(1, 2).reshape(tensor.shape)
        if model_type == "gpt2" and tensor.ndim == 2 and ".h." in name:
            tensor = tensor.T
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = tensor
    if config.get("tie_word_embeddings", True):
        tensors.pop("output.weight", None)
    facts = {
        "general.architecture": model_type,
        f"{model_type}.block_count": model.config.num_hidden_layers,
        f"{model_type}.embedding_length": model.config.hidden_size,
        f"{model_type}.context_length": model.config.max_position_embeddings,
        f"{model_type}.attention.head_count": model.config.num_attention_heads,
    }
    if model_type == "gpt2":
        facts["gpt2.attention.layer_norm_epsilon"] = 1e-5
    else:
        facts[f"{model_type}.attention.head_count_kv"] = model.config.num_key_value_heads
        facts[f"{model_type}.attention.layer_norm_rms_epsilon"] = model.config.rms_norm_eps
        facts[f"{model_type}.rope.freq_base"] = model.config.rope_parameters["rope_theta"]
        facts[f"{model_type}.attention.key_length"] = getattr(model.config, "head_dim", None) or 8
    return MemoryCheckpoint(MemoryContainer(tensors, facts))


@pytest.mark.parametrize(
    "case", ["llama", "llama-mha-bias", "llama-tied", "llama-theta", "qwen2", "qwen3", "gpt2"]
)
def test_gguf_names_and_layout(case: str) -> None:
    model_type, changes = CASES[case]
    model = original(model_type, changes)
    ids = torch.randint(3, 97, (15,), generator=torch.Generator().manual_seed(5))
    logits = reference_logits(open_reference(gguf_checkpoint(model, model_type)), ids)
    torch.testing.assert_close(logits, logits_of(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 2.0}, YARN, LLAMA3])
def test_gguf_rope_scaling(scaling: dict[str, Any]) -> None:
    model = original("llama", {"rope_scaling": scaling})
    checkpoint = gguf_checkpoint(model, "llama")
    if scaling is LLAMA3:
        inverse = model.model.rotary_emb.inv_freq
        plain = 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
        checkpoint.raw_container.tensors["rope_freqs.weight"] = plain / inverse
    else:
        checkpoint.raw_container.metadata |= {
            "llama.rope.scaling.type": scaling["rope_type"],
            "llama.rope.scaling.factor": scaling["factor"],
            "llama.rope.scaling.original_context_length": 24,
        }
    ids = torch.randint(3, 97, (30,), generator=torch.Generator().manual_seed(6))
    logits = reference_logits(open_reference(checkpoint), ids)
    torch.testing.assert_close(logits, logits_of(model, ids), atol=1e-4, rtol=0)


def test_gguf_yarn_keys_are_read_or_refused() -> None:
    """Both betas as transformers has them; what would scale cos and sin is refused unless it is at
    rest.
    """
    betas = {"beta_fast": 8.0, "beta_slow": 2.0}
    model = original("llama", {"rope_scaling": YARN | betas})
    checkpoint = gguf_checkpoint(model, "llama")
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 24}
    scaling |= {f"yarn_{name}": value for name, value in betas.items()}
    idle = {
        "attn_factor": 1.0,
        "yarn_attn_factor": 1.0,
        "yarn_ext_factor": 1.0,
        "yarn_log_multiplier": 0.0,
    }
    plain = dict(checkpoint.raw_container.metadata)

    def open_with(**keys: Any) -> ReferenceModel:
        checkpoint.raw_container.metadata = plain | {
            f"llama.rope.scaling.{key}": value for key, value in keys.items()
        }
        return open_reference(checkpoint)

    ids = torch.randint(3, 97, (30,), generator=torch.Generator().manual_seed(6))
    logits = reference_logits(open_with(**scaling, **idle), ids)
    torch.testing.assert_close(logits, logits_of(model, ids), atol=1e-4, rtol=0)
    for name in idle:
        with pytest.raises(UnknownArchitecture, match=f"{name} is 0.5"):
            open_with(**scaling | idle | {name: 0.5})
    with pytest.raises(UnknownArchitecture, match=r"yarn_ext_factor is 1\.0"):
        open_with(type="linear", factor=2.0, yarn_ext_factor=1.0)
    assert open_with(type="none", factor=2.0).rope.rope_type == "default"
    assert open_with(yarn_ext_factor=-1.0).rope.rope_type == "default"


def test_what_a_config_leaves_out_is_the_original_classes() -> None:
    """Windows, key-value heads and heads of which a part turns."""
    transformers = pytest.importorskip("transformers")
    small = {key: value for key, value in SMALL.items() if not key.endswith("_id")} | {
        "num_attention_heads": 32
    }
    del small["num_key_value_heads"]
    small["hidden_size"] = 64
    listed = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    cases = [("mistral", {}), ("mistral", listed), ("mistral", {"sliding_window": None})]
    cases += [
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3", {}),
        ("llama", {}),
    ]
    for model_type, changes in cases:
        original_kind = "ministral" if "layer_types" in changes else model_type
        hf_config = transformers.AutoConfig.for_model(original_kind, **(small | changes))
        reference = open_reference(
            memory_checkpoint({}, small | changes | {"model_type": model_type})
        )
        layers = getattr(hf_config, "layer_types", None) or ["sliding_attention"] * 3
        size = getattr(hf_config, "sliding_window", None)
        assert reference.windows == [
            size if layer == "sliding_attention" else None for layer in layers
        ]
        assert reference.num_kv_heads == hf_config.num_key_value_heads
    model = original("llama", {"partial_rotary_factor": 0.5, "head_dim": 16})
    ids = torch.randint(3, 97, (15,), generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(
        reference_logits(reference_of(model), ids), logits_of(model, ids), atol=1e-4, rtol=0
    )
    parts = {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    for changes in (parts, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}):
        with pytest.raises(UnknownArchitecture, match="not known here"):
            open_reference(memory_checkpoint({}, small | changes | {"model_type": "llama"}))


DECODER_MODULES = [
    *("input_norm", "q", "k", "v", "q_rot", "k_rot", "attn", "o_proj", "post_attn_residual"),
    *("mlp_norm", "gate", "up", "act", "down", "output"),
]
GPT2_MODULES = [
    *("input_norm", "q", "k", "v", "q_rot", "k_rot", "attn", "o_proj", "post_attn_residual"),
    *("mlp_norm", "fc", "act", "down", "output"),
]


@pytest.mark.parametrize(("case", "modules"), [("qwen3", DECODER_MODULES), ("gpt2", GPT2_MODULES)])
def test_trace_names_order_and_shapes(case: str, modules: list[str]) -> None:
    model = original(*CASES[case])
    reference = reference_of(model)
    ids = torch.tensor([3, 4, 5, 6, 7])
    layers: list[int] = []
    reference_logits(reference, ids, on_layer=lambda index, trace: layers.append(index))
    assert layers == [0, 1, 2]
    trace = reference.run_layer(0, reference.layer_weights(0), reference.embed(ids), 5)
    assert list(trace) == modules
    for name, (inputs, output, _) in trace.items():
        assert inputs, name
        assert all(tensor.shape[0] == 5 and tensor.ndim == 2 for tensor in (*inputs, output)), name
    assert torch.equal(trace["post_attn_residual"].output, sum(trace["post_attn_residual"].inputs))
    head = reference.head(trace["output"].output)
    assert list(head) == ["final_norm", "logits"]
    assert head["logits"].output.shape == (5, 97)


def test_one_layer_of_weights_at_a_time() -> None:
    model = original("llama", {})
    checkpoint = memory_checkpoint(model.state_dict(), model.config.to_dict())
    reference = open_reference(checkpoint)
    edges: list[int] = []
    reference_logits(
        reference,
        [4, 5, 6],
        on_layer=lambda index, trace: edges.append(len(checkpoint.raw_container.reads)),
    )
    reads = checkpoint.raw_container.reads
    for index, (start, stop) in enumerate(zip([1, *edges], edges, strict=False)):
        assert all(f"layers.{index}." in name for name in reads[start:stop])
    assert len(reads) == len(set(reads))


def test_norm_probe_sees_the_epsilon() -> None:
    model = original("llama", {"rms_norm_eps": 1e-5})
    other = reference_of(model, model.config.to_dict() | {"rms_norm_eps": 1e-6})
    reference = reference_of(model)
    for index, name in ((0, "input_norm"), (2, "mlp_norm"), (None, "final_norm")):
        x = torch.randn(8, 48) * reference.norm_eps(index, name) ** 0.5
        expected, wrong = reference.run_norm(index, name, x), other.run_norm(index, name, x)
        assert (wrong / expected).mean() > 1.25
    with pytest.raises(KeyError):
        reference.norm_eps(0, "final_norm")


def test_float64_agrees_with_float32() -> None:
    model = original("llama", {})
    checkpoint = memory_checkpoint(model.state_dict(), model.config.to_dict())
    ids = torch.arange(3, 30)
    exact = reference_logits(open_reference(checkpoint, torch.float64), ids)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(
        reference_logits(open_reference(checkpoint), ids).double(), exact, atol=2e-5, rtol=0
    )


def test_what_cannot_be_computed_says_so() -> None:
    with pytest.raises(UnknownArchitecture, match="mamba"):
        open_reference(memory_checkpoint({}, {"model_type": "mamba"}))
    raw = MemoryContainer(
        {"token_embd.weight": torch.ones(2, 2)}, {"general.architecture": "mamba"}
    )
    with pytest.raises(UnknownArchitecture, match="mamba"):
        open_reference(MemoryCheckpoint(raw))
    model = original("llama", {})
    with pytest.raises(UnknownArchitecture, match="longrope"):
        reference_of(model, raw_config(model, {"rope_scaling": {"type": "longrope"}}))
    tensors = dict(model.state_dict())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(TensorMismatch, match=r"layers\.1\.mlp\.up_proj"):
        reference_logits(open_reference(memory_checkpoint(tensors, model.config.to_dict())), [3])


def test_stories_begin_as_known(shared: Path) -> None:
    folder = shared / "data" / "models" / "stories260K"
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    pieces = [entry["piece"] for entry in json.loads((folder / "pieces.json").read_text())]
    reference = open_reference(memory_checkpoint(load_file(folder / "model.safetensors"), config))
    ids = [1]
    for _ in range(28):
        ids.append(int(reference_logits(reference, ids, prompt_length=1)[-1].argmax()))
    text = "".join(pieces[token] for token in ids[1:]).replace("▁", " ").strip()
    assert text.startswith("Once upon a time, there was a little girl named Lily.")
