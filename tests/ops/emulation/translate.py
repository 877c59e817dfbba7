"""CUDA C++ with PTX in it to C++: each asm statement becomes calls of what ptx.h has of that name.

``asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));`` becomes
``{ ptx::ex2("approx.ftz.f32", (y), static_cast<float>(x)); }``. Operands keep the instruction's
order; those in braces are one std::array, of pointers where they are the target. Registers and
labels that a statement has of its own become variables and labels.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable

TYPES = {"r": "u32", "f": "float", "h": "u16", "l": "u64"}
LOCALS = {"pred": "bool", "b16": "u16", "b32": "u32"}
QUOTED = r'"(?:[^"\\]|\\.)*"'
KERNEL = re.compile(r"__global__ void([^{;]*?)\b(\w+)\(\s*const __grid_constant__")


def translate(text: str, known: set[str]) -> str:
    """Preprocessed source as C++.

    known: instructions that are emulated; any other fails when it is met.
    """
    text = re.sub(r"extern __shared__[^;]*?(\w+)\[\];", r"#define \1 (emu::dynamic())", text)
    text = _shared_by_name(text)
    pieces, end = [], 0
    for match in re.finditer(r"\basm(?:\s+volatile)?\s*\(", text):
        close = _closing(text, match.end())
        pieces += [text[end : match.start()], _statement(text[match.end() : close], known)]
        end = text.index(";", close) + 1
    return "".join(pieces) + text[end:]


def cluster_sizes(text: str) -> dict[str, int]:
    """Names of the kernels, and the blocks of a cluster of each."""
    dims = (
        (name, re.search(r"__cluster_dims__\((\w+)", attributes))
        for attributes, name in KERNEL.findall(text)
    )
    return {name: _number(match[1], text) if match else 1 for name, match in dims}


def _number(word: str, text: str) -> int:
    """A number, or the name of a constant: a number or a product of numbers."""
    value = word if word.isdigit() else re.findall(rf"\b{word} = (\d+(?: \* \d+)*)", text)[0]
    return math.prod(int(factor) for factor in value.split(" * "))


def _shared_by_name(text: str) -> str:
    """Variables in a block's shared memory: a reference to a place there, the same in each
    block.
    """
    count = iter(range(1 << 30))

    def placed(match: re.Match[str]) -> str:
        type_name, name, size = match.groups()
        return (
            f"typedef {type_name} {name}_type{size}; {name}_type &{name} = "
            f"emu::in_block<{name}_type, {next(count)}>();"
        )

    return re.sub(
        r"\b__shared__\s+(?:__align__\(\d+\)\s+)?([\w<>]+)\s+(\w+)((?:\[[^\]]*\])*);", placed, text
    )


def _closing(text: str, at: int) -> int:
    """Where the parenthesis closes that has opened just before ``at``."""
    depth = 1
    for match in re.compile(rf"{QUOTED}|[()]").finditer(text, at):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    raise ValueError("an asm statement does not end")


def _split(text: str, by: str) -> list[str]:
    """At top level: not within strings, parentheses, brackets and braces."""
    parts, depth, begin = [], 0, 0
    for match in re.finditer(rf"{QUOTED}|[()\[\]{{}}]|{by}", text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] == by:
            parts.append(text[begin : match.start()])
            begin = match.end()
    return [part.strip() for part in (*parts, text[begin:])]


def _statement(inside: str, known: set[str]) -> str:
    template, *operands = _split(inside, ":")
    outputs, inputs = (
        [each for each in _split(part, ",") if each] for part in (*operands, "", "")[:2]
    )
    values, targets = [], []
    for each in (*outputs, *inputs):
        match = re.fullmatch(rf"({QUOTED})\s*\((.*)\)", each, re.DOTALL)
        assert match, f"no operand: {each}"
        constraint, expression = match.groups()
        letter, written = constraint.strip('"=+'), constraint[1] in "=+"
        cast = (
            f"emu::bits({expression})"
            if letter == "l"
            else f"static_cast<{TYPES.get(letter)}>({expression})"
        )
        values.append(f"({expression})" if written or letter == "n" else cast)
        targets.append(f"&({expression})")
    body = " ".join(ast.literal_eval(f"({template})").split())
    if body.startswith("{"):
        body = body[1:].rsplit("}", 1)[0].strip()
    own: list[str] = []
    lines = [
        _instruction(part.strip(), values, targets, own, known)
        for part in body.split(";")
        if part.strip()
    ]
    labels = re.findall(r"^(\w+): ", "\n".join(lines), re.MULTILINE)
    declared = [f"__label__ {', '.join(labels)};"] if labels else []
    return "{ " + " ".join([*declared, *own, *lines]) + " }"


def _instruction(
    text: str, values: list[str], targets: list[str], own: list[str], known: set[str]
) -> str:
    label = re.match(r"(\w+):(?!:)\s*", text)
    if label:
        return f"{label[1]}: {_instruction(text[label.end() :], values, targets, own, known)}"
    if text.startswith(".reg"):
        _, type_name, *names = text.replace(",", " ").split()
        own.append(f"{LOCALS[type_name[1:]]} {', '.join(f'own_{name} = 0' for name in names)};")
        return ""
    condition = re.match(r"@(!?)(\w+)\s+", text)
    if condition:
        then = _instruction(text[condition.end() :], values, targets, own, known)
        return f"if ({condition[1]}own_{condition[2]}) {then}"
    name, _, rest = text.partition(" ")
    if name == "bra":
        return f"goto {rest};"
    word, _, suffix = name.partition(".")
    if word not in known:
        return f'emu::fail("{word}.{suffix} is not emulated");'
    operands = ", ".join((f'"{suffix}"', *_operands(rest, values, targets)))
    return f"ptx::{word}({operands});"


def _operands(text: str, values: list[str], targets: list[str]) -> list[str]:
    def one(name: str, of: Callable[[int], str]) -> str:
        if name.startswith("%%"):
            return f"ptx::{name[2:]}()"
        if name.startswith("%"):
            return of(int(name[1:]))
        # the statement's own: C++ may know another of that name
        return name if name[0].isdigit() else f"own_{name}"

    operands = []
    for number, part in enumerate(_split(text, ",") if text else []):
        if part.startswith("["):
            operands += (
                _operands(part[1:-1], values, targets)
                if "{" in part
                else [one(part[1:-1], values.__getitem__)]
            )
        elif part.startswith("{"):
            names = part[1:-1].replace(" ", "").split(",")
            target = number == 0
            of = targets.__getitem__ if target else values.__getitem__
            each = [
                f"&own_{name}" if target and name[0] != "%" else one(name, of) for name in names
            ]
            operands.append(f"std::array{{{', '.join(each)}}}")
        elif part != "_":
            operands.append(one(part, values.__getitem__))
    return operands
