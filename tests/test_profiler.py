"""What the profile hands to the planner: real sizes, times of this machine, the machine measured once."""

import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toys import make_batch, make_model

from lazytrain import adamw8bit, links, unit_costs
from lazytrain.gradients import add_microbatch
from lazytrain.planning import choose_plan, solve_problem
from lazytrain.profiler import Profiler
from lazytrain.programs import ProgramCache
from lazytrain.slabs import allocate_slab
from lazytrain.timer import Timer

GIB = 1 << 30


def make_profiler(**changes: object) -> Profiler:
    profiler = Profiler(
        model=make_model(4),
        settings=adamw8bit(1e-3).settings,
        batch=make_batch(0, rows=8),
        device=torch.device("cpu"),
        dtype=torch.float32,
        programs=ProgramCache(),
        limits={"device": GIB, "host": 2 * GIB},
        floor_s=0.002,
    )
    return replace(profiler, **changes)


def test_sizes_are_those_of_the_layouts_and_curves() -> None:
    profiler = make_profiler()
    problem = profiler.problem(2)
    layout = profiler.settings.layout(profiler.model.blocks[0].params, torch.float32)
    assert [block.name for block in problem.blocks] == [unit.name for unit in profiler.model.blocks]
    for block in problem.blocks:
        assert (block.weight_bytes, block.state_bytes) == (layout.weight_bytes, layout.state_bytes)
        kept = [point.residual_bytes for point in block.points]
        assert kept[0] == 0
        assert kept == sorted(set(kept))
        assert all(point.forward_ms > 0 and point.backward_ms > 0 for point in block.points)
        assert block.cpu_update_ms > 0
    assert problem.tied
    assert problem.head.num_params == sum(s.numel for n, s in profiler.model.head.params.items() if n != "out")


def test_costs_are_per_chunk() -> None:
    profiler = make_profiler()
    whole, halves = profiler.problem(1), profiler.problem(2)
    assert whole.blocks[0].boundary_bytes == 2 * halves.blocks[0].boundary_bytes
    assert whole.blocks[0].points[-1].residual_bytes == 2 * halves.blocks[0].points[-1].residual_bytes


def test_the_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = links.measure_machine
    monkeypatch.setattr(
        "lazytrain.profiler.measure_machine", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs)
    )
    profiler = make_profiler()
    assert profiler.problem(1).hardware is profiler.problem(2).hardware
    assert calls == [1]


def test_what_may_not_be_updated_on_one_side_is_not() -> None:
    problem = make_profiler(allow_device_update=False).problem(1)
    planned = solve_problem(problem)
    assert planned is not None
    assert {unit.update for unit in planned.plan.blocks} == {"cpu"}


def test_a_link_that_is_faster_without_cpu_updates_is_a_variant_of_its_own() -> None:
    problem = make_profiler().problem(1)
    assert problem.without_cpu_updates() is None, "on a CPU both share the cores"
    faster = replace(problem, hardware=replace(problem.hardware, h2d_gbs=10.0, d2h_gbs=20.0, quiet_link_gbs=15.0))
    variant = faster.without_cpu_updates()
    assert variant is not None
    assert not variant.allow_cpu_update
    assert (variant.hardware.h2d_gbs, variant.hardware.d2h_gbs) == (15.0, 20.0)
    assert variant.without_cpu_updates() is None
    planned = solve_problem(faster, variant)
    assert planned is not None
    others = [solve_problem(faster), solve_problem(variant)]
    steps = [other.plan.predicted.step_ms for other in others if other is not None and other.plan.predicted is not None]
    assert planned.plan.predicted is not None
    assert planned.plan.predicted.step_ms == min(steps)


def test_forward_beside_updates_on_the_cpu_is_slower_by_what_was_measured() -> None:
    problem = make_profiler().problem(1)
    point = replace(problem.blocks[0].points[0], forward_ms=2.0)
    assert unit_costs._slow_down(point, 2.05) is point, "noise"
    slow = unit_costs._slow_down(point, 3.0)
    assert (slow.forward_ms, slow.quiet_forward_ms) == (3.0, 2.0)
    blocks = tuple(replace(block, points=(slow, *block.points[1:])) for block in problem.blocks)
    hardware = replace(problem.hardware, h2d_gbs=10.0, quiet_link_gbs=15.0)
    variant = replace(problem, hardware=hardware, blocks=blocks).without_cpu_updates()
    assert variant is not None
    assert [point.forward_ms for point in variant.blocks[0].points[:2]] == [2.0, blocks[0].points[1].forward_ms]
    same = replace(hardware, quiet_link_gbs=10.0)
    quick = replace(problem, hardware=same, blocks=blocks).without_cpu_updates()
    assert quick is not None, "launches alone are reason enough"
    assert (quick.hardware.h2d_gbs, quick.blocks[0].points[0].forward_ms) == (10.0, 2.0)
    assert replace(problem, hardware=same).without_cpu_updates() is None


