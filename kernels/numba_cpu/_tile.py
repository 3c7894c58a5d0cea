"""The innermost loop of a matrix product, in the CPU's vector instructions. Not here: the loops around it.

    C[r, c] ← C[r, c] + Σ_k A[r, k] · P[k, c]            r = 0 … R−1, c = 0 … panel(dtype)−1, k in order

The R·3 vectors of C stay in registers for all k; a step loads 3 vectors of P and R numbers of A and makes R·3
fused multiply-adds, which keeps both multiply-add units of a core busy. Numba cannot be told to keep an array
in registers, so the loop is written in LLVM's own terms; `_plain_tile` says the same in Python, and is what
runs where NUMBA_DISABLE_JIT is set.

Every element of C is one chain of multiply-adds over k, whatever its neighbours are and however the work is
cut into tiles: so results depend neither on the batch size nor on the number of threads.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gru_ref.kernels.numba_cpu._compile import OPTIONS
from gru_ref.types import Array

_config: Any = numba.config
_FEATURES = llvm.get_host_cpu_features()
VECTOR_BYTES = 64 if _FEATURES.get("avx512f") else 32 if _FEATURES.get("avx2") else 16
ROWS = 8 if VECTOR_BYTES == 64 else 4
"""R of the largest tile: as many as the registers hold, 32 of them or 16."""
_VECTORS = 3
PANEL_BYTES = _VECTORS * VECTOR_BYTES
_INT32 = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()


def panel(dtype: Any) -> int:
    """Columns of C in a tile."""
    return PANEL_BYTES // np.dtype(dtype).itemsize


def _make_tile(rows: int) -> Callable[..., None]:
    """tile(P, p, a, a_row, a_k, c, c_row, K) for R = rows.

    P holds the panel's rows one after the other, from element p on. a and c are the addresses in memory of
    A[0, 0] and C[0, 0], numbers of P's dtype; a_row, a_k and c_row say how many such numbers lie between rows
    and between steps of k. K ≥ 1. (Addresses, because arrays of other shapes and strides are other types to
    numba, and each would compile anew.)
    """

    def _plain_tile(P: Array, p: int, a: int, a_row: int, a_k: int, c: int, c_row: int, K: int) -> None:
        width = panel(P.dtype)
        for r in range(rows):
            out = _numbers_at(c + r * c_row * P.itemsize, width, P.dtype)
            total = np.zeros(width, P.dtype)
            for k in range(K):
                total += (
                    _numbers_at(a + (r * a_row + k * a_k) * P.itemsize, 1, P.dtype)
                    * P[p + k * width :][:width]
                )
            out += total

    if _config.DISABLE_JIT:
        return _plain_tile

    @intrinsic
    def tile(typing: Any, P: Any, p: Any, a: Any, a_row: Any, a_k: Any, c: Any, c_row: Any, K: Any) -> Any:
        signature = types.void(P, *[types.intp] * 7)
        return signature, lambda context, builder, signature, args: _emit(
            rows, context, builder, signature, args
        )

    return tile


def _numbers_at(address: int, n: int, dtype: Any) -> Array:
    return np.frombuffer((ctypes.c_char * (n * dtype.itemsize)).from_address(address), dtype)


def _emit(rows: int, context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """LLVM instructions of a tile: one loop, whose R·3 running sums are vectors."""
    P, p, a, a_row, a_k, c, c_row, K = args
    P = cgutils.create_struct_proxy(signature.args[0])(context, builder, P).data
    size = signature.args[0].dtype.bitwidth // 8
    lanes = VECTOR_BYTES // size
    number = ir.FloatType() if size == 4 else ir.DoubleType()
    vector = ir.VectorType(number, lanes)
    index = K.type
    A, C = (builder.inttoptr(address, number.as_pointer()) for address in (a, c))
    fma = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(vector, [vector] * 3),
        f"llvm.fma.v{lanes}f{8 * size}",
    )

    def at(array: Any, offset: Any, v: int = 0) -> Any:
        pointer = builder.gep(array, [builder.add(offset, index(v * lanes))])
        return builder.bitcast(pointer, vector.as_pointer())

    def load(pointer: Any) -> Any:
        loaded = builder.load(pointer)
        loaded.align = size
        return loaded

    def repeated(value: Any) -> Any:
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _INT32(0))
        lanes_0 = ir.Constant(ir.VectorType(_INT32, lanes), [0] * lanes)
        return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), lanes_0)

    a_rows = [builder.gep(A, [builder.mul(a_row, index(r))]) for r in range(rows)]
    c_rows = [builder.mul(c_row, index(r)) for r in range(rows)]
    prefetch = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [_BYTES, _INT32, _INT32, _INT32]),
        "llvm.prefetch.p0",
    )
    for row in c_rows:
        for v in range(_VECTORS):
            pointer = builder.bitcast(at(C, row, v), _BYTES)
            builder.call(prefetch, [pointer, _INT32(1), _INT32(3), _INT32(1)])  # to write, near, data
    entry, loop = builder.block, builder.append_basic_block("k")
    done = builder.append_basic_block("done")
    builder.branch(loop)

    builder.position_at_end(loop)
    k, row_of_a, row_of_panel = (builder.phi(index) for _ in range(3))
    sums = [[builder.phi(vector) for _ in range(_VECTORS)] for _ in range(rows)]
    panel_vectors = [load(at(P, row_of_panel, v)) for v in range(_VECTORS)]
    for r in range(rows):
        factor = repeated(builder.load(builder.gep(a_rows[r], [row_of_a])))
        for v in range(_VECTORS):
            total = builder.call(fma, [factor, panel_vectors[v], sums[r][v]])
            sums[r][v].add_incoming(ir.Constant(vector, [0.0] * lanes), entry)
            sums[r][v].add_incoming(total, loop)
            sums[r][v] = total
    for counter, first, step in ((row_of_a, index(0), a_k), (row_of_panel, p, index(_VECTORS * lanes))):
        counter.add_incoming(first, entry)
        counter.add_incoming(builder.add(counter, step), loop)
    next_k = builder.add(k, index(1))
    k.add_incoming(index(0), entry)
    k.add_incoming(next_k, loop)
    builder.cbranch(builder.icmp_signed("<", next_k, K), loop, done)

    builder.position_at_end(done)
    for r in range(rows):
        for v in range(_VECTORS):
            pointer = at(C, c_rows[r], v)
            stored = builder.store(builder.fadd(load(pointer), sums[r][v]), pointer)
            stored.align = size
    return context.get_dummy_value()


def _make_keep_apart() -> Any:
    """keep_apart(), called in a helper of kernels, keeps LLVM from copying that helper to every caller."""
    if _config.DISABLE_JIT:
        return lambda: None

    def add_attribute(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    @intrinsic
    def keep_apart(typing: Any) -> Any:
        return types.void(), add_attribute

    made: Any = keep_apart
    return made


keep_apart = _make_keep_apart()
_tile_1, _tile_2, _tile_4, _tile_rows = (_make_tile(rows) for rows in (1, 2, 4, ROWS))


@numba.njit(**OPTIONS)
def tiles(P: Array, p: int, a: int, a_row: int, a_k: int, c: int, c_row: int, M: int, K: int) -> None:
    """The tiles of M rows of C below one another; the arguments are those of a tile."""
    keep_apart()
    i = 0
    while i + ROWS <= M:
        _tile_rows(P, p, a + i * a_row * P.itemsize, a_row, a_k, c + i * c_row * P.itemsize, c_row, K)
        i += ROWS
    if i + 4 <= M:
        _tile_4(P, p, a + i * a_row * P.itemsize, a_row, a_k, c + i * c_row * P.itemsize, c_row, K)
        i += 4
    if i + 2 <= M:
        _tile_2(P, p, a + i * a_row * P.itemsize, a_row, a_k, c + i * c_row * P.itemsize, c_row, K)
        i += 2
    if i < M:
        _tile_1(P, p, a + i * a_row * P.itemsize, a_row, a_k, c + i * c_row * P.itemsize, c_row, K)
