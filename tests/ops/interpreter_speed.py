"""Makes Triton 3.6's interpreter faster: of a kernel's time most goes to the types of its tensors.

What is computed stays: shapes and their constants are made once instead of for every tensor,
numpy's dtypes are looked up, and no check of overflow is computed that nothing reads.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any


def speed_up(triton: Any, interpreter: Any) -> None:
    """Patch what triton 3.6 has; other versions stay as they are."""
    if not triton.__version__.startswith("3.6."):
        return
    core = triton.language.core
    _share_shapes(core)
    _compare_shortly(core)
    _look_up_dtypes(core, interpreter)
    semantic = triton.language.semantic.TritonSemantic
    _leave_equal_shapes(semantic)
    semantic.binary_op_sanitize_overflow_impl = check_nothing


def _share_shapes(core: Any) -> None:
    """Make the tuple of a shape, and the constants of its sizes, once for all tensors."""

    @cache
    def block(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        shape = core.tuple(sizes)
        return shape, core.validate_block_shape(shape), str(shape)

    @cache
    def constants(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(prod(sizes))

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        shape = core._unwrap_if_constexpr(shape) if isinstance(shape, core.constexpr) else shape
        self.element_ty = element_ty
        self.shape, self.numel, text = block(tuple(map(core._unwrap_if_constexpr, shape)))
        self.name = f"<{text}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = constants(tuple(type.shape.values) if type.is_block() else ())

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor


def _compare_shortly(core: Any) -> None:
    """Compare by identity first, and sizes without a tuple of Triton's for a list."""
    dtype_eq = core.dtype.__eq__
    tuple_eq = core.tuple.__eq__
    equal = core.constexpr(True)
    unequal = core.constexpr(False)

    def is_same_dtype(self: Any, other: Any) -> bool:
        return self is other or dtype_eq(self, other)

    def has_same_values(self: Any, other: Any) -> Any:
        if self is other:
            return equal
        if not isinstance(other, list):
            return tuple_eq(self, other)
        return equal if self.values == core._unwrap_if_constexpr(other) else unequal

    core.dtype.__eq__ = is_same_dtype
    core.tuple.__eq__ = has_same_values


def _leave_equal_shapes(semantic: Any) -> None:
    real = semantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        blocks = lhs.type.is_block() and rhs.type.is_block()
        if blocks and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return real(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast


def _look_up_dtypes(core: Any, interpreter: Any) -> None:
    real = interpreter._get_np_dtype
    dtypes: dict[str, Any] = {}

    def get(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, core.block_type) else dtype
        if element.name not in dtypes:
            dtypes[element.name] = real(element)
        return dtypes[element.name]

    interpreter._get_np_dtype = get


def check_nothing(*_: Any) -> None:
    """In the place of a check of overflow that only a kernel under TRITON_DEBUG reads."""
