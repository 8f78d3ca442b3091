"""Play a plan step by step as the executor would, until the step's time settles.

This knows nothing of the MILP: it issues the same spans in the same order as the trainer's engine, and a span starts
when its queue, what it waits for and the thread that issues it are ready. Times are ms.

Queues (each in order): compute, h2d, d2h, cpu (updates), nvme_read, nvme_write. On a machine without a device
(`device_is_host`) the first four share the cores, so that they take turns.

The host's DRAM is shared by the updates on the CPU, each of which keeps it busy, and by every copy: an update ends no
sooner than DRAM is done with all updates up to it and all copies so far, and the load behind it waits; a forward sweep
is as long as DRAM needs for both, and the head starts then. In backward no update runs, and the link alone is slower.

The norm of all grads is known at the end of a step, after the one host synchronisation. Updates, and the compute of the
next step, start only then; stores of grads may still run. What the next step's first units need is loaded before: see
`_Step._list_early`.
"""

from dataclasses import dataclass

from lazytrain.solver.machine import COMPUTE, D2H, H2D, NVME_READ, NVME_WRITE, QUEUES, Event, Machine, Pack
from lazytrain.solver.memory import account
from lazytrain.solver.plan import CPU, DEVICE, HOST, NVME, Plan, Predicted
from lazytrain.solver.problem import Problem
from lazytrain.solver.rates import sync_ms
from lazytrain.solver.visits import backward_visits, last_users

MAX_STEPS = 60
SETTLED = 1e-9


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A plan's steady step.

    Attributes:
        timeline: the spans of one steady step, 0 = the norm of the step before is known.
        moved_bytes, busy_ms: per queue, of one step.
        bound_by: the queue that is busiest, or "host memory", with its share of the step.
    """

    step_ms: float
    timeline: tuple[Event, ...]
    device_peak_bytes: int
    host_bytes: int
    nvme_bytes: int
    moved_bytes: dict[str, int]
    busy_ms: dict[str, float]
    bound_by: str

    @property
    def predicted(self) -> Predicted:
        """Return the numbers that a plan carries."""
        return Predicted(
            step_ms=self.step_ms,
            device_peak_bytes=self.device_peak_bytes,
            host_bytes=self.host_bytes,
            nvme_bytes=self.nvme_bytes,
            h2d_bytes=self.moved_bytes[H2D],
            d2h_bytes=self.moved_bytes[D2H],
        )


def simulate(problem: Problem, plan: Plan) -> Simulation:
    """Return what one steady step of `plan` takes and needs.

    Steps are played until two in a row are the same, span by span: of two that only take the same time, a queue may
    fall behind in each and bind some steps later. Where they alternate, the mean of the second half counts.
    Whether the plan fits is `memory.find_shortage`'s to say.

    Raises:
        PlannerError: the plan contradicts itself or belongs to another problem.
    """
    plan.validate(problem)
    machine, period, norm = _settle(problem, plan, keep_events=True)
    return _report(problem, plan, machine, period, norm)


def simulate_step_ms(problem: Problem, plan: Plan) -> float:
    """Return the step's time alone, of a plan that is known to be valid."""
    return simulate_load(problem, plan)[0]


def simulate_load(problem: Problem, plan: Plan) -> tuple[float, tuple[float, ...]]:
    """Return the step's time, and how long each queue and the host's DRAM is busy in it."""
    machine, period, _ = _settle(problem, plan, keep_events=False)
    loads_ms = tuple(_list_bounds(problem, machine).values())
    return max(period, *loads_ms), loads_ms


def _settle(problem: Problem, plan: Plan, *, keep_events: bool) -> tuple[Machine, float, float]:
    """Play until the step's time is steady; return the machine after it, that time, and when the last step began."""
    machine = Machine(problem, plan)
    step = _Step(problem, machine)
    norms, period, sum_ends = [0.0], 0.0, 0.0
    for count in range(1, MAX_STEPS + 1):
        machine.start_step()
        norms.append(step.play(pending=count > 1))
        last, period = period, norms[-1] - norms[-2]
        before, sum_ends = sum_ends, machine.sum_ends
        if count > 2 and max(abs(period - last), abs(sum_ends - before)) <= SETTLED * period:
            break
    else:
        half = MAX_STEPS // 2
        period = (norms[-1] - norms[half]) / (MAX_STEPS - half)
    if keep_events:
        machine.start_step(keep_events=True)
        norms.append(step.play(pending=True))
    return machine, period, norms[-2]


