"""A plain training loop for one of several optimizers: what compare_optimizers.py runs.

Loss by autograd through the model's blocks, or through the same model of the transformers library, mean over the step's
target tokens; the global norm clipped to 1. The model computes in the task's dtype, bf16 as a rule: Adam8bit holds
parameters of it, torch's optimizer and others hold fp32 masters.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from lazytrain import Adam8bit
from lazytrain.base import IGNORE_INDEX, Batch, Model, Unit, count_targets
from lazytrain.configuration import ModelConfig
from lazytrain.generation import generate
from lazytrain.progress import progress_bar
from lazytrain.recipes.batches import BatchStream
from lazytrain.recipes.encoding import encode_questions
from lazytrain.recipes.preparation import Job
from lazytrain.recipes.prompts import decode_response
from lazytrain.recipes.scoring import score
from lazytrain.schedules import cosine
from lazytrain.transformer import transformer_model

KINDS = ("torch", "8bit", "8bit-24", "bitsandbytes", "torchao")
MAX_GRAD_NORM = 1.0
WARM_UP_STEPS = 5  # left out of the times


class Outcome(NamedTuple):
    """What one run gave; times are medians of one step, `state_bytes` the optimizer's tensors and fp32 masters.

    `losses`: of each step, as in metrics.jsonl.
    """

    kind: str
    seed: int
    train_loss: float
    held_out_loss: float
    exact_match: float | None
    step_ms: float
    optimizer_ms: float
    state_bytes: int
    losses: tuple[float, ...] = ()


Forward = Callable[[dict[str, Tensor], Batch], Tensor]


class Task(NamedTuple):
    """What is trained on what; `weights` draws or reads the initial values anew.

    `reference`: a model directory whose loss the transformers library computes; None = the model's own blocks.
    `dtype`: what the model computes in.
    """

    config: ModelConfig
    weights: Callable[[], Iterator[tuple[str, Tensor]]]
    stream: BatchStream
    held_out: BatchStream
    num_steps: int
    lr: float
    weight_decay: float
    num_warmup_steps: int
    job: Job | None = None
    reference: Path | None = None
    dtype: torch.dtype = torch.bfloat16


def make_optimizer(kind: str, named: list[tuple[str, torch.nn.Parameter]], lr: float, decay: float) -> Any:
    """Return the optimizer of a kind, torch's defaults else.

    Raises:
        ImportError: the kind's package is not there.
    """
    params = [p for _, p in named]
    if kind.startswith("8bit"):
        return Adam8bit(named, lr=lr, weight_decay=decay, master_bits=24 if kind.endswith("24") else 32)
    if kind == "bitsandbytes":
        from bitsandbytes.optim import AdamW8bit as Other
    elif kind == "torchao":
        from torchao.optim import AdamW8bit as Other
    else:
        return torch.optim.AdamW(params, lr=lr, weight_decay=decay, fused=params[0].is_cuda)
    return Other(params, lr=lr, weight_decay=decay)


def set_lr(optimizer: Any, lr: float) -> None:
    """Set the learning rate; torchao's is a tensor that must stay one, else it compiles anew."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def stored_bytes(x: Tensor) -> int:
    """Return the size of a tensor, or of the tensors that a subclass (torchao's states) is made of."""
    if not hasattr(x, "__tensor_flatten__"):
        return x.nbytes
    return sum(stored_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])


def loss_sum(model: Model, weights: dict[str, Tensor], batch: Batch) -> Tensor:
    """Return the fp32 sum of -log p over the batch's targets."""
    x_btd = model.embed.fn(unit_params(model.embed, weights), batch)
    ctx = model.context(batch, x_btd.dtype)
    for block in model.blocks:
        x_btd = block.fn(unit_params(block, weights), x_btd, ctx)
    return model.head.fn(unit_params(model.head, weights), x_btd, batch)


def transformers_forward(path: Path, device: torch.device, dtype: torch.dtype) -> Forward:
    """Return `loss_sum` by the transformers library, whose code shares nothing with ours.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    module.to(device)

    def forward(weights: dict[str, Tensor], batch: Batch) -> Tensor:
        given = {"input_ids": batch["tokens_bt"], "use_cache": False}
        if "segments_bt" in batch:
            segments_bt = batch["segments_bt"]
            same_b1tt = (segments_bt[:, None, :, None] == segments_bt[:, None, None, :]).tril()
            given |= {"attention_mask": same_b1tt, "position_ids": batch["positions_bt"]}
        logits_btv = functional_call(module, weights, (), given).logits
        targets_bt = batch["targets_bt"]
        return F.cross_entropy(
            logits_btv.flatten(0, 1).float(), targets_bt.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )

    return forward


def unit_params(unit: Unit, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: weights[spec.full_name] for name, spec in unit.params.items()}


def working_weights(params: dict[str, torch.nn.Parameter], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what the model computes with; gradients go through to fp32 masters."""
    return {name: p.to(dtype) for name, p in params.items()}


