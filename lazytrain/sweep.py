"""The two sweeps of a step over the blocks, breadth-first: all microbatches pass a unit before the next is needed.

Shape letters: b batch, t time, d model width.

Nothing here waits for the device; the host runs ahead, held back only by the buffers' reuse.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vjp

from lazytrain.activations import NUM_FETCH_BUFFERS, Activations
from lazytrain.arrivals import Arrival, Arrivals
from lazytrain.base import Batch, Context, Model, Params, Unit
from lazytrain.gradients import GradientSink
from lazytrain.homes import Homes, UnitHome
from lazytrain.lanes import COMPUTE, Lanes, Ticket, Worker
from lazytrain.prefetch import Job, Prefetch
from lazytrain.programs import BlockPrograms, ProgramCache
from lazytrain.solver.visits import backward_visits, last_users
from lazytrain.stash import Fetched, Piece, Stash, buffer_of_turn
from lazytrain.updates import PendingUpdate


class Visit(NamedTuple):
    """A stop of the backward sweep at a block; `is_again`: only its forward, for all microbatches."""

    piece: Piece
    is_again: bool
    is_last: bool


@dataclass(kw_only=True)
class Sweep:
    """Forward and backward over the units of one model (see the head of this file).

    `chunks_behind`: as in the plan.
    """

    model: Model
    homes: Homes
    arrivals: Arrivals
    activations: Activations
    programs: ProgramCache
    lanes: Lanes
    loader: Worker
    chunks_behind: int
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
        stash, xs = Stash(self.activations, len(batches), self.chunks_behind), []
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
        blocks, num = self.homes.units[1:-1], len(batches)
        # A block's backward is one visit a microbatch; its repeated forward is one for all.
        visits = [
            Visit(Piece(i, c), is_again, is_last=is_again or c == num - 1)
            for i, is_again in backward_visits([home.plan for home in blocks])
            for c in range(1 if is_again else num)
        ]
        prefetch = self._prefetch_backward(visits, stash)
        for position, visit in enumerate(visits):
            arrival, fetched, ready, turn = prefetch.take(position)
            if visit.is_again:
                done = self._forward_again(visit.piece.block, arrival, contexts, stash, sink)
            else:
                done = self._backward_piece(visit, arrival, fetched, ready, cotangents, contexts, stash, sink)
            if visit.is_last:
                self.arrivals.used(arrival.home, done)
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
        home, params = arrival.home, self._params(arrival)
        outputs, programs = [], stash.programs.setdefault(i, [])
        for c, ctx in enumerate(contexts):
            x_btd, waits = xs[c], [arrival.ticket, *after] if c == 0 else []
            xs[c] = None  # type: ignore[call-overload]
            with self.lanes.span(COMPUTE, "forward", home.unit.name, [stash.take_oldest(), *waits]) as done:
                program = self.programs.get(home.unit.kind, home.unit.fn, params, x_btd, ctx, layout=home.layout)
                y_btd, kept = program.forward_keep(self._point(home, program), params, x_btd, ctx)
            outputs.append(y_btd)
            programs.append(program)
            stash.put(Piece(i, c), home, x_btd, kept, done)
            del x_btd, kept
        return outputs, done

    def _forward_again(
        self, i: int, arrival: Arrival, contexts: Sequence[Context], stash: Stash, sink: GradientSink
    ) -> Ticket:
        """Compute the next block's inputs, which were not kept."""
        params = self._params(arrival)
        sink.drop_buffer()
        after = [arrival.ticket, *sink.room_for(arrival.home), *stash.take_all()]
        with self.lanes.span(COMPUTE, "forward again", arrival.home.unit.name, after) as done:
            for c, (ctx, program) in enumerate(zip(contexts, stash.programs[i])):
                y_btd = program.forward_keep(0, params, stash.boundary(Piece(i, c)), ctx)[0]
                stash.put_boundary(Piece(i + 1, c), y_btd)
        return done

    def _backward_piece(
        self,
        visit: Visit,
        arrival: Arrival,
        fetched: Fetched,
        ready: Sequence[Ticket],
        cotangents: list[Tensor],
        contexts: Sequence[Context],
        stash: Stash,
        sink: GradientSink,
    ) -> Ticket:
        home, params, (i, c) = arrival.home, self._params(arrival), visit.piece
        after = [*ready, *sink.room_for(home), *stash.take_all()] if c == 0 else ready
        with self.lanes.span(COMPUTE, "backward", home.unit.name, after) as done:
            x_btd, residuals = stash.take(visit.piece, fetched)
            program = stash.programs[i][c]
            # The list is emptied by the program, so that each residual is freed at its last use.
            point = self._point(home, program)
            flat, cotangents[c] = program.backward(point, params, x_btd, contexts[c], residuals, cotangents[c])
            sink.add(home, flat)
            del flat, x_btd, fetched
        if visit.is_last:
            del stash.programs[i]
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
        needs = [max(pair) for pair in zip(last_users(slots), last_users(buffers))]
        jobs = [Job(partial(self.arrivals.bring, home, pending), need) for home, need in zip(homes, needs)]
        return Prefetch(jobs, self.loader, held_from=held_from)

    def _prefetch_backward(self, visits: Sequence[Visit], stash: Stash) -> Prefetch:
        blocks = self.homes.units[1:-1]
        turns_of = stash.fetch_turns([visit.piece for visit in visits if not visit.is_again])
        turns = [None if visit.is_again else turns_of.get(visit.piece) for visit in visits]
        jobs, users = [], dict[int, int]()  # slot -> the position of its last user's last visit
        buffers = last_users([buffer_of_turn(turn) for turn in turns])
        for position, (visit, turn, needs) in enumerate(zip(visits, turns, buffers)):
            slot = self.arrivals.slot_of(blocks[visit.piece.block])
            if slot is not None and visit.piece.microbatch == 0:
                needs = max(needs, users.get(slot, -1))
            if slot is not None:
                users[slot] = position
            jobs.append(Job(partial(self._bring_back, visit, stash, turn), needs))
        return Prefetch(jobs, self.loader)

    def _bring_back(
        self, visit: Visit, stash: Stash, turn: int | None
    ) -> tuple[Arrival, Fetched, list[Ticket], int | None]:
        home = self.homes.units[1 + visit.piece.block]
        arrival = self.arrivals.bring(home, None)
        ready = [arrival.ticket] if visit.piece.microbatch == 0 else []
        if turn is None:
            return arrival, {}, ready, None
        free = self._fetch_use.get(turn % NUM_FETCH_BUFFERS)
        fetched, ticket = stash.fetch(visit.piece, turn, home.unit.name, free)
        return arrival, fetched, [*ready, ticket], turn

    def _backward_embed(self, cotangents: list[Tensor], batches: Sequence[Batch], sink: GradientSink) -> None:
        home, embed = self.homes.units[0], self.model.embed
        sink.drop_buffer()
        # The slot may be the head's by now; the trainer has checked that shapes will do.
        params = home.layout.shapes() if home.plan.is_streamed else self._views(home)
        with self.lanes.span(COMPUTE, "embed backward", embed.name) as done:
            if self.model.embed_rows is not None:
                sink.add_rows(home, [*map(self.model.embed_rows, batches)], cotangents)
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
