"""The innermost loops of a matrix product, in the CPU's vector instructions. Not here: the loops around them.

    C[r, c] ← F[r, c] + Σ_k A[r, k] · P[k, c]        r = 0 … R−1, c = 0 … V·lanes−1, k in order, V = 3 or 2

A tile's R·V vectors of C stay in registers for all k; a step loads V vectors of P and R numbers of A and
makes R·V fused multiply-adds, which keeps both multiply-add units of a core busy. Numba cannot be told to
keep an array in registers, so the loops are written in LLVM's own terms; beside each is the same in Python,
which is what runs where NUMBA_DISABLE_JIT is set.

Every element of C is one chain of multiply-adds over k, whatever its neighbours are and however the work is
cut into tiles: so results depend neither on the batch size nor on the number of threads.

Places are addresses in memory or elements of P, and distances are counted in numbers of P's dtype: arrays of
other shapes and strides are other types to numba, and each would compile anew.
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
_ROWS = 8 if VECTOR_BYTES == 64 else 4
"""R of the largest tile: 3·R vectors and a few more are as many as the registers hold, 32 of them or 16."""
_LINE = 64
"""Bytes that the cache fetches together."""
_INT32 = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()


def _numbers_at(address: int, n: int, dtype: Any) -> Array:
    return np.frombuffer((ctypes.c_char * (n * dtype.itemsize)).from_address(address), dtype)


class _Emitter:
    """What the loops below need of LLVM: vectors of P's dtype, at distances from a place in memory."""

    def __init__(self, context: Any, builder: Any, P_type: Any, P: Any) -> None:
        self.builder = builder
        self.P = cgutils.create_struct_proxy(P_type)(context, builder, P).data
        self.size = P_type.dtype.bitwidth // 8
        self.lanes = VECTOR_BYTES // self.size
        self.number = ir.FloatType() if self.size == 4 else ir.DoubleType()
        self.vector = ir.VectorType(self.number, self.lanes)
        self.index = ir.IntType(64)

    def place(self, address: Any) -> Any:
        return self.builder.inttoptr(address, self.number.as_pointer())

    def pointer(self, place: Any, distance: Any, more: int = 0) -> Any:
        distance = self.builder.add(distance, self.index(more))
        return self.builder.bitcast(self.builder.gep(place, [distance]), self.vector.as_pointer())

    def load(self, pointer: Any) -> Any:
        loaded = self.builder.load(pointer)
        loaded.align = self.size
        return loaded

    def store(self, value: Any, pointer: Any) -> None:
        self.builder.store(value, pointer).align = self.size

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        """Of the lanes of a and b, counted through, these."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes))

    def repeated(self, number: Any) -> Any:
        undefined = ir.Constant(self.vector, ir.Undefined)
        one = self.builder.insert_element(undefined, number, _INT32(0))
        return self.shuffle(one, undefined, [0] * self.lanes)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        name = f"llvm.fma.v{self.lanes}f{8 * self.size}"
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [a, b, c])

    def prefetch(self, pointer: Any, *, to_write: bool) -> None:
        """What is written to soon, into the first level of the cache, or read soon, into the second."""
        kind = ir.FunctionType(ir.VoidType(), [_BYTES, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        write, near, data = _INT32(int(to_write)), _INT32(3 if to_write else 2), _INT32(1)
        self.builder.call(function, [self.builder.bitcast(pointer, _BYTES), write, near, data])


def _make_tile(rows: int, vectors: int, *, fetches: bool = False) -> Callable[..., None]:
    """tile(P, p, a, a_row, a_k, f, f_row, c, c_row, K) for R = rows, V = vectors.

    P holds the panel's rows one after the other, from element p on. a, f and c are the addresses of A[0, 0],
    F[0, 0] and C[0, 0]; a_row, a_k, f_row and c_row the distances between rows and between steps of k.
    F may be C; f_row = 0 adds one row to all. K ≥ 1. fetches: the panel's next K rows into the second-level
    cache meanwhile.
    """

    def plain(
        P: Array, p: int, a: int, a_row: int, a_k: int, f: int, f_row: int, c: int, c_row: int, K: int
    ) -> None:
        width = vectors * VECTOR_BYTES // P.itemsize
        for r in range(rows):
            total = np.zeros(width, P.dtype)
            for k in range(K):
                factor = _numbers_at(a + (r * a_row + k * a_k) * P.itemsize, 1, P.dtype)
                total += factor * P[p + k * width :][:width]
            first = _numbers_at(f + r * f_row * P.itemsize, width, P.dtype)
            _numbers_at(c + r * c_row * P.itemsize, width, P.dtype)[:] = first + total

    if _config.DISABLE_JIT:
        return plain

    def emit(
        e: _Emitter, p: Any, a: Any, a_row: Any, a_k: Any, f: Any, f_row: Any, c: Any, c_row: Any, K: Any
    ) -> None:
        builder, index = e.builder, e.index
        a_rows = [builder.gep(e.place(a), [builder.mul(a_row, index(r))]) for r in range(rows)]
        f_rows, c_rows = (
            [
                [e.pointer(e.place(first), builder.mul(row, index(r)), v * e.lanes) for v in range(vectors)]
                for r in range(rows)
            ]
            for first, row in ((f, f_row), (c, c_row))
        )
        for pointers in c_rows:
            for pointer in pointers:
                e.prefetch(pointer, to_write=True)
        entry, loop = builder.block, builder.append_basic_block("k")
        done = builder.append_basic_block("done")
        builder.branch(loop)

        builder.position_at_end(loop)
        k, row_of_a, row_of_panel = (builder.phi(index) for _ in range(3))
        sums = [[builder.phi(e.vector) for _ in range(vectors)] for _ in range(rows)]
        panel = [e.load(e.pointer(e.P, row_of_panel, v * e.lanes)) for v in range(vectors)]
        if fetches:
            behind = builder.add(row_of_panel, builder.mul(K, index(vectors * e.lanes)))
            for v in range(0, vectors, max(1, _LINE // VECTOR_BYTES)):
                e.prefetch(e.pointer(e.P, behind, v * e.lanes), to_write=False)
        for r in range(rows):
            factor = e.repeated(builder.load(builder.gep(a_rows[r], [row_of_a])))
            for v in range(vectors):
                total = e.fma(factor, panel[v], sums[r][v])
                sums[r][v].add_incoming(ir.Constant(e.vector, [0.0] * e.lanes), entry)
                sums[r][v].add_incoming(total, loop)
                sums[r][v] = total
        steps = (
            (k, index(0), index(1)),
            (row_of_a, index(0), a_k),
            (row_of_panel, p, index(vectors * e.lanes)),
        )
        for counter, first, step in steps:
            counter.add_incoming(first, entry)
            counter.add_incoming(builder.add(counter, step), loop)
        builder.cbranch(builder.icmp_signed("<", k.incomings[1][0], K), loop, done)

        builder.position_at_end(done)
        for r in range(rows):
            for v in range(vectors):
                e.store(builder.fadd(e.load(f_rows[r][v]), sums[r][v]), c_rows[r][v])

    @intrinsic
    def tile(
        typing: Any,
        P: Any,
        p: Any,
        a: Any,
        a_row: Any,
        a_k: Any,
        f: Any,
        f_row: Any,
        c: Any,
        c_row: Any,
        K: Any,
    ) -> Any:
        return types.void(P, *[types.intp] * 9), _code(emit)

    return tile


def _code(emit: Callable[..., None]) -> Callable[..., Any]:
    """The code generator of an intrinsic whose first argument is P."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit(_Emitter(context, builder, signature.args[0], args[0]), *args[1:])
        return context.get_dummy_value()

    return generate