class _Step:
    """One optimizer step, breadth-first over the units: 0 is embed, 1..L are the blocks, L + 1 is head."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self._problem, self._machine = problem, machine
        self._units, self._plans = machine.units, machine.plans
        self._last = len(self._units) - 1
        order = range(len(self._units))
        slots = [machine.slots.get(u) for u in order]
        buffers = [machine.buffers.get(u) for u in order]
        self._needs = [max(pair) for pair in zip(last_users(slots), last_users(buffers), strict=True)]
        self._visits = [(i + 1, is_again) for i, is_again in backward_visits(self._plans[1:-1])]
        self._moves = [self._list_moves(u) for u in order]
        offloads = [u for u, is_again in self._visits if self._moves[u] and not is_again]
        self._turns = {u: turn for turn, u in enumerate(offloads)}
        slots = [machine.slots.get(u) for u, _ in self._visits]
        turns = [self._turns[u] % 2 if u in self._turns and not is_again else None for u, is_again in self._visits]
        self._backward_needs = [max(pair) for pair in zip(last_users(slots), last_users(turns), strict=True)]
        self._early = self._list_early()
        self._tickets: dict[int, float] = {}  # of units that are loaded early: when they are there

    def _list_early(self) -> list[int]:
        """Return the units whose loads for a step are issued before the norm of the step before is known.

        In forward order, up to the first unit that the CPU updates, whose weights or states are on NVMe, or whose slot
        or update buffer an earlier unit of the same step takes.
        """
        early = []
        for u, (unit, decisions) in enumerate(zip(self._units, self._plans, strict=True)):
            waits = decisions.update == CPU or NVME in (decisions.weights, decisions.states)
            if (waits and unit.num_params) or self._needs[u] >= 0:
                break
            early.append(u)
        return early

    def play(self, *, pending: bool) -> float:
        """Play one step; return when its norm is known."""
        machine = self._machine
        machine.start_sweep()
        if pending:
            for u, decisions in enumerate(self._plans):
                if decisions.update == CPU and self._units[u].num_params:
                    machine.update_on_cpu(u)
        packs, offloads = self._forward(pending)
        self._backward(packs, offloads)
        return machine.main

    def _forward(self, pending: bool) -> tuple[dict[int, list[Pack]], list[float]]:
        machine, num = self._machine, self._problem.num_microbatches
        packs: dict[int, list[Pack]] = {}
        offloads: list[float] = []
        start, launched = machine.main, list[float]()
        for u, (unit, decisions) in enumerate(zip(self._units, self._plans, strict=True)):
            needs = self._needs[u]
            machine.loader = max(machine.loader, launched[needs] if needs >= 0 else start)
            ticket = self._tickets.pop(u) if u in self._tickets else machine.bring(u, pending=pending)
            machine.main = max(machine.main, machine.loader)
            if pending and decisions.update == DEVICE and unit.num_params:
                machine.update_on_load(u, ticket)
            point = unit.points[decisions.residual_point]
            oldest = offloads.pop(0) if u and len(offloads) == 2 else 0.0
            if u == self._last:
                ms = num * (point.forward_ms + point.backward_ms)
                dram = machine.dram_due() if pending else 0.0
                done = machine.span(COMPUTE, "head", u, ms, [ticket, oldest, dram], machine.main)
                machine.deliver(u, done)
            elif u == 0:
                done = machine.span(COMPUTE, "embed", u, num * point.forward_ms, [ticket], machine.main)
            else:
                stored = machine.last_store if u == 1 else 0.0
                after = [ticket, oldest, stored]
                done = machine.span(COMPUTE, "forward", u, num * point.forward_ms, after, machine.main)
            if self._moves[u]:
                packs[u] = [machine.offload(u, name, size, place, done) for name, size, place in self._moves[u]]
                offloads.append(packs[u][-1].out)
            machine.used(u, done)
            launched.append(machine.main)
        return packs, offloads

    def _backward(self, packs: dict[int, list[Pack]], offloads: list[float]) -> None:
        machine, num = self._machine, self._problem.num_microbatches
        start, launched = machine.main, list[float]()
        for position, (u, is_again) in enumerate(self._visits):
            needs = self._backward_needs[position]
            machine.loader = max(machine.loader, launched[needs] if needs >= 0 else start)
            after = [machine.bring(u, pending=False)]
            if is_again:
                machine.main = max(machine.main, machine.loader)
                ms = num * self._units[u].points[0].forward_alone_ms
                done = machine.span(COMPUTE, "forward again", u, ms, after, machine.main)
                launched.append(machine.main)
                machine.used(u, done)
                continue
            after += offloads
            offloads = []
            turn = self._turns.get(u)
            if turn is not None:
                after.append(machine.fetch(u, packs[u], turn))
            machine.main = max(machine.main, machine.loader)
            after.append(machine.room_for_grads(u))
            ms = num * self._units[u].points[self._plans[u].residual_point].backward_ms
            done = machine.span(COMPUTE, "backward", u, ms, after, machine.main)
            launched.append(machine.main)
            machine.deliver(u, done)
            machine.used(u, done, turn)
        ms = num * self._units[0].points[0].backward_ms
        done = machine.span(COMPUTE, "embed backward", 0, ms, [], machine.main)
        machine.deliver(0, done)
        machine.loader = machine.main
        machine.sweep_ms = 0.0
        self._tickets = {u: machine.bring(u, pending=True) for u in self._early}
        machine.main = machine.loader = max(machine.main, done) + sync_ms(self._problem)

    def _list_moves(self, u: int) -> list[tuple[str, int, str]]:
        """Return (name, bytes, place) of what leaves the device after a block's forward."""
        unit, decisions, num = self._units[u], self._plans[u], self._problem.num_microbatches
        moved: list[tuple[str, int, str]] = []
        if decisions.boundary in (HOST, NVME):
            moved.append(("offload boundary", num * unit.boundary_bytes, decisions.boundary))
        if decisions.residuals in (HOST, NVME):
            size = num * unit.points[decisions.residual_point].residual_bytes
            moved.append(("offload residuals", size, decisions.residuals))
        return moved


