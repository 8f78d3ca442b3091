"""How near the optimizer's GPU kernels come to the memory's speed, as ratios of rates measured in the same run.

    python -m lazytrain.kernels.bench_kernels [--only PART...] [--elements N] [--json FILE] [--tiny]

Prints, after a check of bits (a wrong kernel has no speed):

    copy, read      GB/s of a device copy (read + written) and of the fastest plain read
    update          each tile's GB/s and share of the copy rate, for 32- and 24-bit masters and for fp32 weights
    square sum      each setting's GB/s and share of the read rate, bf16 and fp32; of one tensor, and of several, each
                    a block of a 3B model, one after the other (replayed as one graph, so that launches don't count)
    streamed        states and weights in from pinned memory, updated, out again: share of the same copies alone

Rates are medians over repeats; arrays are many times larger than any cache. `--tiny` is a smoke test of this file: with
TRITON_INTERPRET=1 it runs on a CPU, and its numbers mean nothing.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazytrain.kernels.adamw import reference_adamw8bit_update_into
from lazytrain.kernels.adamw_triton import DEFAULT_TILE, Tile, adamw8bit_update_triton_into
from lazytrain.kernels.hyper import AdamWHyper
from lazytrain.kernels.master import split_master
from lazytrain.kernels.norm import reference_square_sum
from lazytrain.kernels.norm_triton import NUM_WARPS, sum_triton_into

GROUP = 128
HYPER = AdamWHyper(1e-4, 0.9, 0.999, 1e-8, 0.01, 1)
TILES = [
    *(Tile(groups, warps) for groups, warps in [(2, 1), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)]),
    *(Tile(groups, warps) for groups, warps in [(16, 4), (16, 8), (32, 8), (32, 16)]),
    *(Tile(groups, warps, limit) for groups, warps in [(4, 2), (8, 4), (16, 8)] for limit in (40, 48)),
]
SQUARES = [(2,), (4,), (8,)]
READS = [(block, warps) for block in (2048, 4096, 8192) for warps in (4, 8)]
BLOCK_ELEMENTS = 77_076_992  # parameters of a block of Qwen2.5-3B
PARTS = ("updates", "squares", "streamed")
KINDS = {"32-bit master": 16, "24-bit master": 8, "fp32 weights": 0}
STREAM_SLOTS, STREAM_CHUNKS = 3, 12


class State(NamedTuple):
    """Arguments of an update, on one device, and the bytes that it must move."""

    tensors: list[Tensor | None]
    grads: Tensor
    moved_bytes: float


@triton.jit
def read_kernel(x_in, sums, numel, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_in + offset, mask=offset < numel, other=0)
    tl.store(sums + tl.program_id(0), tl.max(x, axis=0))


def make_state(elements: int, lo_bits: int, device: str) -> State:
    """Return weights and moments as they are after a few steps, so that no kernel takes a path for zeros."""
    gen = torch.Generator(device).manual_seed(0)
    w = torch.randn(elements, generator=gen, device=device) * 0.02
    hi, lo = split_master(w, lo_bits + 16) if lo_bits else (w, None)
    codes = [torch.zeros(elements, dtype=dtype, device=device) for dtype in (torch.int8, torch.uint8)]
    scales = [torch.zeros(elements // GROUP, device=device) for _ in range(2)]
    grads = (torch.randn(elements, generator=gen, device=device) * 1e-3).bfloat16()
    moved = 2 * hi.element_size() + 2 * lo_bits / 8 + 2 * 2 + 2 * 8 / GROUP + grads.element_size()
    return State([hi, lo, codes[0], scales[0], codes[1], scales[1]], grads, moved * elements)


def update(state: State, tile: Tile = DEFAULT_TILE, step: int = 1, run: Callable[..., None] | None = None) -> None:
    run = run or (lambda *a, **k: adamw8bit_update_triton_into(*a, **k, tile=tile))
    hyper = HYPER._replace(step=step)
    run(*state.tensors, state.grads, rows=1, cols=state.grads.numel(), first_group=0, coef=0.5, hyper=hyper)


def check_bits(device: str) -> None:
    """Raise unless the kernels give the reference's bits."""
    for kind, lo_bits in KINDS.items():
        state = make_state(GROUP * 37, lo_bits, device)
        truth = State([None if x is None else x.cpu().clone() for x in state.tensors], state.grads.cpu(), 0.0)
        for step in (1, 2):
            update(state, step=step)
            update(truth, step=step, run=reference_adamw8bit_update_into)
        for a, b in zip(state.tensors, truth.tensors):
            if a is not None and b is not None and not torch.equal(a.cpu(), b):
                raise SystemExit(f"the update with {kind} has wrong bits on {device}: no speed is reported")
    for size, dtype in ((100, torch.bfloat16), (70_000, torch.bfloat16), (70_001, torch.float32)):
        x = torch.randn(size, device=device).to(dtype)
        out = torch.zeros((), dtype=torch.float64, device=device)
        sum_triton_into(None, x, None, out)
        if out.item() != reference_square_sum(x.cpu()).item():
            raise SystemExit(f"the square sum of {size} elements has wrong bits on {device}: no speed is reported")


