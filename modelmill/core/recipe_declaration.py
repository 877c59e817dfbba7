"""What a recipe declares about itself: its options, its weight format, its tolerances.

A recipe is a file ``quant/<recipe>.py`` with a constant ``DECLARATION``. The command line needs the
options before torch is imported, which takes seconds, and a recipe's file imports torch. So the
constant is read from the source: it consists of the classes below and of literals.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

ErrorBoundValues = tuple[float, float, float]
"""Largest honest rel_l2, max_abs relative to the tensor's scale, and |gain - 1|."""

RECIPES_PACKAGE = "modelmill.quant"
# on one line, or up to the parenthesis that closes it at the margin
_DECLARATION_PATTERN = re.compile(r"^DECLARATION = (\w+\((?:.*\)$|\n(?:.*\n)*?\)$))", re.MULTILINE)


@dataclass(frozen=True)
class RecipeOption:
    """One option of a recipe: a field of BuildConfig and a flag of ``build``.

    Attributes:
        default: the value without the flag.
        help: the flag's help text.
        type: the type hint; by default that of the default value.
        choices: the values allowed; empty: see ``above`` and ``between``.
        flags: other names of the flag.
        above: a number that the value must exceed.
        between: the smallest and the largest value.
    """

    default: Any
    help: str
    type: str = ""
    choices: tuple[Any, ...] = ()
    flags: tuple[str, ...] = ()
    above: float | None = None
    between: tuple[int, int] | None = None

    @property
    def type_hint(self) -> str:
        """Return the type hint of the field."""
        return self.type or type(self.default).__name__

    def label(self, name: str) -> str:
        """Return the flag of the option ``name`` for messages, with its other names."""
        flag = f"--{name.replace('_', '-')}"
        others = [other for other in self.flags if other != flag]
        return f"{flag} ({', '.join(others)})" if others else flag


@dataclass(frozen=True)
class TotalErrorTolerances:
    """Bounds of a format whose arithmetic and rounding are checked together.

    The reference computes with the checkpoint's own weights.

    Attributes:
        linear: (rel_l2, max_rel) of a product in any dtype.
        gain: |gain - 1| of a product.
        logits: rel_l2 of the logits over √(layers + 2).
    """

    linear: tuple[float, float]
    gain: float
    logits: float


@dataclass(frozen=True)
class ActQuantTolerances:
    """Bounds of a format that rounds activations, against a reference that rounds them too.

    Attributes:
        product: dtype → (rel_l2, max_rel) of a product.
        layer: a whole layer.
        logits: rel_l2 of the logits over √(layers + 2).
    """

    product: Mapping[str, tuple[float, float]]
    layer: ErrorBoundValues
    logits: float


@dataclass(frozen=True)
class ImageTolerances:
    """Bounds of a format in a vision encoder, besides those of its matrices.

    accept/tolerances_segmentation.py says how they were measured.

    Attributes:
        embedding: rel_l2 of an image's embedding, against the checkpoint's own weights.
        mask_logits: rel_l2 of the logits of masks, likewise.
        module: dtype → bound of a module whose activations the format rounds, as the reference
            does; empty: it rounds none, and the bounds are those of the arithmetic.
    """

    embedding: float
    mask_logits: float
    module: Mapping[str, ErrorBoundValues] = field(default_factory=dict)


@dataclass(frozen=True)
class FormatTolerances:
    """Acceptance's bounds for a weight format; accept/tolerances.py says how they were measured.

    Attributes:
        weight: a matrix's values against the checkpoint's.
        block: the worst row, the worst tile of 32 × 32 and the row whose gain is most off.
        scaled_columns: whether columns are compared with the scales that a recipe folded into them:
            smoothing makes those of quiet channels smaller than a step.
        whole: set if arithmetic and rounding are checked together, not apart.
        act_quant: set if the format rounds activations.
        images: set if vision encoders have it.
    """

    weight: ErrorBoundValues
    block: ErrorBoundValues
    scaled_columns: bool = False
    whole: TotalErrorTolerances | None = None
    act_quant: ActQuantTolerances | None = None
    images: ImageTolerances | None = None


