"""The joint graph, its splits, and the straight-line functions written from them."""

import operator

import pytest
import torch
import torch.nn.functional as F
from sample_blocks import Sample, concatenate, tanh_sample, transformer_sample
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from lazytrain import decoder
from lazytrain.base import Context, Params
from lazytrain.configuration import parse_config
from lazytrain.joint import Joint, trace_joint
from lazytrain.partition import backward_graph, forward_graph, keep_all, product_candidates, residual_candidates
from lazytrain.programs import COMPILED_BUDGETS
from lazytrain.straightline import write_function
from lazytrain.transformer import transformer_model

aten = torch.ops.aten


def trace(sample: Sample) -> Joint:
    return trace_joint(sample.fn, sample.params, sample.x, sample.ctx, concatenate)


def targets(graph: fx.Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def small_sample(fn: object) -> Sample:
    params = {"w": torch.randn(6, 6)}
    return Sample(fn, params, torch.randn(4, 6), {}, torch.randn(4, 6))  # type: ignore[arg-type]


def test_tracing_keeps_the_operators_of_eager_autograd() -> None:
    called = targets(trace(transformer_sample()).module.graph)
    for operation in (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        aten.silu.default,
        aten.silu_backward.default,
        aten.addmm.default,
        aten.rsqrt.default,
    ):
        assert operation in called


def test_inputs_are_named_in_order() -> None:
    sample = transformer_sample(masked=True)
    names = [*(f"params.{n}" for n in sample.params), "x", *(f"ctx.{n}" for n in sample.ctx), "dy"]
    assert list(trace(sample).inputs) == names


def test_equal_values_are_computed_once() -> None:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        return torch.sin(x @ params["w"]) * torch.sin(x @ params["w"])

    graph = forward_graph(trace(small_sample(fn)), [])
    assert targets(graph) == [aten.mm.default, aten.sin.default, aten.mul.Tensor]


def test_what_computes_nothing_is_not_called() -> None:
    joint = trace(transformer_sample())
    for graph in (forward_graph(joint, []), backward_graph(joint, []), backward_graph(joint, keep_all(joint))):
        assert aten.detach.default not in targets(graph)
        for node in graph.nodes:
            if node.target is aten.t.default:
                assert node.args[0].target is not aten.t.default
            if node.target is aten.view.default:
                assert node.meta["val"].shape != node.args[0].meta["val"].shape


def test_keep_all_of_a_tanh_layer_is_what_its_gradient_reads() -> None:
    joint = trace(tanh_sample())
    kept = keep_all(joint)
    assert [node.target for node in kept] == [aten.tanh.default, aten.tanh.default]
    assert joint.y in kept


def test_views_of_weights_are_not_kept() -> None:
    joint = trace(small_sample(lambda p, x, ctx: F.linear(torch.tanh(F.linear(x, p["w"])), p["w"])))
    assert {node.target for node in keep_all(joint)} == {aten.tanh.default}


def test_parts_of_a_value_are_kept_as_that_value() -> None:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        first, second = (x @ params["w"]).chunk(2, -1)
        return torch.cat((first.sigmoid() * second, second.sin()), -1)

    kept = keep_all(trace(small_sample(fn)))
    assert sorted(str(node.target) for node in kept) == ["aten.mm.default", "aten.sigmoid.default"]


def test_two_shapes_of_one_value_are_kept_once() -> None:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        h = x.view(2, 2, 6) @ params["w"]
        return h.sin().view(4, 6) + h.view(4, 6).cos()

    kept = keep_all(trace(small_sample(fn)))
    assert [node.target for node in kept] == [aten.mm.default]


def test_values_that_backward_would_not_read_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_everything(module: fx.GraphModule, *args: object, **options: object) -> tuple[None, fx.GraphModule]:
        graph = fx.Graph()
        for node in module.graph.nodes:
            graph.placeholder(node.name)
        graph.output(())
        return None, fx.GraphModule(module, graph)

    monkeypatch.setattr("lazytrain.partition.min_cut_rematerialization_partition", keep_everything)
    joint = trace(transformer_sample())
    (kept,) = residual_candidates(joint, [0.5])
    unread = {node.name for node in backward_graph(joint, kept).nodes if node.op == "placeholder" and not node.users}
    assert not unread & {node.name for node in kept}
    assert set(keep_all(joint)) <= set(kept)


def test_unread_outputs_of_an_operator_are_released_at_once() -> None:
    joint = trace(transformer_sample())
    for graph in (forward_graph(joint, keep_all(joint)), backward_graph(joint, [])):
        nodes = list(graph.nodes)
        for position, node in enumerate(nodes):
            if node.target is operator.getitem:
                assert nodes[position - 1] is node.args[0] or nodes[position - 1].target is operator.getitem


def test_recomputed_values_wait_for_their_first_reader() -> None:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        return x.exp() + x.sin().tanh()

    graph = backward_graph(trace(small_sample(fn)), [])
    called = [str(target).removeprefix("aten.").split(".")[0] for target in targets(graph)]
    # Forward computes exp first, but its gradient is the last to be taken.
    assert called.index("tanh") < called.index("tanh_backward") < called.index("exp")


@pytest.mark.parametrize("budget", [0.0, 0.3, 0.7, 1.0])
def test_every_split_computes_the_joint_graph(budget: float) -> None:
    sample = transformer_sample()
    joint = trace(sample)
    (kept,) = residual_candidates(joint, [budget])
    inputs = [*sample.params.values(), sample.x, *sample.ctx.values()]
    whole = joint.module(*inputs, sample.dy)
    y, *residuals = write_function(forward_graph(joint, kept), joint.module)(list(inputs))
    flat, dx = write_function(backward_graph(joint, kept), joint.module)([*inputs, *residuals, sample.dy])
    assert (budget == 0.0) == (not residuals)
    for value, target in zip((y, flat, dx), whole):
        assert torch.equal(value, target)


# --- straight-line functions ---


def function_of(build: object) -> tuple[fx.GraphModule, object]:
    module = fx.symbolic_trace(build)  # type: ignore[arg-type]
    return module, write_function(module.graph, module)


def test_function_empties_its_arguments() -> None:
    _, function = function_of(lambda a, b: (torch.add(a, b, alpha=2),))
    arguments = [torch.ones(2), torch.ones(2)]
    assert function(arguments)[0].tolist() == [3.0, 3.0]  # type: ignore[operator]
    assert arguments == []


def test_function_writes_constants_lists_and_parts() -> None:
    def build(a: Tensor, unused: Tensor) -> tuple[Tensor, ...]:
        low, high = torch.unbind(torch.stack([a, torch.full((2,), float("-inf"))]))
        return low, torch.nan_to_num(high, neginf=-1.5), torch.zeros(2, dtype=torch.float64), a

    _, function = function_of(build)
    a = torch.tensor([1.0, 2.0])
    low, high, zeros, same = function([a, a])  # type: ignore[operator]
    assert low.tolist() == [1.0, 2.0]
    assert high.tolist() == [-1.5, -1.5]
    assert zeros.dtype == torch.float64
    assert same is a


def test_function_of_no_arguments_returns_its_constants() -> None:
    module = torch.nn.Module()
    module.register_buffer("seven", torch.tensor(7))
    graph = fx.Graph()
    graph.output((graph.get_attr("seven"),))
    assert write_function(graph, fx.GraphModule(module, graph))([])[0] == 7


FLASH = torch.ops.aten._scaled_dot_product_flash_attention


def trace_on_flash(
    monkeypatch: pytest.MonkeyPatch, batch: dict[str, Tensor], heads: tuple[int, int], *widths: int
) -> Joint:
    """Trace a block of the given hidden and feed-forward widths with a GPU's attention; nothing is computed."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: FLASH(q, k, v, 0.0, True)[0])
    counts = {"vocab_size": 8, "num_hidden_layers": 1, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    sizes = {"hidden_size": widths[0], "intermediate_size": widths[1]}
    config = parse_config({"model_type": "llama", **sizes, **counts})
    unit = transformer_model(config).blocks[0]
    params = {n: torch.empty(s.shape, dtype=torch.bfloat16, device="meta") for n, s in unit.params.items()}
    ctx = decoder.make_context(batch, torch.bfloat16, config=config)
    meta = {name: value.to("meta") for name, value in ctx.items()}
    x = torch.empty(*batch["tokens_bt"].shape, widths[0], dtype=torch.bfloat16, device="meta")
    return trace_joint(unit.fn, params, x, meta, concatenate, torch.device("cpu"))


@pytest.mark.parametrize("by_lengths", [False, True])
def test_attention_of_grouped_heads_is_priced_by_its_flops(by_lengths: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 refuses to count it; where segments are counted as if all were longest, it would be kept first."""

    def refuse(*shapes: object) -> int:
        raise AssertionError

    monkeypatch.setattr("torch.utils.flop_counter.sdpa_flop_count", refuse)
    before = dict(flop_registry)
    monkeypatch.setattr(decoder, "takes_lengths", lambda device, dtype, head_dim: by_lengths)
    batch = {"tokens_bt": torch.zeros(2, 64, dtype=torch.int64)}
    if by_lengths:
        batch |= {
            "segments_bt": torch.arange(64).expand(2, 64) // 8,
            "positions_bt": torch.arange(64).expand(2, 64) % 8,
        }
        batch["segment_lengths_bs"] = torch.full((2, 8), 8)
    joint = trace_on_flash(monkeypatch, batch, (4, 2), 256, 1024)
    assert any("flash_attention_backward" in str(target) for target in targets(joint.module.graph))
    curve = list(residual_candidates(joint, (0.15, 0.3, 0.6, 0.8)))
    keeps_attention = [any("_attention" in str(node.args[0]) for node in kept) for kept in curve]
    # A byte of a matrix product of width 256 takes 256 FLOPs to compute again, one of attention over 64 positions 64.
    assert keeps_attention == [False, False, False, True]
    assert flop_registry == before


def test_the_largest_products_are_those_that_take_longest_to_repeat() -> None:
    def fn(params: Params, x: Tensor, ctx: Context) -> Tensor:
        wide = torch.tanh(x @ params["wide"])
        narrow = torch.addmm(params["bias"], wide, params["narrow"])
        return torch.tanh(narrow) * torch.sin(x @ params["square"])

    shapes = {"wide": (6, 20), "narrow": (20, 4), "bias": (4,), "square": (6, 4)}
    params = {name: torch.randn(shape) for name, shape in shapes.items()}
    joint = trace(Sample(fn, params, torch.randn(5, 6), {}, torch.randn(5, 4)))
    kept = list(product_candidates(joint, (1, 2, 3, 4)))
    assert [[tuple(node.meta["val"].shape) for node in nodes] for nodes in kept] == [
        [(5, 20)],
        [(5, 20), (5, 4)],
        [(5, 20), (5, 4), (5, 4)],
    ], "1,200 FLOPs, 800, 240, and no fourth one"
    assert [node.target for node in kept[1]] == [aten.mm.default, aten.addmm.default]
    called = [targets(backward_graph(joint, nodes)) for nodes in kept]
    counts = [sum(target in (aten.mm.default, aten.addmm.default) for target in some) for some in called]
    assert counts == [counts[0], counts[0] - 1, counts[0] - 2]


def test_products_are_kept_before_attention_at_real_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,024 positions attention's output takes half as many FLOPs a byte as a product of width 2,048."""
    batch = {"tokens_bt": torch.zeros(2, 1024, dtype=torch.int64)}
    for width, wide, heads in ((2048, 11008, (16, 2)), (4096, 14336, (32, 8)), (3584, 18944, (28, 4))):
        joint = trace_on_flash(monkeypatch, batch, heads, width, wide)
        (kept,) = residual_candidates(joint, COMPILED_BUDGETS)
        called = targets(backward_graph(joint, kept))
        assert FLASH.default in called, "attention again"
        all_again, none_again = (targets(backward_graph(joint, some)) for some in ([], keep_all(joint)))
        counts = [sum(target is aten.mm.default for target in some) for some in (called, none_again, all_again)]
        assert counts[0] == counts[1] < counts[2], "no product again"


def test_a_product_that_backward_has_no_use_for_is_not_kept() -> None:
    """The last product of a block, and one of weights alone."""
    sample = small_sample(lambda p, x, ctx: torch.tanh(x @ (p["w"] @ p["w"])) @ p["w"])
    ((kept,),) = product_candidates(trace(sample), (1, 2))
    assert kept.target is aten.mm.default
    users = {node.target for node in kept.users}
    assert users == {aten.tanh.default}
