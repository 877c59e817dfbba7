"""No way of ours unpickles, evaluates or fetches code: read with ast, whatever it is called by."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_files import dotted_name, each_file

ROOT = Path(__file__).resolve().parents[2] / "modelmill"
# what unpickles, and what sends objects between processes by pickling them
MODULES = {
    *(
        "pickle",
        "_pickle",
        "cPickle",
        "pickletools",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
        "joblib",
        "jsonpickle",
    ),
    *(
        "multiprocessing",
        "torch.multiprocessing",
        "xmlrpc",
        "torch.package",
        "torch.hub",
        "torch.distributed.rpc",
    ),
}
NAMES = {"ProcessPoolExecutor", "eval", "exec", "__import__"}
CALLS = {
    *(
        "broadcast_object_list",
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
        "send_object_list",
    ),
    *(
        "recv_object_list",
        "unsafe_load",
        "full_load",
        "system",
        "popen",
        "run_path",
        "run_module",
        "send_pyobj",
    ),
}


def forbidden(module: str) -> bool:
    return any(module == each or module.startswith(each + ".") for each in MODULES)


def named(call: ast.Call, name: str) -> object:
    """A keyword's constant; None where it is not given, the node where it is no constant."""
    value = next((word.value for word in call.keywords if word.arg == name), None)
    return value.value if isinstance(value, ast.Constant) else value


def of_call(call: ast.Call) -> Iterator[str]:
    name = dotted_name(call.func)
    last = name.split(".")[-1]
    if name == "torch.load" and named(call, "weights_only") is not True:
        yield "torch.load without weights_only=True"
    if named(call, "allow_pickle") not in (None, False):
        yield "allow_pickle"
    if named(call, "trust_remote_code") not in (None, False):
        yield "trust_remote_code"
    if named(call, "shell") not in (None, False):
        yield "a shell"
    if name == "yaml.load" or (last in CALLS and "." in name and name != "platform.system"):
        yield name
    first = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else ""
    if last == "import_module" and forbidden(str(first)):
        yield f"import_module of {first}"


def faults(source: str) -> list[str]:
    """What stands in a source that may stand in none of ours."""
    errors: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            errors += [alias.name for alias in node.names if forbidden(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            imported_names = [
                node.module or "",
                *(f"{node.module}.{alias.name}" for alias in node.names),
            ]
            errors += [module for module in imported_names if forbidden(module)]
            errors += [
                alias.name for alias in node.names if alias.name in NAMES or alias.name in CALLS
            ]
        elif isinstance(node, ast.Name) and node.id in NAMES:
            errors.append(node.id)
        elif isinstance(node, ast.Attribute) and (
            node.attr == "ProcessPoolExecutor" or forbidden(dotted_name(node))
        ):
            errors.append(ast.unparse(node))
        elif isinstance(node, ast.Call):
            errors += of_call(node)
    return errors


@each_file(sorted(ROOT.rglob("*.py")))
def test_nothing_unpickles_or_evaluates(path: Path) -> None:
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "import pickle as p", "from pickle import loads",
        "import multiprocessing.connection",
        "from torch import multiprocessing", "import torch\ntorch.multiprocessing.Queue()",
        "torch.load(x)",
        "torch.load(x, weights_only=False)", "torch.load(x, weights_only=flag)",
        "np.load(x, allow_pickle=True)",
        "importlib.import_module('pickle')", "__import__('pickle')", "eval(x)", "exec(x)",
        "f = eval", "yaml.load(x)",
        "yaml.unsafe_load(x)", "dist.broadcast_object_list(x)",
        "from torch.distributed import " "gather_object",
        "Model.from_pretrained(x, trust_remote_code=True)",
        "concurrent.futures.ProcessPoolExecutor()",
        "from concurrent.futures import ProcessPoolExecutor", "subprocess.run(x, shell=True)",
        "os.system(x)",
    ],
)  # fmt: skip
def test_each_of_these_is_seen(source: str) -> None:
    assert faults(source)


@pytest.mark.parametrize(
    "source", ["model.eval()", "torch.load(x, weights_only=True)", "np.load(x)", "re.compile(x)"]
)
def test_what_is_harmless_is_not(source: str) -> None:
    assert faults(source) == []
