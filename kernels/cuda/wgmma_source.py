"""The C++ of one instruction of Hopper's tensor cores, which names each of its operands."""

from __future__ import annotations

import torch


def kind_of(dtype: torch.dtype) -> str:
    """Return PTX's name of a type of 16 bits."""
    return "f16" if dtype == torch.float16 else "bf16"


def wgmma_source(
    columns: int,
    kind: str,
    inputs: int,
    *,
    registers: bool = False,
    by_input: bool = False,
) -> str:
    """Return a function that begins a product of 64 x `inputs` and `inputs` x `columns` numbers.

    kind: PTX's name of the numbers' type. Their sums are in float32, `columns / 2` in each thread.
    registers: whether the first operand is in four registers of each thread, not in shared memory.
    by_input: whether a row of the second operand has all columns of one input, not all inputs of
    one column; for numbers of 16 bits.
    """
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    places = ", ".join(f'"+f"(sum[{i}])' for i in range(count))
    shape = f"m64n{columns}k{inputs}.f32.{kind}.{kind}"
    words = 4 if registers else 1
    first = ", ".join(f"%{count + i}" for i in range(words))
    first = f"{{{first}}}" if registers else first
    given = ", ".join(f'"r"(x[{i}])' for i in range(words)) if registers else '"l"(x)'
    second, more = f"%{count + words}", f"%{count + words + 1}"
    # Operands of 16 bits in shared memory may lie transposed.
    transposed = "" if kind in ("e4m3", "e5m2") else ", 0" * (1 - registers) + f", {int(by_input)}"
    return f"""#pragma once
// Begins sum = x w, or sum += x w if `more`.
__device__ __forceinline__ void multiply(
    float (&sum)[{count}], {"const u32* x" if registers else "u64 x"}, u64 w, int more) {{
    asm volatile(
        "{{ .reg .pred p; setp.ne.b32 p, {more}, 0;"
        " wgmma.mma_async.sync.aligned.{shape} {{{sums}}},"
        " {first}, {second}, p, 1, 1{transposed}; }}"
        : {places} : {given}, "l"(w), "r"(more));
}}
"""
