"""Dataclasses to flags and back: command line, environment, file, defaults, in this order."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from modelmill.cli import main as command
from modelmill.cli import serve
from modelmill.cli.engine_options import (
    ENGINE_GPU_FRACTION_BESIDE_REFERENCE,
    ImplicitBuildOptions,
    share_gpu_with_reference,
)
from modelmill.cli.options import (
    CommonArgs,
    _parse_value,
    collect_cli_parameters,
    config_field,
    flag_env_variable,
)
from modelmill.core.config import BuildConfig, RunConfig, non_default_fields, option_field
from modelmill.core.errors import UsageError
from modelmill.core.module_lookup import import_module_if_exists
from modelmill.core.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Args(CommonArgs):
    """Every kind of field."""

    engine: Path = option_field(help="the engine", positional=True, metavar="ENGINE")
    data: Path | None = option_field(None, "data", required=True)
    ratio: float | None = option_field(None, "a ratio")
    bare: bool = option_field(False, "no negative", flags=("--bare",))
    sizes: tuple[int, ...] = option_field((1, 2), "sizes")
    two: tuple[str, str] | None = option_field(None, "two values")
    what: str = option_field("a", "a choice", choices=("a", "b"), flags=("-w",))
    build: BuildConfig = config_field(BuildConfig, "Build", exclude=("calibration",))
    run: RunConfig = config_field(RunConfig, "Run")
    sampling: SamplingParams = config_field(SamplingParams, "Sampling")


class Probe:
    """A verb that keeps its arguments."""

    def __init__(self) -> None:
        self.args: Any = None

    def run(self, args: Any) -> int:
        self.args = args
        return 0


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    result = Probe()
    module = types.ModuleType("modelmill.cli.probe")
    module.HELP, module.Args, module.run = "a probe", Args, result.run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelmill.cli.probe", module)
    monkeypatch.setattr(command, "list_subcommands", lambda: ["probe"])
    monkeypatch.setattr(command, "import_module_if_exists", lambda package, name: module)
    return result


def parse(probe: Probe, *words: str) -> Args:
    assert command.run_command_line(["probe", "e", "--data", "d", *words]) == 0
    return probe.args  # type: ignore[no-any-return]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert command.run_command_line(["probe", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("modelmill: ")
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_defaults_are_the_dataclasses(probe: Probe) -> None:
    args = parse(probe)
    assert (args.build, args.run, args.sampling) == (BuildConfig(), RunConfig(), SamplingParams())
    assert (args.engine, args.sizes, args.two) == (Path("e"), (1, 2), None)


def test_every_kind_of_flag(probe: Probe) -> None:
    args = parse(
        probe, "--ratio", "0.5", "--bare", "--sizes", "3,4", "--sizes", "5", "--two", "x", "y",
        "-w", "b",
        "-q", "int8", "--page-size", "32", "--no-enable-prefix-caching", "--kernel", "linear=torch",
        "--kernel", "rms_norm=cpu", "--stop", "a b", "--stop", "c", "--stop-token-ids", "1,2",
        "--logit-bias", "5=-2.5",
    )  # fmt: skip
    assert (args.ratio, args.bare, args.sizes, args.two, args.what) == (
        0.5,
        True,
        (3, 4, 5),
        ("x", "y"),
        "b",
    )
    assert args.build.quantization == "int8"
    assert (args.run.page_size, args.run.enable_prefix_caching) == (32, False)
    assert args.run.kernels == args.build.kernels == {"linear": "torch", "rms_norm": "cpu"}
    assert (args.sampling.stop, args.sampling.stop_token_ids) == (("a b", "c"), (1, 2))
    assert args.sampling.logit_bias == {5: -2.5}


def test_one_flag_sets_a_name_in_every_config(probe: Probe) -> None:
    args = parse(probe, "--seed", "7", "--max-model-len", "99")
    assert (args.build.seed, args.run.seed, args.sampling.seed) == (7, 7, 7)
    assert (args.build.max_model_len, args.run.max_model_len) == (99, 99)


def test_dash_and_underscore_are_alike(probe: Probe) -> None:
    assert parse(probe, "--max_num_seqs", "3", "--no-cuda_graphs").run == RunConfig(
        max_num_seqs=3, cuda_graphs=False
    )
    assert parse(probe, "--stop", "--a_b").sampling.stop == ("--a_b",), "values stay as they are"


def test_a_flag_may_have_names_that_others_know_it_by(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (
        ("--tp", "2"),
        ("-tp", "2"),
        ("--tensor-parallel-size", "2"),
        ("--tensor_parallel_size=2",),
    ):
        assert parse(probe, *words).run.tp == 2
    (tmp_path / "c.yaml").write_text("tensor-parallel-size: 3\n")
    assert parse(probe, "--config", str(tmp_path / "c.yaml")).run.tp == 3
    for words in (("-ep",), ("--enable-expert-parallel",), ("--enable_expert_parallel",)):
        assert parse(probe, "--tp", "2", *words).run.enable_expert_parallel
    assert not parse(probe, "--tp", "2", "--no-enable-expert-parallel").run.enable_expert_parallel
    monkeypatch.setenv("MODELMILL_TENSOR_PARALLEL_SIZE", "4")
    assert parse(probe).run.tp == 4


def test_command_line_beats_environment_beats_file(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "max-num-seqs: 1\nmax_num_batched_tokens: 2\npage_size: 8\nkernel: {linear: torch}\nstop: "
        "[x, y]\n"
    )
    monkeypatch.setenv("MODELMILL_MAX_NUM_SEQS", "10")
    monkeypatch.setenv("MODELMILL_MAX_NUM_BATCHED_TOKENS", "20")
    monkeypatch.setenv("MODELMILL_CUDA_GRAPHS", "false")
    args = parse(probe, "--config", str(path), "--max-num-seqs", "100")
    assert (args.run.max_num_seqs, args.run.max_num_batched_tokens, args.run.page_size) == (
        100,
        20,
        8,
    )
    assert args.run.cuda_graphs is False
    assert args.run.kernels == {"linear": "torch"}
    assert args.sampling.stop == ("x", "y")


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("big, there", ("big, there",)),
        (" a\n", (" a\n",)),
        ("[INST]", ("[INST]",)),
        ('"', ('"',)),
        ("7", ("7",)),
        ('["big, there", "\\n\\n"]', ("big, there", "\n\n")),
        ("", ()),
        ("[]", ()),
    ],
)
def test_a_variable_is_one_value_or_a_list(
    probe: Probe, monkeypatch: pytest.MonkeyPatch, text: str, stops: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MODELMILL_STOP", text)
    assert parse(probe).sampling.stop == stops
    assert parse(probe, "--stop", "x y").sampling.stop == ("x y",), "the command line comes first"


@pytest.mark.parametrize("text", ["1,2 3", "1, 2,3", "[1, 2, 3]"])
def test_numbers_and_pairs_of_a_variable(
    probe: Probe, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("MODELMILL_SIZES", text)
    monkeypatch.setenv("MODELMILL_KERNEL", "linear=torch rms_norm=cpu")
    args = parse(probe)
    assert (args.sizes, args.run.kernels) == ((1, 2, 3), {"linear": "torch", "rms_norm": "cpu"})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("STOP", '["a", "b]', "MODELMILL_STOP begins like a list"),
        ("STOP", "[1]", "MODELMILL_STOP must be text, not 1"),
        ("SIZES", "one", "MODELMILL_SIZES must be an integer"),
        ("KERNEL", "linear", "MODELMILL_KERNEL takes KEY=VALUE"),
    ],
)
def test_mistakes_in_a_variable(
    probe: Probe,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    message: str,
) -> None:
    monkeypatch.setenv(f"MODELMILL_{name}", text)
    assert message in refusal(capsys, "e", "--data", "d")


def test_required_flags_may_stand_in_the_file(probe: Probe, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("data: from-file\nratio: 1\nbare: true\n")
    assert command.run_command_line(["probe", "e", "--config", str(path)]) == 0
    assert (probe.args.data, probe.args.ratio, probe.args.bare) == (Path("from-file"), 1.0, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq: 3", "did you mean max_num_seqs"),
        ("config: other.yaml", "unknown option 'config'\n"),
        ("engine: x", "unknown option"),
        ("max_num_seqs: many", "must be an integer"),
        ("max_num_seqs: 1.5", "must be an integer"),
        ("cuda_graphs: 1", "must be true or false"),
        ("dtype: float8", "is not one of"),
        ("stop: {a: b}", "must be text"),
        ("stop: [0123]", "must be text, not 83; put it into quotes"),
        ("- a\n- b", "must hold"),
        ("a: [", "is no YAML"),
        ("two: [a]", "takes two values"),
    ],
)
def test_mistakes_in_the_file(
    probe: Probe, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert message in refusal(capsys, "e", "--data", "d", "--config", str(path))


def test_a_missing_file(probe: Probe, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read" in refusal(capsys, "e", "--data", "d", "--config", "none.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "ENGINE"),
        (["e"], "--data is missing"),
        (["e", "--data", "d", "--max-num-sqs", "3"], "did you mean --max-num-seqs"),
        (["e", "--data", "d", "--page-size", "7"], "is not one of"),
        (["e", "--data", "d", "--page-size"], "argument"),
        (["e", "--data", "d", "--kernel", "linear"], "--kernel takes KEY=VALUE"),
        (["e", "--data", "d", "--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (["e", "--data", "d", "--temperature", "-1"], "temperature"),
        (["e", "--data", "d", "--logit-bias", "x=1"], "must be an integer"),
        (["e", "--data", "d", "extra"], "unexpected"),
    ],
)
def test_mistakes_on_the_command_line(
    probe: Probe, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in refusal(capsys, *words)


def test_flags_stand_once_with_help_and_a_variable() -> None:
    for name in command.list_subcommands():
        module = import_module_if_exists("modelmill.cli", name)
        assert module is not None
        flags = collect_cli_parameters(module.Args)
        longs = [each for flag in flags for each in flag.names]
        assert len(longs) == len(set(longs))
        assert {"json", "config"} <= set(longs)
        for flag in flags:
            assert flag.help, f"{name} --{flag.long} has no help"
            for each in flag.names:
                assert flag_env_variable(each).startswith("MODELMILL_")
                assert not flag_env_variable(each).startswith("MODELMILL_CACHE"), (
                    "that variable names the cache folder"
                )


def test_borrowed_options_follow_their_source() -> None:
    own = {each.name: each for each in fields(BuildConfig)}
    for each in fields(ImplicitBuildOptions):
        assert each.default == own[each.name].default
        assert each.metadata["choices"] == own[each.name].metadata["choices"]


def test_changed() -> None:
    assert non_default_fields(RunConfig(seed=3, page_size=16)) == {"seed": 3}
    kernels: Mapping[str, str] = {"linear": "torch"}
    assert non_default_fields(BuildConfig(kernels=kernels)) == {"kernels": kernels}


def test_an_engine_makes_room_for_the_reference_unless_a_size_is_set() -> None:
    assert (
        share_gpu_with_reference(RunConfig()).gpu_memory_utilization
        == ENGINE_GPU_FRACTION_BESIDE_REFERENCE
    )
    assert (
        share_gpu_with_reference(RunConfig(gpu_memory_utilization=0.8)).gpu_memory_utilization
        == 0.8
    )
    assert share_gpu_with_reference(RunConfig(kv_cache_bytes=1 << 30)).gpu_memory_utilization == 0.9


def test_every_byte_option_takes_a_unit() -> None:
    flags = {flag.name: flag for flag in collect_cli_parameters(serve.Args)}
    sizes = {name for name, flag in flags.items() if flag.is_bytes}
    assert sizes == {
        "answer_history_bytes",
        "memory_budget",
        "max_body_bytes",
        "max_text_body_bytes",
        "response_store_bytes",
        "session_bytes",
        "sleep_memory",
        "image_cache_bytes",
        "kv_cache_bytes",
        "prefix_cache_bytes",
        "state_cache_bytes",
    }
    for name in sizes:
        assert _parse_value(flags[name], "8GiB", "--x") == 8 << 30
        assert _parse_value(flags[name], 12, "--x") == 12
        with pytest.raises(UsageError, match="--x must be a size as 8GiB, 8GB or bytes"):
            _parse_value(flags[name], "much", "--x")