@dataclass(frozen=True)
class RecipeDeclaration:
    """A recipe as the command line, the docs and acceptance see it.

    Attributes:
        weight_format: the format of its weights.
        tolerances: of that format; None if another recipe declares them.
        options: its own options by name.
        reads: options that it reads and another recipe declares.
        docs: two cells of the table in docs/quantization.md: the bits, and when to take it.
        position: its place in lists; recipes of one position are in the order of their names.
        name: its name, if that is not the file's.
    """

    weight_format: str
    tolerances: FormatTolerances | None = None
    options: Mapping[str, RecipeOption] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    docs: tuple[str, str] = ("", "")
    position: int = 50
    name: str = ""


_DECLARATION_CLASSES = {
    cls.__name__: cls
    for cls in (
        RecipeOption,
        TotalErrorTolerances,
        ActQuantTolerances,
        ImageTolerances,
        FormatTolerances,
        RecipeDeclaration,
    )
}


def read_recipe_declarations() -> Mapping[str, RecipeDeclaration]:
    """Return the declaration of each recipe of the folder by its name, in the order of lists."""
    return _read_recipe_folders(tuple(importlib.import_module(RECIPES_PACKAGE).__path__))


def read_recipe_options() -> dict[str, RecipeOption]:
    """Return every option that a recipe declares, by name.

    Raises:
        ValueError: if two recipes declare the same one; the second has to name it in ``reads``.
    """
    options: dict[str, RecipeOption] = {}
    for name, recipe in read_recipe_declarations().items():
        for each, declared in recipe.options.items():
            if each in options:
                raise ValueError(f"quant/{name}.py declares {each}, which another recipe has")
            options[each] = declared
    return options


def rounding_method_hint(name: str) -> str:
    """Return the end of a message about the unknown recipe ``name``; "" unless it is a method."""
    for recipe, declared in read_recipe_declarations().items():
        method = declared.options.get("method")
        if method is not None and name.lower() in method.choices:
            flags = f"-q {recipe} --method {name.lower()}"
            return f"; {name} is a rounding method, not a recipe: modelmill build {flags}"
    return ""


def tolerances_by_weight_format() -> dict[str, FormatTolerances]:
    """Return the tolerances of each weight format that a recipe writes, in the order of recipes."""
    return {
        recipe.weight_format: recipe.tolerances
        for recipe in read_recipe_declarations().values()
        if recipe.tolerances is not None
    }


# the command line and acceptance ask often; the folders of an installed package do not change
@cache
def _read_recipe_folders(folders: tuple[str, ...]) -> Mapping[str, RecipeDeclaration]:
    found = []
    for finder, name, _ in pkgutil.iter_modules(folders):
        spec = finder.find_spec(name, None)
        loader = None if spec is None else spec.loader
        assert isinstance(loader, importlib.abc.InspectLoader), "a folder of source files"
        declaration = _parse_declaration(loader.get_source(name) or "")
        if declaration is not None:
            found.append((declaration.position, declaration.name or name, declaration))
    return {name: declaration for _, name, declaration in sorted(found, key=lambda each: each[:2])}


def _parse_declaration(source: str) -> RecipeDeclaration | None:
    """Return the value of ``DECLARATION`` in a file's source; None if it has none.

    Only the statement is parsed, since every start of the command line does it.
    """
    found = _DECLARATION_PATTERN.search(source)
    if found is None:
        return None
    declaration = _evaluate_literal(ast.parse(found[1], mode="eval").body)
    assert isinstance(declaration, RecipeDeclaration), "the constant's class"
    return declaration


def _evaluate_literal(node: ast.expr) -> Any:
    """Return the value of an expression of literals and of the classes above."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        named = {str(each.arg): _evaluate_literal(each.value) for each in node.keywords}
        return _DECLARATION_CLASSES[node.func.id](*map(_evaluate_literal, node.args), **named)
    if isinstance(node, ast.Dict):
        return {
            ast.literal_eval(key): _evaluate_literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return ast.literal_eval(node)
