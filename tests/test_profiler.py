"""What the profile hands to the planner: real sizes, times of this machine, the machine measured once."""

import threading
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
from lazytrain.solver.problem import Hardware, ResidualPoint
from lazytrain.step_load import LoadedRates, StepLoad

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


def test_updates_beside_a_measurement_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler, updated = make_profiler(), threading.Event()
    layout, before = profiler.settings.layout(profiler.model.blocks[0].params, torch.float32), threading.active_count()
    real = unit_costs.update_unit_into
    monkeypatch.setattr(unit_costs, "update_unit_into", lambda *args, **kwargs: updated.set() or real(*args, **kwargs))
    with unit_costs._updates_on_cpu(layout, profiler.settings, 2):
        assert threading.active_count() == before + 1
        updated.clear()
        assert updated.wait(60.0)
    assert threading.active_count() == before
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
    point = ResidualPoint(residual_bytes=0, forward_ms=1.0, backward_ms=2.0, workspace_bytes=0)
    monkeypatch.setattr(unit_costs, "_profile_points", lambda *_: [point])
    problem = profiler.problem(num_microbatches)
    assert all(point.backward_ms > 1e6 > point.forward_ms for point in problem.blocks[0].points)
    assert problem.blocks[0].points == (replace(point, backward_ms=1e6 + 2.0),)