def _list_bounds(problem: Problem, machine: Machine) -> dict[str, float]:
    """Return how long each queue, and the host's DRAM, is busy in a step; shared cores count once."""
    bounds: dict[str, float] = dict(machine.busy)
    bounds["host memory"] = machine.dram_ms
    if problem.device_is_host:
        bounds["cores"] = sum(bounds.pop(queue, 0.0) for queue in (COMPUTE, H2D, D2H, CPU))
    return bounds


def _report(problem: Problem, plan: Plan, machine: Machine, period: float, norm: float) -> Simulation:
    bounds = _list_bounds(problem, machine)
    step_ms = max(period, *bounds.values())
    busiest = max(bounds, key=lambda name: bounds[name])
    if busiest == "host memory" and 2 * bounds.get(CPU, 0.0) > bounds[busiest]:
        busiest = CPU  # it is that which keeps DRAM busy
    usage = account(problem, plan)
    return Simulation(
        step_ms=step_ms,
        timeline=tuple(e._replace(start_ms=e.start_ms - norm, end_ms=e.end_ms - norm) for e in machine.events),
        device_peak_bytes=usage.device_peak_bytes,
        host_bytes=usage.host_bytes,
        nvme_bytes=usage.nvme_bytes,
        moved_bytes={queue: machine.bytes[queue] for queue in (H2D, D2H, NVME_READ, NVME_WRITE)},
        busy_ms={queue: machine.busy[queue] for queue in QUEUES},
        bound_by=f"{busiest} ({bounds[busiest] / step_ms:.0%})" if step_ms else busiest,
    )
