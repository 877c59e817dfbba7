"""The Python API classes: options by name, repr and close."""

from __future__ import annotations

import asyncio
import gc
import inspect
import typing
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import modelmill
from modelmill import LLM, AsyncLLM, SamplingParams, Segmenter
from modelmill.core.api_options import BuildOptions, EngineOptions, RunOptions, SegmenterOptions
from modelmill.core.config import BuildConfig, RunConfig
from modelmill.core.errors import ModelmillError, RequestError, UnknownOption, UsageError
from modelmill.llm import LLMOptions, build_engine
from tests.run_code import run_code

CHECKPOINT = "data/models/stories260K"
GREEDY = SamplingParams(temperature=0, max_tokens=4)
OWN = {"model", "tensor_parallel_size", "chat_template", "progress", "openai_defaults"}
CALLS: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate("Once", GREEDY),
    "generate nothing": lambda llm: llm.generate([]),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "Once"}], GREEDY),
    "stream": lambda llm: list(llm.stream("Once", GREEDY)),
    "sleep": lambda llm: llm.sleep(),
    "wake_up": lambda llm: llm.wake_up(),
    "embed": lambda llm: llm.embed("Once"),
    "request": lambda llm: llm.request("Once"),
    "chat_request": lambda llm: llm.chat_request([{"role": "user", "content": "Once"}], None),
    "stream_request": lambda llm: llm.stream_request(cast(Any, None)),
    "embedding_request": lambda llm: llm.embedding_request("Once"),
    "step": lambda llm: llm.step({}),
    "with": lambda llm: llm.__enter__(),
    "engine_core": lambda llm: llm.engine_core,
}


@pytest.fixture(scope="module")
def engine(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("options") / "stories.engine"
    build_engine(shared / CHECKPOINT, out, BuildConfig(dtype="float32", target="cpu"), check=False)
    return out


@pytest.fixture
def llm(engine: Path) -> Iterator[LLM]:
    with LLM(engine, device="cpu", chat_template="chatml") as opened:
        yield opened


def hints_of(config_class: type) -> dict[str, Any]:
    hints = typing.get_type_hints(config_class)
    return {each.name: hints[each.name] for each in fields(config_class)}


def test_types_of_options_are_those_of_the_configs() -> None:
    run, build = hints_of(RunConfig), hints_of(BuildConfig)
    assert typing.get_type_hints(RunOptions) == run
    assert typing.get_type_hints(BuildOptions) == {
        name: hint for name, hint in build.items() if name not in run
    }
    assert typing.get_type_hints(EngineOptions) == {**build, **run}
    assert typing.get_type_hints(SegmenterOptions) == {
        name: hint for name, hint in build.items() if name != "kernels"
    }
    assert all(build[name] == run[name] for name in build.keys() & run.keys()), (
        "one keyword sets both"
    )


@pytest.mark.parametrize("cls", [LLM, AsyncLLM])
def test_the_signature_names_every_option(cls: type) -> None:
    shown = inspect.signature(cls).parameters
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in shown.values())
    assert {"model", *LLMOptions.__annotations__} == set(shown)
    assert set(shown) == OWN | set(hints_of(RunConfig)) | set(hints_of(BuildConfig))
    for config in (BuildConfig(), RunConfig()):
        for name, hint in hints_of(type(config)).items():
            assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
            assert (shown[name].annotation, shown[name].default) == (hint, getattr(config, name))


def test_the_docstrings_describe_every_option() -> None:
    for cls, configs in ((LLM, (RunConfig, BuildConfig)), (Segmenter, (BuildConfig,))):
        for config in configs:
            for each in fields(config):
                assert f"    {each.name}: " in (cls.__doc__ or ""), each.name


@pytest.mark.parametrize("cls", [LLM, AsyncLLM, Segmenter])
def test_an_unknown_option_is_a_type_error_with_the_nearest_one(cls: Any, tmp_path: Path) -> None:
    """Before anything is opened: there is no engine."""
    with pytest.raises(
        TypeError,
        match=rf"^{cls.__name__}: unknown option quantisation; did you mean quantization\?$",
    ):
        cls(tmp_path / "none", quantisation="int8")
    with pytest.raises(UnknownOption, match="unknown option xyzzy; known are "):
        cls(tmp_path / "none", xyzzy=1)
    assert issubclass(UnknownOption, UsageError)


def test_public_names_are_shown_although_they_are_lazy() -> None:
    code = (
        "import sys, modelmill\n"
        "names = [n for n in dir(modelmill) if not n.startswith('_')]\n"
        "assert names == sorted(n for n in modelmill.__all__ if not n.startswith('_')), names\n"
        "assert '__version__' in dir(modelmill)\n"
        "assert 'torch' not in sys.modules\n"
    )
    run_code(code)
    assert all(hasattr(modelmill, name) for name in modelmill.__all__)