def test_each_point_gets_its_own_times() -> None:
    """Forward alone and forward with backward are timed in one go; backward is the difference, never negative."""
    asked = list[str]()

    class FakeProgram:
        points = (SimpleNamespace(residual_bytes=0), SimpleNamespace(residual_bytes=512))

        def forward_keep(self, index: int, *_: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            asked.append(f"f{index}")
            return torch.zeros(1), (torch.zeros(128),) * index

        def backward(self, index: int, *_: Any) -> None:
            asked.append(f"b{index}")

    def medians_ms(works: list[Any]) -> list[float]:
        for work in works:
            work()
        return [3.0, 10.0, 4.0, 3.5]

    timer: Any = SimpleNamespace(medians_ms=medians_ms, extra_bytes=lambda work: None)
    program: Any = FakeProgram()
    points = unit_costs._profile_points(program, {}, torch.zeros(1), {}, torch.zeros(1), timer)
    assert asked[:6] == ["f0", "f0", "b0", "f1", "f1", "b1"]
    assert [(p.forward_ms, p.backward_ms, p.residual_bytes) for p in points] == [(3.0, 7.0, 0), (4.0, 0.0, 512)]


def test_compiling_is_a_phase_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    programs = ProgramCache(compile=True, budgets=())
    # The compiler itself is tested elsewhere: here it only has to be asked for.
    monkeypatch.setattr("lazytrain.compilation.torch.compile", lambda function, **options: function)
    planned = choose_plan(make_profiler(programs=programs), num_microbatches=1, report=lines.append)
    assert planned.plan.num_microbatches == 1
    assert [line.split(" in ")[0] for line in lines] == ["compiled 1 residual points of 'block'"]


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
    assert seen == [1, 1, 4, 4, 1, 1], "embed, block, head: CPU and device"


class TestLoadedMachine:
    """What a GPU's host can do is measured under the load of a step."""

    @pytest.fixture(autouse=True)
    def pretend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen, self.may_pin = list[tuple[int, int, int]](), 1 << 40

        def measure(load: StepLoad) -> LoadedRates:
            for pieces in (load.host, load.back):
                self.seen.append((len(pieces), len({piece.data_ptr() for piece in pieces}), pieces[0].numel()))
            return LoadedRates(h2d_gbs=10.0, d2h_gbs=20.0, quiet_gbs=15.0, update_ms=4.0, dram_gbs=60.0)

        monkeypatch.setattr(StepLoad, "measure_loaded", measure)
        monkeypatch.setattr(links, "ROTATED_BYTES", 64 << 20)
        monkeypatch.setattr(links, "allocate_slab", lambda size, pin, name: torch.zeros(size, dtype=torch.uint8))
        monkeypatch.setattr(links, "is_slab_pinned", lambda slab: slab.numel() <= self.may_pin)
        monkeypatch.setattr(links, "_matmul_tflops", lambda *_: 1.0)
        monkeypatch.setattr(links, "_device_memory_gbs", lambda *_: 1.0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
        monkeypatch.setattr(torch, "empty", lambda size, **_: torch.zeros(size, dtype=torch.uint8))

    def measure(self, host_bytes: int) -> Hardware:
        self.seen.clear()
        return links.measure_machine(
            torch.device("cuda"),
            8 << 20,
            {"device": GIB, "host": host_bytes},
            work=links.Work(lambda: None, lambda: None, 20_000_000, (1e3, 2.0)),
            spill_dir=None,
            timer=SimpleNamespace(median_ms=lambda work: 1.0),
        )

    def test_rates_are_those_under_load(self) -> None:
        hardware = self.measure(16 * GIB)
        assert (hardware.h2d_gbs, hardware.d2h_gbs, hardware.quiet_link_gbs, hardware.dram_gbs) == (10, 20, 15, 60)
        assert (hardware.cpu_update_gparams_s, hardware.device_update_gparams_s) == (5.0, 10.0)

    def test_copies_go_over_more_than_a_cache_holds(self) -> None:
        self.measure(16 * GIB)
        assert self.seen == [(8, 8, 8 << 20)] * 2
        self.measure(512 << 20)
        assert self.seen == [(4, 4, 8 << 20)] * 2, "a sixteenth of a small host at most"
        self.may_pin = 8 << 20
        self.measure(16 * GIB)
        assert self.seen == [(1, 1, 8 << 20)] * 2, "what the system lets be pinned"

    def test_all_units_are_updated_at_the_rate_of_the_largest_block(self) -> None:
        profiler = make_profiler()
        problem = profiler.problem(1)
        profiler = replace(profiler, device=torch.device("cuda"), _hardware=self.measure(GIB))
        for unit in problem.units:
            assert profiler._updated_on_host(unit).cpu_update_ms == pytest.approx(unit.num_params / 5e6)


def test_the_load_is_that_of_the_largest_block_with_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    works = list[links.Work]()
    real = links.measure_machine

    def measure(*args: Any, work: links.Work, **kwargs: Any) -> Hardware:
        works.append(work)
        return real(*args, work=work, **kwargs)

    monkeypatch.setattr("lazytrain.profiler.measure_machine", measure)
    model = make_profiler().model
    (table,) = model.embed.params.values()
    wide = replace(table, shape=(10 * table.shape[0], *table.shape[1:]))
    profiler = make_profiler(model=replace(model, embed=replace(model.embed, params={"table": wide})))
    problem = profiler.problem(1)
    embed, block = problem.embed, problem.blocks[0]
    assert embed.num_params > block.num_params
    assert works[0].num_params == block.num_params
    assert works[0].update_ms == (block.cpu_update_ms, block.device_update_ms)
    bare = tuple(replace(unit, params={}, fn=lambda params, x, ctx: 2 * x) for unit in profiler.model.blocks)
    make_profiler(model=replace(profiler.model, blocks=bare)).problem(1)
    assert works[1].num_params == embed.num_params, "no block has any"
    works[1].update()
    assert works[1].launch() is None


@pytest.mark.gpu
def test_on_a_gpu_the_host_is_measured_under_the_load_of_a_block() -> None:
    profiler = make_profiler(device=torch.device("cuda"), dtype=torch.bfloat16)
    problem = profiler.problem(2)
    rate = problem.hardware.cpu_update_gparams_s
    assert rate > 0
    assert all(unit.cpu_update_ms == pytest.approx(unit.num_params / rate / 1e6) for unit in problem.units)


@pytest.mark.gpu
def test_what_cublas_keeps_is_measured_each_time() -> None:
    device = torch.device("cuda")
    first, second = links.measure_library_bytes(device), links.measure_library_bytes(device)
    assert 1 << 20 <= first == second
