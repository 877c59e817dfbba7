"""Beam search against transformers' generate, on one tiny LLaMA."""

from __future__ import annotations

import pytest
import torch

from modelmill.core.types import FinishReason, Request
from modelmill.loader.model_loader import fill_weights
from modelmill.nn.decoder import Decoder, DecoderConfig
from modelmill.nn.rotary import RopeSpec
from tests.runtime import tiny


@pytest.fixture(scope="module")
def pair():
    """(ours, transformers') with the same weights."""
    transformers = pytest.importorskip("transformers")
    config = DecoderConfig(
        hidden=32, inner=48, layers=2, heads=4, kv_heads=2, head_dim=8, vocab=61, eps=1e-6,
        max_len=128,
        rope=RopeSpec(8, 10000.0, 128),
    )  # fmt: skip
    model = Decoder(config)
    values = tiny.random_tensors(model, seed=4)
    fill_weights(model, values.__getitem__, values, {}, {}, "cpu")
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-6, max_position_embeddings=128,
            attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    state = {
        "model.embed_tokens.weight": values["embed.weight"],
        "model.norm.weight": values["norm.weight"],
    }
    state["lm_head.weight"] = values["head.weight"]
    for i in range(2):
        a, b = f"layers.{i}", f"model.layers.{i}"
        q, k, v = values[f"{a}.attn.qkv_proj.weight"].split([32, 16, 16])
        gate, up = values[f"{a}.mlp.gate_up_proj.weight"].chunk(2)
        state |= {f"{b}.self_attn.{n}_proj.weight": t for n, t in (("q", q), ("k", k), ("v", v))}
        state |= {f"{b}.mlp.{n}_proj.weight": t for n, t in (("gate", gate), ("up", up))}
        state[f"{b}.self_attn.o_proj.weight"] = values[f"{a}.attn.o_proj.weight"]
        state[f"{b}.mlp.down_proj.weight"] = values[f"{a}.mlp.down_proj.weight"]
        state[f"{b}.input_layernorm.weight"] = values[f"{a}.attn_norm.weight"]
        state[f"{b}.post_attention_layernorm.weight"] = values[f"{a}.mlp_norm.weight"]
    reference.load_state_dict(state, strict=True)
    return model, reference


def expected(
    reference, prompt, most: int, eos: tuple[int, ...], **options
) -> list[tuple[tuple[int, ...], float]]:
    with torch.inference_mode():
        out = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=most, eos_token_id=list(eos) or None, pad_token_id=0, output_scores=True,
            return_dict_in_generate=True, **options,
        )  # fmt: skip
    results = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist()):
        answer = row[len(prompt) :]
        cut = next((i for i, t in enumerate(answer) if t in eos), None)
        results.append((tuple(answer if cut is None else answer[:cut]), score))
    return results


CASES = [
    {"num_beams": 2},
    {"num_beams": 4, "n": 4},
    {"num_beams": 4, "n": 2, "length_penalty": 2.0},
    {"num_beams": 3, "n": 3, "length_penalty": -1.0},
    {"num_beams": 4, "n": 4, "early_stopping": True},
    {"num_beams": 5, "n": 5, "length_penalty": 0.0, "repetition_penalty": 1.4},
    {"num_beams": 4, "n": 4, "min_tokens": 5},
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_results_and_scores(pair, case: int) -> None:
    model, reference = pair
    options = CASES[case]
    eos = [(), (7,), (7, 11, 30, 2, 44)][case % 3]
    names = {"n": "num_return_sequences", "min_tokens": "min_new_tokens"}
    engines = [
        tiny.make_engine(model),
        tiny.make_engine(model, pages=14, max_num_batched_tokens=9, overlap=True),
    ]
    for seed in range(6):
        prompt = tiny.prompts(1, 3, 30, seed=seed, vocab=61)[0]
        want = expected(
            reference, prompt, 14, eos, **{names.get(k, k): v for k, v in options.items()}
        )
        for engine in engines:
            engine.add(
                Request(
                    id="x", prompt=prompt, params=tiny.params(max_tokens=14, **options), eos_ids=eos
                )
            )
            events = tiny.drain(engine)
            assert [e.replayed_ids for e in events] == [ids for ids, _ in want]
            assert [e.score for e in events] == pytest.approx(
                [s for _, s in want], abs=1e-4, rel=2e-6
            )
            assert all(
                e.finish_reason
                == (FinishReason.LENGTH if len(e.replayed_ids) == 14 else FinishReason.STOP)
                for e in events
            )
            tiny.assert_idle(engine)


def test_among_others_and_preempted(pair) -> None:
    model, _ = pair
    prompts = tiny.prompts(5, 10, 40, vocab=61)
    params_list = [
        tiny.params(num_beams=3),
        tiny.params(),
        tiny.params(num_beams=4, n=2),
        tiny.params(),
        tiny.params(n=1),
    ]
    todo = [
        Request(id=str(i), prompt=p, params=h, eos_ids=(7,))
        for i, (p, h) in enumerate(zip(prompts, params_list))
    ]
    expected = tiny.run_one_by_one(tiny.make_engine(model), todo)
    assert tiny.run(tiny.make_engine(model), todo) == expected
    assert tiny.run(tiny.make_engine(model, max_num_seqs=5), todo) == expected
    small = tiny.make_engine(model, pages=12)
    assert tiny.run(small, todo) == expected
    assert small.stats().preemptions > 0


def test_every_answer_hears_of_its_end() -> None:
    """With max_tokens=0, or if the page pool runs out before the search has n beams."""
    nothing = tiny.make_engine()
    for request in tiny.requests(tiny.prompts(1), tiny.params(num_beams=3, n=2, max_tokens=0)):
        nothing.add(request)
    assert {e.index: e.finish_reason for e in tiny.drain(nothing)} == {
        0: FinishReason.LENGTH,
        1: FinishReason.LENGTH,
    }
    for length in (7, 8, 15, 20, 23):
        small = tiny.make_engine(pages=3)
        options = tiny.params(num_beams=8, n=8, max_tokens=40)
        small.add(tiny.requests(tiny.prompts(1, length, length), options, eos=())[0])
        assert sorted(e.index for e in tiny.drain(small)) == list(range(8))
        tiny.assert_idle(small)
