"""What the host knows of a packed step."""

from __future__ import annotations

from typing import Any

from modelmill.runtime.batch import PackedBatch
from tests.runtime import tiny


def test_steps_whose_prompts_begin_in_them_count_their_single_tokens() -> None:
    """A prompt's first chunk, later chunks, those beside decodes, prefixes in the cache."""
    engine = tiny.make_engine(tiny.decoder(), max_num_batched_tokens=12)
    packer, packed = engine.model_runner.packer, []
    pack = packer.pack

    def recorded(work: Any, *args: Any, **named: Any) -> PackedBatch:
        batch = pack(work, *args, **named)
        packed.append(([(seq.computed, count) for seq, count in work], batch))
        return batch

    packer.pack = recorded
    todo = tiny.requests(tiny.prompts(9, 1, 60), tiny.params(max_tokens=20))
    tiny.run(engine, todo)
    tiny.run(engine, todo)
    counted = set()
    for work, batch in packed:
        assert batch.num_prompt_keys == 0, "no latent attention"
        histories = [computed for computed, count in work if count > 1]
        if not histories:
            assert batch.num_decodes is None
            continue
        if any(histories):
            assert batch.num_decodes is None
        else:
            assert batch.num_decodes == sum(count == 1 for _, count in work)
        step = batch.to_step(engine.model_runner.kv, engine.model_runner.ops, batch.views.ids)
        assert step.num_decodes == batch.num_decodes
        counted.add(batch.num_decodes)
    assert {None, 0} < counted


def test_steps_that_expand_histories_count_the_keys_of_prompts() -> None:
    engine = tiny.make_engine(tiny.decoder(), max_num_batched_tokens=12)
    packer, requested, packed = engine.model_runner.packer, [], []
    pack = packer.pack

    def expands(prompts: Any) -> bool:
        requested.append(prompts)
        return sum(keys for _, keys in prompts) <= 30

    def recorded(work: Any, *args: Any, **named: Any) -> PackedBatch:
        batch = pack(work, *args, **named)
        packed.append(([(count, seq.computed + count) for seq, count in work], batch))
        return batch

    packer.expands_history, packer.pack = expands, recorded
    tiny.run(engine, tiny.requests(tiny.prompts(9, 1, 60), tiny.params(max_tokens=4)))
    assert requested
    expanded = 0
    for work, batch in packed:
        prompts = [(count, keys) for count, keys in work if count > 1]
        if all(count == keys for count, keys in prompts):
            assert batch.num_prompt_keys == 0
            continue
        keys = sum(each for _, each in prompts)
        assert prompts in requested
        assert batch.num_prompt_keys == (keys if keys <= 30 else 0)
        assert batch.num_decodes == (len(work) - len(prompts) if keys <= 30 else None)
        expanded += batch.num_prompt_keys > 0
        step = batch.to_step(engine.model_runner.kv, engine.model_runner.ops, batch.views.ids)
        assert step.num_prompt_keys == batch.num_prompt_keys
    assert expanded
