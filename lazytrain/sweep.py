"""The two sweeps of a step over the blocks, breadth-first: all microbatches pass a unit before the next is needed.

Shape letters: b batch, t time, d model width.

Nothing here waits for the device; the host runs ahead, held back only by the buffers' reuse.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import vjp

from lazytrain.activations import NUM_FETCH_BUFFERS, Activations
from lazytrain.arrivals import Arrival, Arrivals
from lazytrain.base import Batch, Context, Model, Params, Unit
from lazytrain.gradients import GradientSink
from lazytrain.homes import Homes, UnitHome
from lazytrain.lanes import COMPUTE, Lanes, Ticket, Worker
from lazytrain.prefetch import Job, Prefetch, last_user
from lazytrain.programs import BlockPrograms, ProgramCache
from lazytrain.solver.visits import backward_visits
from lazytrain.stash import Fetched, Stash, buffer_of_turn
from lazytrain.updates import PendingUpdate


@dataclass(kw_only=True)
class Sweep:
    """Forward and backward over the units of one model (see the head of this file)."""

    model: Model
    homes: Homes
    arrivals: Arrivals
    activations: Activations
    programs: ProgramCache
    lanes: Lanes
    loader: Worker
    _fetch_use: dict[int, Ticket] = field(default_factory=dict)

    def forward(
        self,
        batches: Sequence[Batch],
        contexts: Sequence[Context],
        pending: PendingUpdate | None,
        ahead: Prefetch | None = None,
        room: Callable[[], Sequence[Ticket]] = list,
    ) -> tuple[list[Tensor], Stash]:
        """Run embed and all blocks, updating each unit before its use where an update is pending.

        Args:
            ahead: what `load_ahead` returned for this update; None = nothing was loaded yet.
            room: asked before the first block for what it must wait for.

        Returns:
            The head's inputs, x_btd of each microbatch, and what backward needs.
        """
        homes = self.homes.units
        prefetch = ahead or self._prefetch_forward(pending)
        prefetch.release()
        stash, xs = Stash(self.activations), []
        for position, home in enumerate(homes):
            arrival = prefetch.take(position)
            if pending is not None and pending.is_due(home):
                self.arrivals.update_on_load(arrival, pending)
            if position == 0:
                with self.lanes.span(COMPUTE, "embed", home.unit.name, [arrival.ticket]) as done:
                    xs = [self.model.embed.fn(self._params(arrival), batch) for batch in batches]
            elif position < len(homes) - 1:
                after = room() if position == 1 else ()
                xs, done = self._forward_block(position - 1, arrival, xs, contexts, stash, after)
            else:
                with self.lanes.span(COMPUTE, "arrive", home.unit.name, [arrival.ticket, stash.take_oldest()]) as done:
                    pass
            self.arrivals.used(home, done)
            prefetch.launched(position)
        return xs, stash

    def loss(
        self, xs: list[Tensor], batches: Sequence[Batch], scale: float, sink: GradientSink
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the head on every microbatch.

        Returns:
            The unscaled sum of losses (fp32, 0-d, on the device) and the cotangents of `scale` times it, dx_btd each.
        """
        params, home = self.head_params(), self.homes.units[-1]
        total = torch.zeros((), dtype=torch.float32, device=self.lanes.device)
        cotangents: list[Tensor] = []
        head = self.model.head
        with self.lanes.span(COMPUTE, "head", head.name) as done:
            while xs:
                x_btd, batch = xs.pop(0), batches[len(cotangents)]
                loss_sum, dx_btd = head_grads_into(head, params, x_btd, batch, scale, sink.sums(home))
                total = total + loss_sum.float()
                cotangents.append(dx_btd)
            sink.finish(home)
        for user in (self.homes.units[0], home):  # a tied head reads the embed's
            self.arrivals.used(user, done)
        sink.deliver(home, done)
        return total, cotangents

    def backward(
        self,
        cotangents: list[Tensor],
        batches: Sequence[Batch],
        contexts: Sequence[Context],
        stash: Stash,
        sink: GradientSink,
    ) -> None:
        """Run all blocks backward and the embed last; every unit's grads end in `sink`."""
        blocks = self.homes.units[1:-1]
        visits = backward_visits([home.plan for home in blocks])
        prefetch = self._prefetch_backward(visits, stash)
        for position, (i, is_again) in enumerate(visits):
            arrival, fetched, fetch_ticket, turn = prefetch.take(position)
            if is_again:
                done = self._forward_again(i, arrival, contexts, stash)
            else:
                after = [arrival.ticket, fetch_ticket, *sink.room_for(blocks[i]), *stash.take_all()]
                done = self._backward_block(i, arrival, fetched, after, cotangents, contexts, stash, sink)
            self.arrivals.used(blocks[i], done)
            if turn is not None:
                self._fetch_use[turn % NUM_FETCH_BUFFERS] = done
            prefetch.launched(position)
        self._backward_embed(cotangents, batches, sink)

    def head_params(self) -> Params:
        """Return the head's parameters, those it shares with the embed included; what it uses was brought before."""
        embed, head = self.homes.units[0], self.homes.units[-1]
        params = self._views(head)
        if self.model.tied:
            embed_params = self._views(embed)
            params |= {name: embed_params[source] for name, source in self.model.tied.items()}
        return params

    def _forward_block(
        self,
        i: int,
        arrival: Arrival,
        xs: list[Tensor],
        contexts: Sequence[Context],
        stash: Stash,
        after: Sequence[Ticket],
    ) -> tuple[list[Tensor], Ticket]:
        home = arrival.home
        params = self._params(arrival)
        outputs, programs = [], []
        residuals: list[tuple[Tensor, ...]] = []
        with self.lanes.span(COMPUTE, "forward", home.unit.name, [arrival.ticket, stash.take_oldest(), *after]) as done:
            for x_btd, ctx in zip(xs, contexts):
                program = self.programs.get(home.unit.kind, home.unit.fn, params, x_btd, ctx, layout=home.layout)
                y_btd, kept = program.forward_keep(self._point(home, program), params, x_btd, ctx)
                outputs.append(y_btd)
                residuals.append(kept)
                programs.append(program)
        stash.programs[i] = programs
        stash.put(i, home, xs, residuals, done)
        return outputs, done

    def _forward_again(self, i: int, arrival: Arrival, contexts: Sequence[Context], stash: Stash) -> Ticket:
        """Compute the next block's inputs, which were not kept."""
        params, outputs = self._params(arrival), []
        with self.lanes.span(COMPUTE, "forward again", arrival.home.unit.name, [arrival.ticket]) as done:
            for x_btd, ctx, program in zip(stash.boundary(i), contexts, stash.programs[i]):
                outputs.append(program.forward_keep(0, params, x_btd, ctx)[0])
        stash.put_boundary(i + 1, outputs)
        return done

    def _backward_block(
        self,
        i: int,
        arrival: Arrival,
        fetched: Fetched,
        after: Sequence[Ticket | None],
        cotangents: list[Tensor],
        contexts: Sequence[Context],
        stash: Stash,
        sink: GradientSink,
    ) -> Ticket:
        home, params = arrival.home, self._params(arrival)
        with self.lanes.span(COMPUTE, "backward", home.unit.name, after) as done:
            boundaries, residuals = stash.take(i, fetched)
            point = self._point(home, stash.programs[i][0])
            for c, program in enumerate(stash.programs.pop(i)):
                x_btd, kept = boundaries[c], list(residuals[c])
                boundaries[c] = residuals[c] = None  # type: ignore[assignment, call-overload]
                # The list is emptied by the program, so that each residual is freed at its last use.
                flat, dx_btd = program.backward(point, params, x_btd, contexts[c], kept, cotangents[c])
                cotangents[c] = dx_btd
                sink.add(home, flat)
                del flat
            del boundaries, residuals, fetched
        sink.deliver(home, done)
        return done

    def load_ahead(self, pending: PendingUpdate) -> Prefetch:
        """Start the loads of the next forward sweep before its update is decided: behind this step's last copies.

        The first unit that the CPU updates, or that is read from NVMe, ends it.
        """
        homes = self.homes.units
        late = (h.has_params and (h.plan.update == "cpu" or "nvme" in (h.plan.weights, h.plan.states)) for h in homes)
        return self._prefetch_forward(pending, held_from=next((p for p, is_late in enumerate(late) if is_late), None))

    def _prefetch_forward(self, pending: PendingUpdate | None, *, held_from: int | None = None) -> Prefetch:
        homes = self.homes.units
        slots = [self.arrivals.slot_of(home) for home in homes]
        buffers = [
            self.arrivals.buffer_of(home) if pending is not None and pending.is_due(home) else None for home in homes
        ]
        jobs = [
            Job(lambda home=home: self.arrivals.bring(home, pending), max(last_user(slots, p), last_user(buffers, p)))  # type: ignore[misc]
            for p, home in enumerate(homes)
        ]
        return Prefetch(jobs, self.loader, held_from=held_from)

    def _prefetch_backward(self, visits: Sequence[tuple[int, bool]], stash: Stash) -> Prefetch:
        blocks = self.homes.units[1:-1]
        slots = [self.arrivals.slot_of(blocks[i]) for i, _ in visits]
        turns_of = stash.fetch_turns([i for i, is_again in visits if not is_again])
        turns = [None if is_again else turns_of.get(i) for i, is_again in visits]
        buffers = [buffer_of_turn(turn) for turn in turns]
        jobs = [
            Job(
                lambda i=i, turn=turn: self._bring_back(i, stash, turn),  # type: ignore[misc]
                max(last_user(slots, position), last_user(buffers, position)),
            )
            for position, ((i, _), turn) in enumerate(zip(visits, turns))
        ]
        return Prefetch(jobs, self.loader)

    def _bring_back(self, i: int, stash: Stash, turn: int | None) -> tuple[Arrival, Fetched, Ticket | None, int | None]:
        home = self.homes.units[1 + i]
        arrival = self.arrivals.bring(home, None)
        if turn is None:
            return arrival, {}, None, None
        free = self._fetch_use.get(turn % NUM_FETCH_BUFFERS)
        return arrival, *stash.fetch(i, turn, home.unit.name, free), turn

    def _backward_embed(self, cotangents: list[Tensor], batches: Sequence[Batch], sink: GradientSink) -> None:
        home, embed = self.homes.units[0], self.model.embed
        # The slot may be the head's by now; the trainer has checked that shapes will do.
        params = home.layout.shapes() if home.plan.is_streamed else self._views(home)
        with self.lanes.span(COMPUTE, "embed backward", embed.name) as done:
            if embed.rows and not self.model.tied and sink.add_rows(home, [*map(embed.rows, batches)], cotangents):
                cotangents.clear()
            for dx_btd, batch in zip(cotangents if home.has_params else (), batches):
                embed_grads_into(embed, params, batch, dx_btd, sink.sums(home))
            sink.finish(home)
        sink.deliver(home, done)

    def _params(self, arrival: Arrival) -> Params:
        return arrival.home.layout.views(arrival.weights)

    def _views(self, home: UnitHome) -> Params:
        if not home.has_params:
            return {}
        return home.layout.views(self.arrivals.weights_on_device(home))

    @staticmethod
    def _point(home: UnitHome, program: BlockPrograms) -> int:
        """Return the plan's residual point; a shape whose curve is shorter keeps as much as it can."""
        return min(home.plan.residual_point, len(program.points) - 1)


def head_grads_into(
    head: Unit, params: Params, x_btd: Tensor, batch: Batch, scale: float, sums: Params
) -> tuple[Tensor, Tensor]:
    """Return the unscaled summed loss and the gradient of `scale` times it by x_btd; add the parameters' to `sums`."""
    if head.grads_into is not None:
        return head.grads_into(params, x_btd, batch, scale, sums)
    loss_sum, pull = vjp(lambda p, x: head.fn(p, x, batch), params, x_btd)  # type: ignore[misc]
    grads, dx_btd = pull(torch.full_like(loss_sum, scale))
    for name, grad in grads.items():
        sums[name].add_(grad)
    return loss_sum, dx_btd


def embed_grads_into(embed: Unit, params: Params, batch: Batch, dx_btd: Tensor, sums: Params) -> None:
    """Add the embed's gradients for a cotangent of its output to `sums`."""
    if embed.grads_into is not None:
        embed.grads_into(params, batch, dx_btd, sums)
        return
    _, pull = vjp(lambda p: embed.fn(p, batch), params)  # type: ignore[misc]
    for name, grad in pull(dx_btd)[0].items():
        sums[name].add_(grad)