def test_repr_says_what_is_open(engine: Path) -> None:
    llm = LLM(engine, device="cpu", max_model_len=128)
    assert repr(llm) == (
        f"LLM({str(engine)!r}, model_type='llama', dtype='float32', quantization='none', "
        "device='cpu', "
        "weights='1018.75 KiB', max_model_len=128)"
    )
    llm.close()
    assert repr(llm) == f"LLM({str(engine)!r}, closed)"


def test_with_closes(engine: Path) -> None:
    with LLM(engine, device="cpu") as llm:
        assert llm.generate("Once", GREEDY)[0].finished
        assert not llm.closed
    assert llm.closed
    llm.close()
    with pytest.raises(ZeroDivisionError), LLM(engine, device="cpu") as failed:
        raise ZeroDivisionError
    assert failed.closed


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_one_refuses_every_call(llm: LLM, call: str) -> None:
    llm.close()
    with pytest.raises(UsageError, match=r"^this LLM \(.*\) is closed; open the engine again$"):
        CALLS[call](llm)


def test_every_public_method_is_among_these_calls() -> None:
    public = {
        name
        for name, value in vars(LLM).items()
        if not name.startswith("_") and name not in ("close", "closed")
    }
    assert public == set(CALLS) - {"with", "generate nothing"}


def test_a_stream_that_is_open_ends_when_it_is_closed(llm: LLM) -> None:
    stream = llm.stream("Once", SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    next(stream)
    llm.close()
    with pytest.raises(UsageError, match="is closed"):
        list(stream)


def test_closing_gives_the_memory_free(engine: Path) -> None:
    llm = LLM(engine, device="cpu")
    llm.generate("Once", GREEDY)
    model = weakref.ref(llm.engine_core.model)
    llm.close()
    gc.collect()
    assert model() is None


def test_async_with_and_after_it(engine: Path) -> None:
    async def main() -> AsyncLLM:
        async with AsyncLLM(engine, device="cpu") as engine_:
            assert repr(engine_).startswith("AsyncLLM(")
            assert "max_model_len=512" in repr(engine_)
            assert (await engine_.generate("Once", GREEDY)).finished
        for call in (engine_.generate("Once", GREEDY), engine_.embed("Once"), engine_.__aenter__()):
            with pytest.raises(ModelmillError, match="is closed"):
                await call
        return engine_

    closed = asyncio.run(main())
    assert closed.closed
    assert repr(closed) == f"AsyncLLM({str(engine)!r}, closed)"
    closed.close()


# -- embeddings


def test_embeddings_have_length_1_alone_and_in_a_batch(llm: LLM) -> None:
    """Their values: tests/serve/test_embeddings.py."""
    prompts = ["Once upon a time", "The dog", "A"]
    embeddings = llm.embed(prompts)
    assert (embeddings.shape, embeddings.dtype) == ((3, 64), np.float32)
    assert np.linalg.norm(embeddings, axis=1) == pytest.approx(np.ones(3), abs=1e-6)
    for place, prompt in enumerate(prompts):
        assert llm.embed(prompt) == pytest.approx(embeddings[place : place + 1], abs=1e-5), (
            "alone and in a batch"
        )


def test_embeddings_take_the_servers_options(llm: LLM) -> None:
    full, short = llm.embed("The dog"), llm.embed("The dog", dimensions=8)
    assert short[0] == pytest.approx(full[0, :8] / np.linalg.norm(full[0, :8]), abs=1e-6)
    assert not np.allclose(llm.embed("The dog", pooling="last"), full)
    assert np.allclose(llm.embed([[1, 403, 407]]), llm.embed({"prompt_token_ids": [1, 403, 407]}))
    for wrong in ({"pooling": "max"}, {"dimensions": 65}):
        with pytest.raises(RequestError):
            llm.embed("The dog", **wrong)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="nothing to embed"):
        llm.embed([])
    with pytest.raises(RequestError):
        llm.embed("x" * 20000)
    assert not llm.engine_core.has_work


def test_async_embeddings_are_the_same(engine: Path, llm: LLM) -> None:
    prompts = ["Once upon a time", "The dog"]

    async def main() -> np.ndarray:
        async with AsyncLLM(engine, device="cpu") as many:
            with pytest.raises(RequestError):
                await many.embed(["Once", "x" * 20000])
            return await many.embed(prompts)

    assert asyncio.run(main()) == pytest.approx(llm.embed(prompts), abs=1e-5)