def seconds_of(run: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median time of one call, after one that is not counted."""
    run()
    times = []
    if device != "cuda":
        for _ in range(repeats):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks))


class Report:
    """Prints a line for each measurement and keeps them for --json."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, setting: str, gb_s: float, share: float | None = None, **more: Any) -> None:
        self.rows.append({"what": what, "setting": setting, "gb_s": gb_s, "share": share, **more})
        extra = "".join(f"  {name} {value:.2f}" for name, value in more.items())
        print(f"{what:34s} {setting:34s} {gb_s:9.1f} GB/s" + (f"  {share:6.1%}" if share else "") + extra, flush=True)

    def sweep(
        self, what: str, settings: Sequence[Any], rate: Callable[[Any], float], bound: float, **per: float
    ) -> Any:
        """Measure each setting, report it, and return the fastest; one that fails is reported and passed over."""
        found = []
        for setting in settings:
            try:
                gb_s = rate(setting)
            except Exception as error:  # a tile that this compiler or GPU can't run must not end the table
                print(f"{what:34s} {setting!s:34s} failed: {type(error).__name__}: {error}"[:300], flush=True)
                continue
            found.append((gb_s, setting))
            more = {name: gb_s / moved for name, moved in per.items()}
            self.add(what, " ".join(map(str, setting)), gb_s, gb_s / bound, **more)
        if not found:
            raise SystemExit(f"{what}: no setting ran")
        best = max(found, key=lambda pair: pair[0])
        print(f"{what:34s} BEST {best[1]}: {best[0] / bound:.1%}", flush=True)
        return best[1]


def measure_bounds(report: Report, elements: int, device: str, repeats: int) -> tuple[float, float]:
    """Return (copy, read) in GB/s, of arrays as large as an update's."""
    x, y = torch.zeros(2, elements * 4, dtype=torch.uint8, device=device).view(torch.int32).random_()
    copy = 2 * x.nbytes / seconds_of(lambda: y.copy_(x), device, repeats) * 1e-9
    report.add("copy", "tensor.copy_", copy)
    best = 0.0
    for block, warps in READS:
        sums = torch.zeros(triton.cdiv(x.numel(), block), dtype=torch.int32, device=device)

        def read(sums: Tensor = sums, block: int = block, warps: int = warps) -> None:
            read_kernel[(len(sums),)](x, sums, x.numel(), BLOCK=block, num_warps=warps)

        best = max(best, x.nbytes / seconds_of(read, device, repeats) * 1e-9)
    report.add("read", "best of the plain read kernels", best)
    return copy, best


def measure_updates(report: Report, elements: int, device: str, repeats: int, copy: float, tiny: bool) -> None:
    tiles = TILES[:2] if tiny else TILES
    for kind, lo_bits in KINDS.items():
        state = make_state(elements, lo_bits, device)
        for step in (1, 2, 3):
            update(state, step=step)

        def rate(tile: Tile, state: State = state) -> float:
            return state.moved_bytes / seconds_of(lambda: update(state, tile, step=4), device, repeats) * 1e-9

        per_element = state.moved_bytes / elements
        best = report.sweep(f"update, {kind}", tiles, rate, copy, gparam_s=per_element)
        if kind == next(iter(KINDS)):  # the other kinds try the fastest few only
            ranked = sorted((r for r in report.rows if r["what"] == f"update, {kind}"), key=lambda r: -r["gb_s"])
            names = {r["setting"] for r in ranked[:4]}
            tiles = [t for t in tiles if " ".join(map(str, t)) in names or t in (best, DEFAULT_TILE)]


def measure_squares(report: Report, elements: int, device: str, repeats: int, read: float, tiny: bool) -> None:
    settings = [(NUM_WARPS,)] if tiny else SQUARES
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(elements, device=device).to(dtype)
        out = torch.zeros((), dtype=torch.float64, device=device)
        size = min(elements, BLOCK_ELEMENTS)
        blocks = x[: elements // size * size].split(size)
        for what, tensors in ((f"square sum, {dtype}", (x,)), (f"square sum of blocks, {dtype}", blocks)):

            def rate(setting: tuple[int], tensors: Sequence[Tensor] = tensors, out: Tensor = out) -> float:
                def run() -> None:
                    for tensor in tensors:
                        sum_triton_into(None, tensor, None, out, num_warps=setting[0])

                if len(tensors) > 1 and device == "cuda":
                    run()  # compiled before it is recorded
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        run()
                    run = graph.replay
                return sum(t.nbytes for t in tensors) / seconds_of(run, device, repeats) * 1e-9

            report.sweep(what, settings, rate, read)


def measure_stream(report: Report, elements: int, repeats: int) -> None:
    """Chunks of weights and states come in, are updated and go out, on three streams; compare with the copies alone."""
    chunk = elements // STREAM_CHUNKS // GROUP * GROUP
    example = make_state(chunk, 16, "cuda")
    sizes = [x.nbytes for x in example.tensors if x is not None]
    slab_bytes = sum(sizes)
    host = [torch.zeros(slab_bytes, dtype=torch.uint8).pin_memory() for _ in range(STREAM_CHUNKS)]
    slots = [torch.zeros(slab_bytes, dtype=torch.uint8, device="cuda") for _ in range(STREAM_SLOTS)]
    views = [
        [part.view(x.dtype) for part, x in zip(slot.split(sizes), example.tensors, strict=True) if x is not None]
        for slot in slots
    ]
    source = torch.cat([x.view(torch.uint8) for x in example.tensors if x is not None])
    for slab in host:
        slab.copy_(source)
    into, work, out = (torch.cuda.Stream() for _ in range(3))

    def run(compute: bool) -> None:
        """Fill a slot when its last occupant has left, update it when it is full, empty it when it is updated."""
        start = torch.cuda.Event()
        start.record()
        emptied: list[torch.cuda.Event] = [start] * STREAM_SLOTS
        for i, slab in enumerate(host):
            k = i % STREAM_SLOTS
            into.wait_event(emptied[k])
            with torch.cuda.stream(into):
                slots[k].copy_(slab, non_blocking=True)
            work.wait_stream(into)
            if compute:
                with torch.cuda.stream(work):
                    update(State(list(views[k]), example.grads, 0.0))
            out.wait_stream(work)
            with torch.cuda.stream(out):
                slab.copy_(slots[k], non_blocking=True)
                emptied[k] = torch.cuda.Event()
                emptied[k].record()
        torch.cuda.current_stream().wait_stream(out)

    moved = 2 * slab_bytes * STREAM_CHUNKS
    for name, size in (("host to device", 1), ("device to host", 0)):
        one = lambda size=size: slots[0].copy_(host[0], True) if size else host[0].copy_(slots[0], True)  # noqa: E731
        report.add("link", name, slab_bytes / seconds_of(one, "cuda", repeats) * 1e-9)
    bound_s = seconds_of(lambda: run(False), "cuda", max(3, repeats // 3))
    report.add("streamed, copies alone", f"{STREAM_CHUNKS} x {slab_bytes >> 20} MiB", moved / bound_s * 1e-9)
    streamed_s = seconds_of(lambda: run(True), "cuda", max(3, repeats // 3))
    rate = chunk * STREAM_CHUNKS / streamed_s * 1e-9
    report.add("streamed, with updates", "share of the copies alone", moved / streamed_s * 1e-9, bound_s / streamed_s)
    print(f"{'streamed':34s} {rate:.2f} Gparam/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="what is measured; default: all")
    parser.add_argument("--elements", type=int, default=3 * 2**27, help="parameters of one update (default 403M)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write all measurements there")
    parser.add_argument("--tiny", action="store_true", help="a smoke test: few elements and settings")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        raise SystemExit("bench_kernels needs a CUDA GPU; on a CPU, TRITON_INTERPRET=1 with --tiny tries the program")
    elements, repeats = (GROUP * 64, 1) if options.tiny else (options.elements // GROUP * GROUP, options.repeats)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, interpreted"
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}, {elements} elements, median of {repeats}")
    check_bits(device)
    report = Report()
    copy, read = measure_bounds(report, elements, device, repeats)
    if "updates" in options.only:
        measure_updates(report, elements, device, repeats, copy, options.tiny)
    if "squares" in options.only:
        measure_squares(report, elements, device, repeats, read, options.tiny)
    if "streamed" in options.only and device == "cuda":
        measure_stream(report, elements, repeats)
    if options.json:
        options.json.write_text(json.dumps(report.rows, indent=1))


if __name__ == "__main__":
    main()