def test_updates_beside_a_measurement_end_with_it() -> None:
    profiler = make_profiler()
    layout, before = profiler.settings.layout(profiler.model.blocks[0].params, torch.float32), threading.active_count()
    with unit_costs._updates_on_cpu(layout, profiler.settings, 2) as times_ms:
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert min(times_ms) > 0
    with pytest.raises(KeyboardInterrupt), unit_costs._updates_on_cpu(layout, profiler.settings, 1):
        raise KeyboardInterrupt
    assert threading.active_count() == before


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_backward_includes_the_sum_of_grads(num_microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    squares: list[bool] = []

    def add(total: torch.Tensor | None, flat: torch.Tensor, square: torch.Tensor | None) -> torch.Tensor:
        squares.append(square is not None)
        return add_microbatch(total, flat, square)

    monkeypatch.setattr(unit_costs, "add_microbatch", add)
    profiler = make_profiler()
    layout = profiler.settings.layout(profiler.model.blocks[0].params, torch.float32)
    timer: Any = SimpleNamespace(device=torch.device("cpu"), median_ms=lambda work: work() or 10.0)
    assert unit_costs._sum_ms(layout, num_microbatches, timer) == 10.0 / num_microbatches
    assert squares == [False] * (num_microbatches - 1) + [True]
    monkeypatch.setattr(unit_costs, "_sum_ms", lambda *_: 1e6)
    problem = profiler.problem(num_microbatches)
    assert all(point.backward_ms > 1e6 > point.forward_ms for point in problem.blocks[0].points)


def test_compiling_is_a_phase_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    programs = ProgramCache(compile=True, budgets=())
    # The compiler itself is tested elsewhere: here it only has to be asked for.
    monkeypatch.setattr("lazytrain.compilation.torch.compile", lambda function, **options: function)
    planned = choose_plan(make_profiler(programs=programs), num_microbatches=1, report=lines.append)
    assert planned.plan.num_microbatches == 1
    assert [line.split(" in ")[0] for line in lines] == ["compiled 1 residual points of 'block'"]


def test_median_time_is_that_of_one_call() -> None:
    timer = Timer(device=torch.device("cpu"), floor_s=0.05)
    x = torch.randn(256, 256)
    once, twice = timer.median_ms(lambda: x @ x), timer.median_ms(lambda: (x @ x, x @ x))
    assert 0 < once < twice


@pytest.mark.gpu
def test_the_mix_of_copies_and_updates_ends_also_when_an_update_fails() -> None:
    device = torch.device("cuda")
    host, back = (allocate_slab(8 << 20, pin=True, name=name).split(4 << 20) for name in ("there", "back"))
    rates = links._measure_mix(device, host, back, lambda: time.sleep(0.01))
    assert min(rates.h2d_gbs, rates.d2h_gbs, rates.updates_s) > 0
    before = threading.active_count()

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        links._measure_mix(device, host, back, fail)
    assert threading.active_count() == before


def test_updates_on_the_cpu_go_from_block_to_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that an update comes back to at once lies in the processor's cache, which a step's never does."""
    updated = list[int]()
    monkeypatch.setattr(unit_costs, "update_unit_into", lambda layout, weights, *_, **__: updated.append(id(weights)))

    def count(num_units: int, host_units: int) -> int:
        """Return over how many units' memory updates go."""
        profiler = make_profiler()
        block = profiler.model.blocks[0]
        layout = profiler.settings.layout(block.params, torch.float32)
        unit_bytes = 2 * layout.weight_bytes + layout.state_bytes
        profiler = replace(profiler, limits={"device": GIB, "host": 16 * host_units * unit_bytes})
        monkeypatch.setattr("lazytrain.profiler.UPDATED_BYTES", num_units * unit_bytes)
        updated.clear()
        update = unit_costs.make_update(layout, profiler.settings, torch.device("cpu"), profiler._count_alike(block))
        for _ in range(12):
            update()
        num_updated = len(set(updated))
        assert updated == (updated[:num_updated] * 12)[:12], "in turns"
        return num_updated

    assert count(100, 100) == 4, "no more than the model has"
    assert count(3, 100) == 3, "no more than needed"
    assert count(100, 2) == 2, "no more than a part of the host's memory"
    assert count(0, 100) == 1
    profiler = make_profiler()
    assert [profiler._count_alike(unit) for unit in (profiler.model.embed, profiler.model.head)] == [1, 1]


def test_on_a_cpu_both_kinds_of_updates_take_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the same code over the same memory."""
    seen = list[int]()
    monkeypatch.setattr(
        unit_costs, "_update_ms", lambda layout, settings, timer, num_alike: seen.append(num_alike) or 1.0
    )
    make_profiler().problem(1)
    assert seen == [1, 1, 4, 4, 1, 1], "embed, block, head"


def test_copies_are_timed_over_more_than_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[int, int, int]]()

    def note(device: torch.device, host: Any, back: Any, *_: object, **__: object) -> links.Rates:
        for pieces in (host, back):
            begins = {piece.data_ptr() for piece in pieces}
            seen.append((len(pieces), len(begins), pieces[0].numel()))
        return links.Rates(10.0, 20.0, 5.0)

    monkeypatch.setattr(links, "_measure_mix", note)
    monkeypatch.setattr(links, "ROTATED_BYTES", 64 << 20)
    may_pin = 1 << 40

    def allocate(size: int, pin: bool, name: str) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(links, "allocate_slab", allocate)
    monkeypatch.setattr(links, "is_slab_pinned", lambda slab: slab.numel() <= may_pin)
    monkeypatch.setattr(links, "_matmul_tflops", lambda *_: 1.0)
    monkeypatch.setattr(links, "_device_memory_gbs", lambda *_: 1.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch, "empty", lambda size, **_: torch.zeros(size, dtype=torch.uint8))
    timer: Any = SimpleNamespace(median_ms=lambda work: 1.0)

    monkeypatch.setattr(links, "_time_alone_s", lambda _: 0.1)

    def measure(host_bytes: int) -> float:
        seen.clear()
        hardware = links.measure_machine(
            torch.device("cuda"),
            8 << 20,
            {"device": GIB, "host": host_bytes},
            update_gparams_s=(1.0, 1.0),
            cpu_update=lambda: None,
            spill_dir=None,
            timer=timer,
        )
        return hardware.dram_gbs

    assert measure(16 * GIB) == 60.0, "30 GB copied cost half a second of updates"
    assert set(seen) == {(8, 8, 8 << 20)}
    measure(512 << 20)
    assert set(seen) == {(4, 4, 8 << 20)}, "a sixteenth of a small host at most"
    may_pin = 8 << 20
    measure(16 * GIB)
    assert set(seen) == {(1, 1, 8 << 20)}, "what the system lets be pinned"


def test_updates_are_not_counted_as_lost_while_the_last_copies_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody updates then: 10 ms each are 100 updates a second, though each direction copies on for 0.2 s."""
    clock, stopped, drained = [0.0], threading.Event(), threading.Lock()

    class Stream:
        def synchronize(self) -> None:
            stopped.wait()
            with drained:
                clock[0] += 0.2

    def update() -> None:
        clock[0] += 0.01

    monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(links, "threading", SimpleNamespace(Event=lambda: stopped))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    pieces = [torch.zeros(16, dtype=torch.uint8)] * 2
    rates = links._measure_mix(torch.device("cpu"), pieces, pieces, update)
    assert rates.updates_s == pytest.approx(100.0)


@pytest.mark.gpu
def test_what_cublas_keeps_is_measured_each_time() -> None:
    device = torch.device("cuda")
    first, second = links.measure_library_bytes(device), links.measure_library_bytes(device)
    assert 1 << 20 <= first == second


def test_gpu_is_timed_when_its_clocks_have_fallen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has computed for long is slower than one that has just begun: its time is that of a long run."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    start_s = time.perf_counter()

    def work() -> None:
        time.sleep(0.0005 if time.perf_counter() - start_s < 0.02 else 0.002)

    assert Timer(device=torch.device("cuda"), floor_s=0.02).median_ms(work) > 1.9


def test_cpu_is_timed_without_a_warm_up() -> None:
    calls = list[float]()
    timer = Timer(device=torch.device("cpu"), floor_s=1e-6)
    timer.warm_up(lambda: calls.append(1.0))
    assert calls == []
    timer.median_ms(lambda: calls.append(1.0))
    assert len(calls) == 5  # once to load, once to count the calls of a round, three rounds of one
