"""Compiles every kernel for a Hopper GPU, at the released model's sizes; run alone, without the interpreter."""

from __future__ import annotations

from typing import Any

import triton
from dm05_train.perf import fused_adamw, fused_muon
from dm05_train.perf.ops import common, fp8, gelu, heads, layer_norm, prefix, rms, symmetric, vision_heads
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
# What a parameter is, by its name; all others are BF16 tensors.
FLOATS = {"scale_out", "scale_next", "stats", "partial", "cos", "sin", "scalars", "source", "factors", "scales"}
NUMBERS = {"eps", "scale", "beta1", "beta2", "weight_decay", "alpha", "beta", "gamma"}
COUNTS = {"rows", "length", "heads", "window", "count", "row", "width", "s_batch", "s_head", "s_token"}
COUNTS |= {"chunks", "M", "K", "a_batch", "a_row", "a_column"}
TABLES = {"addresses", "sizes", "owner", "index"}
ADAMW = {"ALIGNED": True, "CHUNK": 8192}
SYMMETRIC = {"BLOCK": 128, "BLOCK_K": 64, "STAGES": 3, "num_warps": 8}

CASES: list[tuple[Any, dict[str, Any]]] = [
    (rms._add_rms_norm, {"N": 2560, "BLOCK": 4096}),
    (rms._add_rms_norm_backward, {"N": 2560, "BLOCK": 4096, "STAGES": 3}),
    (layer_norm._add_layer_norm, {"N": 1152, "BLOCK": 2048}),
    (layer_norm._add_layer_norm_backward, {"N": 1152, "BLOCK": 2048, "STAGES": 3}),
    (gelu._gated_gelu, {"N": 10240, "BLOCK": 1024}),
    (gelu._gated_gelu_backward, {"N": 10240, "BLOCK": 1024}),
    (gelu._gelu_forward, {"BLOCK": 1024}),
    (gelu._gelu_backward, {"N": 4304, "ROWS": 64, "BLOCK": 1024, "STAGES": 2}),
    (heads._split_heads, {"H": 8, "G": 4, "HALF": 128, "HEADS": 16, "LANES": 128}),
    (heads._split_heads_backward, {"H": 8, "G": 4, "HALF": 128, "HEADS": 16, "LANES": 128, "STAGES": 2}),
    (fp8._quantise_rows, {"factors": None, "N": 2560, "BLOCK": 4096, "num_warps": 8}),
    (fp8._quantise_rows, {"N": 2560, "BLOCK": 4096, "num_warps": 8}),
    (fp8._quantise_rows, {"factors": None, "N": 10240, "BLOCK": 16384, "num_warps": 8}),
    (fp8._transpose_bytes, {"ROWS": 64, "COLUMNS": 128}),
    (fp8._gated_gelu_fp8, {"N": 10240, "BLOCK": 2048, "num_warps": 8}),
    (fp8._gated_gelu_fp8_backward, {"N": 10240, "BLOCK": 2048, "num_warps": 8}),
    (prefix._softmax, {"length": 568, "ROWS": 4, "BLOCK": 1024}),
    (prefix._softmax_backward, {"length": 568, "ROWS": 4, "BLOCK": 1024}),
    (vision_heads._gather_heads, {"HEADS": 16, "DIM": 72, "ROWS": 32, "H": 16, "LANES": 128, "STAGES": 2}),
    (common._sum_rows, {"ROWS": 64, "BLOCK": 32}),
    (common._swap_heads, {"A": 8, "B": 568, "D": 256, "BLOCK": 16}),
    (fused_adamw._square_sum_kernel, {"ALIGNED": True, "CHUNK": 8192, "BLOCK": 1024}),
    (fused_adamw._adamw_kernel, ADAMW | {"COMPENSATED": False, "WALKS": False, "BLOCK": 1024}),
    (fused_adamw._adamw_kernel, ADAMW | {"COMPENSATED": True, "WALKS": False, "BLOCK": 1024}),
    (fused_adamw._adamw_kernel, ADAMW | {"COMPENSATED": True, "WALKS": True, "BLOCK": 8192, "num_warps": 32}),
    (symmetric._symmetric, SYMMETRIC | {"b": None, "other": None, "EVEN": True, "a_column": 1}),
    (symmetric._symmetric, SYMMETRIC | {"b": None, "other": None, "EVEN": True, "a_row": 1}),
    (symmetric._symmetric, SYMMETRIC | {"b": None, "factors": None, "EVEN": True, "a_column": 1}),
    (symmetric._symmetric, SYMMETRIC | {"other": None, "EVEN": True, "a_column": 1}),
    (symmetric._symmetric, SYMMETRIC | {"EVEN": False, "a_column": 1}),
]


def kind(name: str, constants: dict[str, Any]) -> str:
    """A parameter's type in Triton's words."""
    if name in constants:
        return "constexpr"
    if name in NUMBERS:
        return "fp32"
    if name in COUNTS:
        return "i32"
    if name in TABLES:
        return "*i64"
    if constants.get("COLUMNS") and name in ("source", "target"):
        return "*i8"
    if name == "q8":
        return "*fp8e4nv"
    if name == "codes":
        return "*i32"
    if name == "remainder_like":
        return "*i16" if constants["COMPENSATED"] else "*bf16"
    return "*fp32" if name in FLOATS else "*bf16"


def main() -> None:
    assert fused_muon.CHUNK == fused_adamw.CHUNK
    for function, given in CASES:
        constants = {name: value for name, value in given.items() if name != "num_warps"}
        signature = {name: kind(name, constants) for name in function.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, k in enumerate(signature.values()) if k[0] in "*i"}
        source = ASTSource(function, signature=signature, constexprs=constants, attrs=aligned)
        built = triton.compile(source, target=HOPPER, options={"num_warps": given.get("num_warps", 4)})
        assert ".local" not in built.asm["ptx"], f"{function.__name__} spills"
        print(function.__name__)


if __name__ == "__main__":
    main()
