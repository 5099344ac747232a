"""Loops over bytes, compiled to machine code when the module that has them is imported.

Import such a module late: Numba takes 0.2 s of CPU and 70 MB of memory, loading what was compiled
0.2 s and 20 MB more. What is compiled is kept beside the module or in the user's cache, where Numba
looks for it by the module's time and the kind of CPU: what a loop takes from another module, a
constant say, isn't seen to change. A process that can't write to either compiles for itself, some
0.3 s a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.core import cgutils, types
from numba.extending import intrinsic, register_jitable

_Bytes = npt.NDArray[np.uint8]
_Loop = TypeVar("_Loop", bound=Callable[..., Any])


def compiled(signature: str) -> Callable[[_Loop], _Loop]:
    """The function as machine code for arguments of these types, without the interpreter's lock.

    Nothing checks an index: a loop checks all that it is told by others before it reads by it.
    """

    def of(loop: _Loop) -> _Loop:
        found: Any
        try:
            found = numba.njit(signature, nogil=True, cache=True)(loop)
        except Exception:  # noqa: BLE001 - whatever it is that can't be kept; others come again
            found = numba.njit(signature, nogil=True)(loop)
        return cast("_Loop", found)

    return of


def part(function: _Loop) -> _Loop:
    """What loops of the same module call: it is compiled with each of them."""
    return register_jitable(function)


def _copied(
    _context: object, target: Any, to: Any, source: Any, begin: Any, count: Any
) -> tuple[Any, Callable[..., Any]]:
    """The code of :func:`copy_bytes`, of whose arguments these are the types."""

    def generated(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def place(number: int) -> Any:
            array = context.make_array(signature.args[number])(context, builder, arguments[number])
            return builder.gep(array.data, [arguments[number + 1]])

        copy: Callable[..., Any] = cgutils.raw_memcpy
        copy(builder, place(0), place(2), arguments[4], 1)
        return context.get_dummy_value()

    return types.void(target, to, source, begin, count), generated


copy_bytes = cast("Callable[[_Bytes, int, _Bytes, int, int], None]", intrinsic(_copied))
"""In a loop, ``copy_bytes(target, to, source, begin, count)``: memcpy from array to array.

The assignment of a slice looks first whether the two overlap, and a loop goes byte by byte: that
takes five and ten times as long.
"""