def train(
    kind: str, task: Task, seed: int, device: torch.device, limit: int | None, answer_rows: int | None = None
) -> Iterator[Outcome]:
    """Do one run; yield what it gave before its held-out problems are answered, and after, where they are.

    Args:
        limit: of the problems to answer (None: all, 0: none).
        answer_rows: how many at a time (None: all at once).
    """
    torch.manual_seed(seed)
    model = transformer_model(task.config)
    dtype = task.dtype if kind.startswith("8bit") else torch.float32
    params = {name: torch.nn.Parameter(x.to(device, dtype, copy=True)) for name, x in task.weights()}
    optimizer = make_optimizer(kind, list(params.items()), task.lr, task.weight_decay)
    if isinstance(optimizer, Adam8bit):  # all kinds begin with the same masters
        for name, value in task.weights():
            optimizer.set_master(params[name], value.float())
    schedule = cosine(task.lr, num_steps=task.num_steps, num_warmup_steps=task.num_warmup_steps, final_fraction=0.05)
    forward: Forward = lambda weights, batch: loss_sum(model, weights, batch)  # noqa: E731
    if task.reference is not None:
        forward = transformers_forward(task.reference, device, task.dtype)
    losses, marks = [], []
    with progress_bar(f"{kind}, seed {seed}", task.num_steps, unit="steps") as bar:
        for step in range(task.num_steps):
            on_host = task.stream.batch(step)
            num_targets = count_targets(on_host)
            batch = {name: x.to(device, non_blocking=True) for name, x in on_host.items()}
            marks.append([clock(device)])
            total = forward(working_weights(params, task.dtype), batch)
            (total / num_targets).backward()
            losses.append(total.detach() / num_targets)
            marks[-1].append(clock(device))
            set_lr(optimizer, schedule(step))
            if isinstance(optimizer, Adam8bit):
                optimizer.step(clip_coef=optimizer.measure_clip(MAX_GRAD_NORM).coef)
            else:
                torch.nn.utils.clip_grad_norm_(params.values(), MAX_GRAD_NORM)
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            marks[-1].append(clock(device))
            bar.advance()
    weights = {name: value.detach() for name, value in working_weights(params, task.dtype).items()}
    if device.type == "cuda":
        torch.cuda.empty_cache()  # several runs may share the device, and answering takes other sizes
    last = losses[-max(1, task.num_steps // 10) :]
    tensors = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    masters = [] if kind.startswith("8bit") else list(params.values())
    middle = marks[min(WARM_UP_STEPS, len(marks) - 1) :]
    outcome = Outcome(
        kind=kind,
        seed=seed,
        train_loss=torch.stack(last).mean().item(),
        held_out_loss=held_out_loss(model, weights, task, device),
        exact_match=None,
        step_ms=statistics.median(elapsed_ms(a, c) for a, _, c in middle),
        optimizer_ms=statistics.median(elapsed_ms(b, c) for _, b, c in middle),
        state_bytes=sum(stored_bytes(x) for x in (*tensors, *masters)),
        losses=tuple(torch.stack(losses).tolist()),
    )
    yield outcome
    if task.job and limit != 0:
        yield outcome._replace(exact_match=answer(model, weights, task, device, limit, answer_rows))


def clock(device: torch.device) -> Any:
    """Return a mark of time on the device's stream, or on the host."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(begin: Any, end: Any) -> float:
    return 1e3 * (end - begin) if isinstance(begin, float) else begin.elapsed_time(end)


@torch.no_grad()
def held_out_loss(model: Model, weights: dict[str, Tensor], task: Task, device: torch.device) -> float:
    total, num_targets = torch.zeros((), dtype=torch.float64, device=device), 0
    for step in range(task.held_out.steps_per_epoch):
        batch = {name: x.to(device) for name, x in task.held_out.batch(step).items()}
        total += loss_sum(model, weights, batch).double()
        num_targets += count_targets(batch)
    return total.item() / num_targets


@torch.no_grad()
def answer(
    model: Model,
    weights: dict[str, Tensor],
    task: Task,
    device: torch.device,
    limit: int | None,
    num_rows: int | None = None,
) -> float:
    """Return the share of held-out problems that greedy generation solves."""
    job = task.job
    assert job is not None
    rows = job.held_out[:limit]
    made = generate(
        model,
        job.config,
        lambda unit: unit_params(unit, weights),
        encode_questions(rows, job.tokenizer, job.special, job.prompt),
        max_new_tokens=job.settings.max_new_tokens,
        stop_ids=job.special.stop_ids,
        pad_id=job.special.pad_id,
        batch_size=num_rows or len(rows),
        device=device,
        dtype=task.dtype,
    )
    texts = [decode_response(job.tokenizer, job.special, tokens) for tokens in made]
    return score(rows, texts).exact_match
