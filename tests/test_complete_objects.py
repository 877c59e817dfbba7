"""Constructors leave complete objects: an object's attributes are assigned by its own methods.

Who reads a class sees every value that its attributes can get. ``runner.graphs = …`` elsewhere
would be a part of the constructor that stands in another file; pass the value to the constructor,
or give the object a method that says what happens.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from tests.source_files import dotted_name, parse

ROOT = Path(__file__).resolve().parent.parent / "modelmill"
SETTERS = {"setattr", "delattr", "object.__setattr__"}

# (file, target, reason); both are patterns
ALLOWED = (
    # modules of torch: their tensors come from a checkpoint or a recipe, after construction
    ("loader/model_loader.py", "module.weight", "a loader fills the parameters of a torch module"),
    ("loader/model_loader.py", "setattr(module, *", "a loader fills parameters and buffers"),
    ("loader/unpack_weights.py", "linear.weight", "unpacks a loaded weight in place"),
    ("nn/expert_stack.py", "linear.weight", "moves loaded weights into a stack of all experts"),
    ("nn/synthetic_step.py", "*.weight", "fills a model with random weights"),
    ("nn/synthetic_step.py", "setattr(model.*", "fills a model with random parameters"),
    ("nn/shard_model.py", "model.kv", "a rank has a part of the KV heads"),
    ("nn/shard_model.py", "model.state", "a rank has the states of its heads"),
    ("core/config.py", "setattr(config, *", "fields of the dataclass that is being declared"),
    ("builder/*.py", "*.weight", "the builder replaces weights by their quantized form"),
    ("builder/*.py", "setattr(self.model.*", "the builder loads a layer's parameters"),
    ("builder/*.py", "model.image_embedder", "frees the encoder once its outputs are known"),
    ("quant/*.py", "*.weight", "a recipe scales and rounds weights in place"),
    ("quant/*.py", "*.bias", "a recipe folds shifts into biases"),
    ("quant/calibrat*.py", "*", "statistics and hidden states that grow from layer to layer"),
    ("quant/*.py", "*.facts", "what a recipe reports of a layer, completed by its search"),
    # objects of other packages, which offer nothing but attributes
    ("*", "torch.backends.*", "switches of torch"),
    ("*", "*.argtypes", "ctypes: the signature of a native function"),
    ("*", "*.restype", "ctypes: the signature of a native function"),
    ("parallel/*.py", "*.atexit", "weakref.finalize: nothing to free at exit"),
    ("loader/sleepable_memory.py", "*.atexit", "weakref.finalize: nothing to free at exit"),
    ("parallel/tp_group.py", "*ptions.*", "options of torch.distributed"),
    ("text/*.py", "core.*", "the parts of a Hugging Face tokenizer"),
    ("text/hf_tokenizer.py", "copy.*", "a copy of a Hugging Face tokenizer"),
    ("text/hf_tokenizer.py", "token.special", "a token of a Hugging Face tokenizer"),
    ("eval/hf_reference.py", "model.generation_config", "a model of transformers"),
    ("vision/image.py", "rgb.info", "an image of PIL"),
    ("progress_display.py", "task.*", "a bar of rich"),
    ("progress_display.py", "self._timer.daemon", "a timer of threading"),
    ("serve/app.py", "app.*", "an application of FastAPI"),
    ("serve/json_logs.py", "logger.*", "a logger of logging"),
    ("serve/*.py", "server.*_exit", "a server of uvicorn"),
    ("cli/output.py", "sys.stdin", "the standard input of the process"),
    ("export/triton_backend.py", "sys.executable", "Triton embeds Python without one"),
    # functions and classes whose signature or text is made from a table
    ("cli/options.py", "call.__*__", "the signature of a verb, from its options"),
    ("core/api_options.py", "init.__signature__", "the signature of a class, from its options"),
    ("llm.py", "LLM.__doc__", "the options, from their table"),
    ("segmenter.py", "Segmenter.__doc__", "the options, from their table"),
    # results that grow, each with one writer
    ("request_output_state.py", "result.*", "the RequestOutput that this RequestOutputState made"),
    ("request_output_state.py", "output.*", "a CompletionOutput that this RequestOutputState made"),
    ("accept/*.py", "made.*", "a copy of the reference with the engine's weights"),
    ("text/react_tools.py", "conversation.question", "the conversation that format_react makes"),
)


def _targets(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a statement assigns or deletes."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            pending = list(targets)
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            pending = [target]
        case ast.For(target=target) | ast.AsyncFor(target=target):
            pending = [target]
        case ast.withitem(optional_vars=ast.expr() as target):
            pending = [target]
        case _:
            return
    while pending:
        target = pending.pop()
        match target:
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                pending += parts
            case ast.Starred(value=value):
                pending.append(value)
            case ast.Attribute():
                yield target


def _made_here(function: ast.AST) -> set[str]:
    """Names that a function binds to an object that it makes: ``Class(…)`` or ``copy.copy(…)``."""
    names = set()
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, values = node.targets[0], [node.value]
        targets = [target]
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            targets, values = target.elts, node.value.elts
        for name, value in zip(targets, values):
            if isinstance(name, ast.Name) and isinstance(value, ast.Call):
                maker = dotted_name(value.func)
                if maker.split(".")[-1][:1].isupper() or maker == "copy.copy":
                    names.add(name.id)
    return names


def _made_around(nodes: list[ast.AST]) -> dict[int, set[str]]:
    """Of each node in a function, by its id: what the innermost function makes."""
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    made_in = [(each, _made_here(each)) for each in functions]
    return {id(node): made for each, made in made_in for node in ast.walk(each)}


def _is_own(owner: ast.expr) -> bool:
    return isinstance(owner, ast.Name) and owner.id in {"self", "cls"}


def _foreign_assignments(path: Path) -> Iterator[tuple[int, str]]:
    """Lines where an attribute of another object is assigned, with what is assigned."""
    nodes = list(ast.walk(parse(path)))
    pairs = [(n, target) for n in nodes for target in _targets(n) if not _is_own(target.value)]
    made = _made_around(nodes) if pairs else {}  # few files have one
    for node, target in pairs:
        owner = target.value
        if not (isinstance(owner, ast.Name) and owner.id in made.get(id(node), ())):
            yield target.lineno, ast.unparse(target)
    for node in nodes:
        is_setter = isinstance(node, ast.Call) and dotted_name(node.func) in SETTERS
        if is_setter and not _is_own(node.args[0]):
            yield node.lineno, ast.unparse(node)


def test_attributes_are_assigned_by_the_object_that_has_them() -> None:
    used, hits = set(), []
    for path in sorted(ROOT.rglob("*.py")):
        where = str(path.relative_to(ROOT))
        for line, target in _foreign_assignments(path):
            allowed = [e for e in ALLOWED if fnmatch(where, e[0]) and fnmatch(target, e[1])]
            used.update(allowed)
            if not allowed:
                hits.append(f"{where}:{line}: {target}")
    assert not hits, "pass it to the constructor, or give the object a method"
    assert not sorted(set(ALLOWED) - used), "these exceptions are no longer needed"


def test_the_runtime_needs_no_exceptions() -> None:
    assert not [e for e in ALLOWED if e[0].startswith("runtime/")]
