"""What the Triton compiler makes of the kernels, without a GPU: no contraction, no approximate division or root.

The square sum must read 16 bytes at a time without a mask, and must not fold all lanes in every thread.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lazytrain.kernels import adamw_triton, codec_triton, cross_entropy_triton, norm_triton

POINTERS = dict(
    weights="*i16", lo="*i8", m_q="*i8", m_scale="*fp32", v_q="*u8", v_scale="*fp32", grads="*i16", m_io="*fp32",
    v_io="*fp32", coef_in="*fp32", m_in="*fp32", v_in="*fp32", m_out="*fp32", v_out="*fp32", x_in="*i16",
    y_in="*fp32", values="*fp64", out="*fp64",
    logits="*bf16", targets="*i64", losses="*fp32",
)
INTS = dict.fromkeys(
    "num_groups groups_per_row cols numel dither num_values row_stride num_cols ignore_index".split(), "i32"
)
TILES = dict(BLOCK_GROUPS=8, RAGGED=True)
UPDATE = dict(**TILES, LO_BITS=8, GRADS_BF16=True, COEF_ON_DEVICE=True)
SUMS = dict(LANES=1024, ROWS=64, X=1, Y=0, OUT=0, SQUARE=True)
# The compiler makes an argument of 1 a constant, where it may specialise.
CASES = [
    (adamw_triton.adamw8bit_kernel, UPDATE),
    (adamw_triton.adamw8bit_kernel, dict(UPDATE, RAGGED=False, LO_BITS=16, COEF_ON_DEVICE=False)),
    (adamw_triton.adamw8bit_kernel, dict(UPDATE, cols=1)),
    (adamw_triton.adamw_kernel, UPDATE),
    (adamw_triton.adamw_kernel, dict(UPDATE, numel=1)),
    (codec_triton.quantize_kernel, TILES),
    (codec_triton.dequantize_kernel, TILES),
    (norm_triton.sum_tiles_kernel, dict(SUMS, numel=1)),
    (norm_triton.sum_tiles_kernel, dict(SUMS, Y=2, OUT=2)),
    (norm_triton.sum_tiles_kernel, dict(SUMS, numel=2**20)),
    (norm_triton.square_total_kernel, dict(LANES=1024)),
    (cross_entropy_triton.cross_entropy_kernel, dict(BLOCK=4096)),
    (cross_entropy_triton.cross_entropy_kernel, dict(BLOCK=1, num_cols=1, row_stride=1)),
]
found = []
for kernel, constants in CASES:
    types = {name: POINTERS.get(name) or INTS.get(name, "fp32") for name in kernel.arg_names}
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if types[name][0] == "*"},
    )
    num_warps = norm_triton.NUM_WARPS if kernel is norm_triton.sum_tiles_kernel else 4
    options = dict(enable_fp_fusion=False, num_warps=num_warps)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    names = sorted(set(re.findall(r"\\b(?:fma|mad|div|sqrt|rcp|rsqrt|add|sub|mul)\\.[a-z.]*f(?:32|64)", ptx)))
    reads = len(re.findall(r"^\\s*ld\\.global\\.v4\\.b32", ptx, re.MULTILINE))
    found.append((kernel.__name__, names, reads, ptx.count("add.rn.f64")))
json.dump(found, sys.stdout)
"""
EXACT = {f"{name}.rn.{kind}" for name in ("add", "sub", "mul", "div", "sqrt") for kind in ("f32", "f64")}


@pytest.mark.slow
def test_compiled_kernels_round_each_operation_once(tmp_path: Path) -> None:
    """Compiles for compute capability 9.0. An operation without `.rn` may be contracted or approximated later."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = tmp_path / "compile_kernels.py"
    script.write_text(PROGRAM)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert len(results) == 13
    for name, operations, _, fp64_adds in results:
        if name != "cross_entropy_kernel":  # it promises a tolerance, not bits
            assert set(operations) <= EXACT, name
            assert operations, name
        assert fp64_adds < 128, name  # 1023 where every thread folds all lanes
    wide = [reads for name, _, reads, _ in results if name == "sum_tiles_kernel"]
    assert wide[0] == 0  # a tensor of one element has no whole tile
    assert min(wide[1:]) >= 8