def _make_copy() -> Callable[..., None]:
    """copy(P, p, p_row, b, b_row, K): a vector from each of K rows, to element p of P and on by p_row."""

    def plain(P: Array, p: int, p_row: int, b: int, b_row: int, K: int) -> None:
        lanes = VECTOR_BYTES // P.itemsize
        for k in range(K):
            P.reshape(-1)[p + k * p_row :][:lanes] = _numbers_at(b + k * b_row * P.itemsize, lanes, P.dtype)

    if _config.DISABLE_JIT:
        return plain

    def emit(e: _Emitter, p: Any, p_row: Any, b: Any, b_row: Any, K: Any) -> None:
        builder = e.builder
        with cgutils.for_range(builder, K) as loop:
            source = e.pointer(e.place(b), builder.mul(loop.index, b_row))
            e.store(e.load(source), e.pointer(e.P, builder.add(p, builder.mul(loop.index, p_row))))

    @intrinsic
    def copy(typing: Any, P: Any, p: Any, p_row: Any, b: Any, b_row: Any, K: Any) -> Any:
        return types.void(P, *[types.intp] * 5), _code(emit)

    return copy


def _make_transpose() -> Callable[..., None]:
    """transpose(P, p, p_row, b, b_column, K): a vector from each of K rows of a matrix whose columns lie
    together, b_column from one another. K is a multiple of the lanes.
    """

    def plain(P: Array, p: int, p_row: int, b: int, b_column: int, K: int) -> None:
        for c in range(VECTOR_BYTES // P.itemsize):
            column = _numbers_at(b + c * b_column * P.itemsize, K, P.dtype)
            for k in range(K):
                P[p + c + k * p_row] = column[k]

    if _config.DISABLE_JIT:
        return plain

    def emit(e: _Emitter, p: Any, p_row: Any, b: Any, b_column: Any, K: Any) -> None:
        builder, index, lanes = e.builder, e.index, e.lanes
        with cgutils.for_range(builder, builder.sdiv(K, index(lanes))) as loop:
            k = builder.mul(loop.index, index(lanes))
            block = [
                e.load(e.pointer(e.place(b), builder.add(k, builder.mul(b_column, index(c)))))
                for c in range(lanes)
            ]
            # element (c, k) goes to (k, c): one bit of the two numbers after the other is exchanged
            for bit in (1 << i for i in range(lanes.bit_length() - 1)):
                upper = [lane if lane & bit == 0 else lanes + lane - bit for lane in range(lanes)]
                lower = [lane + bit if lane & bit == 0 else lanes + lane for lane in range(lanes)]
                for c in range(lanes):
                    if c & bit == 0:
                        x, y = block[c], block[c + bit]
                        block[c], block[c + bit] = e.shuffle(x, y, upper), e.shuffle(x, y, lower)
            for q in range(lanes):
                row = builder.add(p, builder.mul(builder.add(k, index(q)), p_row))
                e.store(block[q], e.pointer(e.P, row))

    @intrinsic
    def transpose(typing: Any, P: Any, p: Any, p_row: Any, b: Any, b_column: Any, K: Any) -> Any:
        return types.void(P, *[types.intp] * 5), _code(emit)

    return transpose


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


def _make_tiles(largest: int, vectors: int) -> Callable[..., None]:
    """tiles(P, p, a, a_row, a_k, f, f_row, c, c_row, M, K, far): those of M rows of C below one another.

    far: whether the first one fetches what comes next.
    """
    tile_first = _make_tile(largest, vectors, fetches=True)
    tile_largest, tile_4, tile_2, tile_1 = (_make_tile(rows, vectors) for rows in (largest, 4, 2, 1))

    @numba.njit(**OPTIONS)
    def tiles(
        P: Array,
        p: int,
        a: int,
        a_row: int,
        a_k: int,
        f: int,
        f_row: int,
        c: int,
        c_row: int,
        M: int,
        K: int,
        far: bool,
    ) -> None:
        keep_apart()
        a_step, f_step, c_step = a_row * P.itemsize, f_row * P.itemsize, c_row * P.itemsize
        i = 0
        if far and largest <= M:
            tile_first(P, p, a, a_row, a_k, f, f_row, c, c_row, K)
            i = largest
        while i + largest <= M:
            tile_largest(P, p, a + i * a_step, a_row, a_k, f + i * f_step, f_row, c + i * c_step, c_row, K)
            i += largest
        while i + 4 <= M:
            tile_4(P, p, a + i * a_step, a_row, a_k, f + i * f_step, f_row, c + i * c_step, c_row, K)
            i += 4
        if i + 2 <= M:
            tile_2(P, p, a + i * a_step, a_row, a_k, f + i * f_step, f_row, c + i * c_step, c_row, K)
            i += 2
        if i < M:
            tile_1(P, p, a + i * a_step, a_row, a_k, f + i * f_step, f_row, c + i * c_step, c_row, K)

    return tiles


keep_apart = _make_keep_apart()
tiles_2, tiles_3 = _make_tiles(_ROWS, 2), _make_tiles(_ROWS, 3)
copy_vectors, transpose_vectors = _make_copy(), _make_transpose()
