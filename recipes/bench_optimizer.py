"""What the optimizer costs on the host: bytes a parameter and parameters a second.

    python -m lazytrain.recipes.bench_optimizer speed [--threads N] [--elements N]
    python -m lazytrain.recipes.bench_optimizer memory [--layers N] [--master-bits 24]

`speed` updates one large tensor (out of cache) with 8-bit states on CPU threads, in turn with torch's fused fp32 AdamW
on as many parameters, and prints Gparam/s and the ratio: the median over rounds of neighbours in time, so that other
programs on the machine slow both. The same for each second that a core really worked on it, which other programs change
less still.

`memory` fills weights and states of Llama-3.2-1B's shapes (1.24B parameters), updates all of them once, and prints the
growth of the process's resident memory, as the system counts it, for each parameter. It takes 7.6 GiB.
"""

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from lazytrain.base import ParamSpec
from lazytrain.layout import UnitLayout
from lazytrain.optimizer import adamw8bit, init_unit_into, update_unit_into

HIDDEN, FEED_FORWARD, KV, LAYERS, VOCABULARY = 2048, 8192, 512, 16, 128256
LAYER = {
    "q": (HIDDEN, HIDDEN),
    "k": (KV, HIDDEN),
    "v": (KV, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate": (FEED_FORWARD, HIDDEN),
    "up": (FEED_FORWARD, HIDDEN),
    "down": (HIDDEN, FEED_FORWARD),
    "norm_1": (HIDDEN,),
    "norm_2": (HIDDEN,),
}


def make_layout(shapes: dict[str, tuple[int, ...]], master_bits: int) -> UnitLayout:
    specs = {name: ParamSpec(full_name=name, shape=shape) for name, shape in shapes.items()}
    return adamw8bit(1e-4, master_bits=master_bits).settings.layout(specs, torch.bfloat16)


def make_slabs(layout: UnitLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a unit's weights and states; every page is written."""
    weights = torch.empty(layout.numel, dtype=torch.bfloat16)
    state = torch.empty(layout.state_bytes, dtype=torch.uint8)
    shapes = {place.full_name: place.shape for place in layout.places}
    init_unit_into(layout, lambda name: torch.full(shapes[name], 0.0123), weights, state)
    return weights, state


def resident_bytes() -> int:
    """Return this process's resident memory, from the system, after free heap pages went back to it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only; it keeps what temporaries left otherwise
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_memory(num_layers: int, vocabulary: int, master_bits: int) -> float:
    """Print and return the bytes of resident memory that a parameter takes with its states."""
    hyper = adamw8bit(1e-4).settings.hyper(1e-4, 1)
    units = [make_layout(LAYER, master_bits)] * num_layers
    units.append(make_layout({"embed": (vocabulary, HIDDEN), "norm": (HIDDEN,)}, master_bits))
    grads = torch.full((max(u.numel for u in units),), 1e-3, dtype=torch.bfloat16)
    warm_up = make_layout({"w": (64, 128), "b": (64,)}, master_bits)  # builds and loads the C++ operator
    update_unit_into(warm_up, *make_slabs(warm_up), grads[: warm_up.numel], coef=1.0, hyper=hyper)
    before = resident_bytes()
    slabs = [make_slabs(layout) for layout in units]
    for layout, (weights, state) in zip(units, slabs):
        update_unit_into(layout, weights, state, grads[: layout.numel], coef=1.0, hyper=hyper)
    num_params = sum(place.numel for layout in units for place in layout.places)
    grown = resident_bytes() - before
    print(
        f"{num_params / 1e9:.3f}B parameters, {master_bits}-bit master: resident memory grew by "
        f"{grown / 2**30:.2f} GiB, {grown / num_params:.3f} bytes a parameter (weights, masters and states)"
    )
    return grown / num_params


def measure_speed(elements: int, threads: int, rounds: int) -> dict[str, float]:
    """Print and return Gparam/s of each update, and for ours the ratio to torch's."""
    torch.set_num_threads(threads)
    rows = elements // 4096
    hyper = adamw8bit(1e-4).settings.hyper(1e-4, 3)
    grads = torch.randn(rows * 4096).mul_(1e-3)
    parameter = torch.nn.Parameter(torch.randn(rows * 4096).mul_(0.02))
    parameter.grad = grads
    fused = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
    half = grads.bfloat16()
    runs: dict[str, Callable[[], object]] = {"torch fused AdamW, fp32 states": fused.step}
    for bits in (32, 24):
        layout = make_layout({"w": (rows, 4096)}, bits)
        weights, state = make_slabs(layout)
        runs[f"8-bit states, {bits}-bit master"] = partial(
            update_unit_into, layout, weights, state, half, coef=0.5, hyper=hyper
        )
    rates: dict[str, list[float]] = {name: [] for name in runs}
    per_cpu_s: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            begin, cpu_begin = time.perf_counter(), time.process_time()
            run()
            if i:  # the first round builds, touches pages and starts threads
                rates[name].append(rows * 4096 / (time.perf_counter() - begin) * 1e-9)
                per_cpu_s[name].append(rows * 4096 / (time.process_time() - cpu_begin) * 1e-9)
    theirs, *ours = rates
    found = {}
    print(f"{rows * 4096 / 1e6:.0f}M parameters, {threads} threads, {rounds} rounds, torch {torch.__version__}")
    for name in (theirs, *ours):
        ratio = statistics.median(a / b for a, b in zip(rates[name], rates[theirs]))
        found[name] = ratio
        best, middle = max(rates[name]), statistics.median(rates[name])
        per_core = statistics.median(per_cpu_s[name])
        of_theirs = per_core / statistics.median(per_cpu_s[theirs])
        print(
            f"{name:31s} median {middle:6.2f} best {best:6.2f} Gparam/s, {ratio:5.2f}x torch's; a core's second: "
            f"{per_core:5.2f} Gparam, {of_theirs:5.2f}x"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    speed = commands.add_parser("speed")
    speed.add_argument("--elements", type=int, default=2**26)
    speed.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    speed.add_argument("--rounds", type=int, default=15)
    memory = commands.add_parser("memory")
    memory.add_argument("--layers", type=int, default=LAYERS)
    memory.add_argument("--vocabulary", type=int, default=VOCABULARY)
    memory.add_argument("--master-bits", type=int, choices=(32, 24), default=32)
    options = parser.parse_args()
    if options.command == "speed":
        os.environ.pop("LAZYTRAIN_THREADS", None)  # else it would win over --threads
        measure_speed(options.elements, options.threads, options.rounds)
    else:
        measure_memory(options.layers, options.vocabulary, options.master_bits)


if __name__ == "__main__":
    main()
