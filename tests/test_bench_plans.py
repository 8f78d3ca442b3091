"""The plans that the bench knows by name, each predicted with the rates that it will have."""

from dataclasses import replace
from pathlib import Path

import pytest
from test_solver_edges import ON_CPU, RESIDENT, STREAMED, STREAMED_ON_CPU, make_problem

from lazytrain.errors import ConfigError
from lazytrain.recipes import bench, bench_plans
from lazytrain.recipes.bench_plans import choose_plan
from lazytrain.solver.baselines import Baseline, list_baselines
from lazytrain.solver.errors import PlannerError
from lazytrain.solver.memory import account, find_shortage
from lazytrain.solver.plan import make_plan
from lazytrain.solver.problem import Problem
from lazytrain.solver.simulator import simulate


@pytest.fixture
def problem() -> Problem:
    """A machine whose copies are twice as fast while the CPU updates nothing."""
    plain = make_problem(3, num_blocks=5)
    return replace(plain, hardware=replace(plain.hardware, quiet_link_gbs=2 * plain.hardware.h2d_gbs))


def test_a_plan_without_updates_on_the_cpu_has_the_faster_copies(problem: Problem, tmp_path: Path) -> None:
    for update, quiet in ((STREAMED, True), (STREAMED_ON_CPU, False)):
        edge = RESIDENT if quiet else ON_CPU
        make_plan(problem, [edge, *[update] * 5, edge], 2).save(tmp_path / "plan.json")
        chosen = choose_plan(str(tmp_path / "plan.json"), problem)
        assert chosen is not None
        assert chosen.problem.hardware.h2d_gbs == problem.hardware.h2d_gbs * (2 if quiet else 1)
        assert chosen.plan.predicted == simulate(chosen.problem, chosen.plan).predicted


@pytest.mark.parametrize(("name", "where"), [("cpu-update", "cpu"), ("device-update", "device")])
def test_updates_are_forced_to_one_place(name: str, where: str, problem: Problem) -> None:
    chosen = choose_plan(name, problem)
    assert chosen is not None
    assert {unit.update for unit in chosen.plan.blocks} == {where}


def test_heuristics_are_known_by_name(problem: Problem) -> None:
    for name in ("recompute_all", "fixed-interval-2"):
        chosen = choose_plan(name, problem)
        assert chosen is not None
        chosen.plan.validate(chosen.problem)
    for name in ("fixed-interval-", "fixed-interval-0", "solvd"):
        with pytest.raises(ConfigError, match=r"is no plan.*recompute_all"):
            choose_plan(name, problem)


def test_a_plan_for_another_model_is_refused(problem: Problem, tmp_path: Path) -> None:
    make_plan(problem, [RESIDENT] * 4, 2).save(tmp_path / "plan.json")
    with pytest.raises(PlannerError, match="plan anew"):
        choose_plan(str(tmp_path / "plan.json"), problem)


@pytest.mark.parametrize(("name", "weights"), [("states-on-nvme", {"device", "host"}), ("all-on-nvme", {"nvme"})])
def test_what_is_named_lies_on_nvme_for_all_blocks(name: str, weights: set[str], problem: Problem) -> None:
    spilled = replace(problem, allow_nvme=True, hardware=replace(problem.hardware, nvme_bytes=1 << 40))
    chosen = choose_plan(name, spilled)
    assert chosen is not None
    assert {unit.states for unit in chosen.plan.units} == {"nvme"}
    assert {unit.weights for unit in chosen.plan.blocks} <= weights
    assert {unit.update for unit in chosen.plan.units} == {"device"}
    assert "nvme" not in {place for unit in chosen.plan.units for place in (unit.residuals, unit.boundary)}
    assert not find_shortage(chosen.problem, account(chosen.problem, chosen.plan))


def test_weights_on_nvme_get_as_many_slots_as_fit() -> None:
    plain = make_problem(3, num_blocks=9)
    hardware = replace(plain.hardware, nvme_bytes=1 << 40, nvme_read_gbs=0.01, nvme_write_gbs=1.0)
    chosen = choose_plan("all-on-nvme", replace(plain, allow_nvme=True, hardware=hardware))
    assert chosen is not None
    assert chosen.plan.prefetch_depth == 4  # for 9 blocks
    tight = account(chosen.problem, chosen.plan).device_peak_bytes - 1
    hardware = replace(hardware, device_memory_bytes=tight)
    chosen = choose_plan("all-on-nvme", replace(plain, allow_nvme=True, hardware=hardware))
    assert chosen is not None
    assert not find_shortage(chosen.problem, account(chosen.problem, chosen.plan))


def test_embed_and_head_stay_off_a_disk_that_is_too_small_for_them(problem: Problem) -> None:
    spilled = replace(problem, allow_nvme=True, hardware=replace(problem.hardware, nvme_bytes=1 << 40))
    whole = choose_plan("states-on-nvme", spilled)
    assert whole is not None
    room = account(whole.problem, whole.plan).nvme_bytes - 1
    chosen = choose_plan("states-on-nvme", replace(spilled, hardware=replace(spilled.hardware, nvme_bytes=room)))
    assert chosen is not None
    assert {unit.states for unit in chosen.plan.blocks} == {"nvme"}
    assert "nvme" not in {chosen.plan.embed.states, chosen.plan.head.states}
    assert choose_plan("states-on-nvme", replace(spilled, hardware=replace(spilled.hardware, nvme_bytes=1))) is None


def test_a_plan_on_nvme_without_a_disk_names_the_remedy(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="--spill-dir"):
        choose_plan("all-on-nvme", problem)


def test_a_problem_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "problem.json").write_text("{bad", encoding="utf-8")
    flags = ["--model", "qwen2.5-0.5b", "--batch", "1", "--seq", "8", "--device", "cpu", "--out", str(tmp_path)]
    assert bench.main([*flags, "--problem", str(tmp_path / "problem.json")]) == 2
    told = capsys.readouterr().err
    assert "problem.json can't be read as a problem: " in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("flag", ["--batch", "--seq", "--microbatches", "--steps", "--warmup"])
def test_a_count_that_cannot_be_is_named(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--model", "qwen2.5-0.5b", "--device", "cpu", "--out", str(tmp_path), flag, "-1"]) == 2
    assert f"error: {flag}" in capsys.readouterr().err


def test_heuristics_are_listed_once_for_all_names(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def list_counted(variant: Problem) -> list[Baseline]:
        calls.append(variant.digest)
        return list_baselines(variant)

    bench_plans._list_heuristics.cache_clear()
    monkeypatch.setattr(bench_plans, "list_baselines", list_counted)
    for name in ("recompute_all", "keep_all", "greedy"):
        choose_plan(name, problem)
    assert len(calls) == len(set(calls)) == 2, "the problem, and the one without updates on the CPU"
