import errno
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from lazytrain.errors import ModelFileError
from lazytrain.export import check_target, export_model, plan_export, with_dtype
from lazytrain.shards import INDEX, open_model_dir
from lazytrain.tensorwriter import TensorSpec

CONFIG = {"model_type": "llama", "torch_dtype": "float32", "x": "ü"}


def make_tensors(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(2)
    shapes = {"model.embed_tokens.weight": (12, 8), "a": (8, 8), "b": (3, 8), "scalar": (), "none": (0, 4), "c": (8, 8)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def plan_of(tensors, **options):
    return plan_export([TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()], **options)


def export(directory, tensors, **options):
    return export_model(directory, plan_of(tensors, max_shard_bytes=200), tensors.items(), config=CONFIG, **options)


def hidden(directory):
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


def test_export_reads_back_equal_in_shards(tmp_path):
    tensors = make_tensors()
    path = export(tmp_path / "out", tensors, metadata={"run": "7"})
    model = open_model_dir(path)
    assert all(torch.equal(model.read(name), tensor) for name, tensor in tensors.items())
    index = json.loads((path / INDEX).read_text())
    assert index["metadata"] == {"run": "7", "total_size": sum(t.nbytes for t in tensors.values())}
    assert list(index["weight_map"]) == list(tensors)
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert json.loads((path / "config.json").read_text()) == CONFIG | {"torch_dtype": "bfloat16"}
    assert set(load_file(path / "model-00001-of-00003.safetensors")) == {"model.embed_tokens.weight"}
    assert not hidden(tmp_path)


def test_one_shard_has_no_index(tmp_path):
    tensors = make_tensors()
    path = export_model(tmp_path / "out", plan_of(tensors), tensors.items(), config=CONFIG)
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "lazytrain_checksums.json", "model.safetensors"]
    assert load_file(path / "model.safetensors").keys() == tensors.keys()


def test_tensors_come_in_any_order_one_at_a_time(tmp_path):
    tensors = make_tensors()
    alive = []

    def generate():
        for name in reversed(tensors):
            tensor = tensors[name].clone()
            alive.append(tensor.data_ptr())
            yield name, tensor

    path = export_model(tmp_path / "out", plan_of(tensors, max_shard_bytes=100), generate(), config=CONFIG)
    model = open_model_dir(path)
    assert all(torch.equal(model.read(name), tensor) for name, tensor in tensors.items())
    assert len(alive) == len(tensors)


def test_plan_groups_by_size_and_gives_giants_their_own_shard():
    sizes = [10, 300, 5, 90, 5, 96]
    plan = plan_export([TensorSpec(str(i), torch.uint8, (size,)) for i, size in enumerate(sizes)], max_shard_bytes=100)
    assert [[spec.name for spec in specs] for _, specs in plan.shards] == [["0"], ["1"], ["2", "3", "4"], ["5"]]
    assert plan.total_bytes == sum(sizes)


def test_plan_refuses_what_could_not_be_saved_hours_later():
    spec = TensorSpec("a", torch.float32, (1,))
    with pytest.raises(ModelFileError, match="'a' can't be used twice"):
        plan_export([spec, TensorSpec("b", torch.uint8, (9,)), spec], max_shard_bytes=4)
    with pytest.raises(ModelFileError, match="complex128"):
        plan_export([TensorSpec("a", torch.complex128, (1,))])
    with pytest.raises(ModelFileError, match="no tensors"):
        plan_export([])


@pytest.mark.parametrize("change", ["missing", "extra", "dtype", "shape", "twice"])
def test_tensors_that_differ_from_the_plan_leave_nothing(tmp_path, change):
    tensors = make_tensors()
    plan, items = plan_of(tensors, max_shard_bytes=200), list(tensors.items())
    items = {
        "missing": items[:-1],
        "extra": [*items, ("d", torch.zeros(1))],
        "dtype": [(items[0][0], items[0][1].float()), *items[1:]],
        "shape": [(items[0][0], items[0][1].t()), *items[1:]],
        "twice": [items[0], *items],
    }[change]
    with pytest.raises(ModelFileError, match="planned"):
        export_model(tmp_path / "out", plan, items, config=CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_older_export_is_replaced_and_stays_readable_while_mapped(tmp_path):
    old, new = make_tensors(), make_tensors(torch.float32)
    path = export(tmp_path / "out", old)
    mapped = open_model_dir(path)
    view = mapped.read("a")
    export(tmp_path / "out", new)
    assert torch.equal(view, old["a"])
    assert torch.equal(open_model_dir(path).read("a"), new["a"])
    assert not hidden(tmp_path)


def test_base_model_and_foreign_directories_are_never_written(tmp_path):
    tensors = make_tensors()
    base = export(tmp_path / "models/base", tensors)
    (tmp_path / "link").symlink_to(base)
    before = {path: path.read_bytes() for path in base.iterdir()}
    for target in (base, base / "out", tmp_path / "models", tmp_path / "link", tmp_path / "models/base/../base"):
        with pytest.raises(ModelFileError, match="base model"):
            export(target, tensors, base_dir=base)
    assert {path: path.read_bytes() for path in base.iterdir()} == before
    (base / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for target in (base, tmp_path / "file"):
        with pytest.raises(ModelFileError, match="not an export of LazyTrain"):
            check_target(target)
    assert check_target(tmp_path / "new") == (tmp_path / "new").resolve()


def test_directory_with_shards_of_others_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="not an export"):
        check_target(tmp_path)


def test_side_files_are_copied_and_others_refused(tmp_path):
    tensors = make_tensors()
    for name in ("tokenizer.json", "notes.txt"):
        (tmp_path / name).write_text(name)
    path = export(tmp_path / "out", tensors, side_files=[tmp_path / "tokenizer.json"])
    assert (path / "tokenizer.json").read_text() == "tokenizer.json"
    with pytest.raises(ModelFileError, match=r"notes\.txt"):
        export(tmp_path / "out2", tensors, side_files=[tmp_path / "notes.txt"])


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failed_write_leaves_the_old_export(tmp_path, monkeypatch, call, code):
    old = make_tensors()
    path = export(tmp_path / "out", old)
    calls, real = [], getattr(os, call)

    def fail(*args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError(code, "failed")
        return real(*args)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(ModelFileError, match=r"Writing the model \(0.00 GiB\)") as caught:
        export(tmp_path / "out", make_tensors(torch.float32))
    monkeypatch.undo()
    assert ("GiB free" in str(caught.value)) == (code == errno.ENOSPC)
    assert torch.equal(open_model_dir(path).read("a"), old["a"])
    assert not hidden(tmp_path)


def test_full_disk_is_found_before_the_first_tensor(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    tensors = make_tensors()
    with pytest.raises(ModelFileError, match="No space left"):
        export_model(tmp_path / "out", plan_of(tensors), (pytest.fail("made a tensor") for _ in "a"), config=CONFIG)


def test_config_gets_the_type_of_most_bytes():
    plan = plan_export([TensorSpec("a", torch.float32, (2,)), TensorSpec("b", torch.bfloat16, (9,))])
    assert with_dtype({"dtype": "float16"}, plan) == {"dtype": "bfloat16"}
    assert with_dtype({}, plan) == {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_export_with_equal_logits(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "base")
    base = open_model_dir(tmp_path / "base")
    tensors = {name: base.read(name) for name in base.tensors}
    plan = plan_of(tensors, max_shard_bytes=4000)
    path = export_model(
        tmp_path / "out", plan, tensors.items(), config=base.config, side_files=base.side_files, base_dir=base.path
    )
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.arange(9)[None]
    assert loaded.dtype == torch.float32
    assert len(plan.shards) > 1
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
