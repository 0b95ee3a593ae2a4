"""ggml's number formats: names, blocks, and where they can hold NaN or infinite values. Pure.

Sources: llama.cpp b11434, ggml/include/ggml.h (`enum ggml_type`) and ggml/src/ggml-common.h (the sizes of the blocks).
"""

from __future__ import annotations

from typing import NamedTuple


class GgmlType(NamedTuple):
    """One type: its name, the number of values in a block, and the size of a block in bytes."""

    name: str
    block_values: int
    block_bytes: int


# ggml removed the types 4, 5, 31-33 and 36-38.
ALL_TYPES = {
    0: GgmlType("f32", 1, 4),
    1: GgmlType("f16", 1, 2),
    2: GgmlType("q4_0", 32, 18),
    3: GgmlType("q4_1", 32, 20),
    6: GgmlType("q5_0", 32, 22),
    7: GgmlType("q5_1", 32, 24),
    8: GgmlType("q8_0", 32, 34),
    9: GgmlType("q8_1", 32, 36),
    10: GgmlType("q2_K", 256, 84),
    11: GgmlType("q3_K", 256, 110),
    12: GgmlType("q4_K", 256, 144),
    13: GgmlType("q5_K", 256, 176),
    14: GgmlType("q6_K", 256, 210),
    15: GgmlType("q8_K", 256, 292),
    16: GgmlType("iq2_xxs", 256, 66),
    17: GgmlType("iq2_xs", 256, 74),
    18: GgmlType("iq3_xxs", 256, 98),
    19: GgmlType("iq1_s", 256, 50),
    20: GgmlType("iq4_nl", 32, 18),
    21: GgmlType("iq3_s", 256, 110),
    22: GgmlType("iq2_s", 256, 82),
    23: GgmlType("iq4_xs", 256, 136),
    24: GgmlType("i8", 1, 1),
    25: GgmlType("i16", 1, 2),
    26: GgmlType("i32", 1, 4),
    27: GgmlType("i64", 1, 8),
    28: GgmlType("f64", 1, 8),
    29: GgmlType("iq1_m", 256, 56),
    30: GgmlType("bf16", 1, 2),
    34: GgmlType("tq1_0", 256, 54),
    35: GgmlType("tq2_0", 256, 66),
    39: GgmlType("mxfp4", 32, 17),
    40: GgmlType("nvfp4", 64, 36),
    41: GgmlType("q1_0", 128, 18),
    42: GgmlType("q2_0", 64, 18),
}

# The types that llama.cpp accepts for a KV cache (common/arg.cpp, `kv_cache_types`).
GGML_TYPES = {number: ALL_TYPES[number] for number in (0, 1, 2, 3, 6, 7, 8, 20, 30)}

# Float types: numpy's unsigned word of the same size, and the bits of the exponent. If all of them are set, the value is NaN or
# infinite.
FLOAT_EXPONENTS = {0: ("<u4", 0x7F800000), 1: ("<u2", 0x7C00), 30: ("<u2", 0x7F80)}

# Quantised types of a KV cache: the number of f16 words at the start of each block (scale, and minimum if there is one).
SCALE_WORDS = {2: 1, 3: 2, 6: 1, 7: 2, 8: 1, 20: 1}


def type_name(ggml_type: int) -> str:
    """Ggml's name of a type; for an unknown type, its number."""
    return ALL_TYPES[ggml_type].name if ggml_type in ALL_TYPES else f"ggml type {ggml_type}"


def is_quantised(ggml_type: int) -> bool:
    """Whether a value of the type can only be read together with its block. True for an unknown type."""
    return ggml_type not in ALL_TYPES or ALL_TYPES[ggml_type].block_values > 1
