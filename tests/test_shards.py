import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from lazytrain.base import Model, ParamSpec, Unit
from lazytrain.errors import ModelFileError
from lazytrain.shards import INDEX, check_params, open_model_dir, resolve_tied

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def make_weights():
    generator = torch.Generator().manual_seed(1)
    names = {EMBED: (11, 4), "model.layers.0.w": (4, 4), "model.layers.1.w": (4, 4), NORM: (4,), HEAD: (11, 4)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in names.items()}


def save_model(path, shards, config=None, weight_map=None):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {"model_type": "qwen2"}))
    for shard, tensors in shards.items():
        save_file(tensors, path / shard, {"format": "pt"})
    if len(shards) > 1 or weight_map is not None:
        own = {name: shard for shard, tensors in shards.items() for name in tensors}
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map or own}
        (path / INDEX).write_text(json.dumps(index))
    return path


@pytest.fixture
def weights():
    return make_weights()


@pytest.fixture
def sharded(tmp_path, weights):
    names = list(weights)
    shards = {FIRST: {n: weights[n] for n in names[:3]}, SECOND: {n: weights[n] for n in names[3:]}}
    return save_model(tmp_path / "model", shards)


def make_model(tied=False, **changes):
    specs = {"embed": (11, 4), "w0": (4, 4), "w1": (4, 4), "norm": (4,), "head": (11, 4)} | changes
    spec = {key: ParamSpec(full_name=name, shape=specs[key]) for key, name in zip(specs, make_weights())}

    def unit(name, **params):
        return Unit(name=name, kind=name, fn=lambda *args: None, params=params)

    return Model(
        embed=unit("embed", e=spec["embed"]),
        blocks=(unit("block", w=spec["w0"]), unit("block", w=spec["w1"])),
        head=unit("head", n=spec["norm"], h=spec["embed"] if tied else spec["head"]),
        tied={"h": "e"} if tied else {},
    )


def edit_index(path, **changes):
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] |= changes
    (path / INDEX).write_text(json.dumps(index))


def test_sharded_and_single_models_read_the_same(tmp_path, sharded, weights):
    single = save_model(tmp_path / "single", {"model.safetensors": weights})
    for path in (sharded, single, str(single)):
        model = open_model_dir(path)
        assert model.config == {"model_type": "qwen2"}
        assert model.generation_config is None
        assert all(torch.equal(model.read(name), tensor) for name, tensor in weights.items())
        assert model.read(EMBED, torch.float32).dtype == torch.float32
        assert model.tensors[EMBED].shape == (11, 4)
    assert open_model_dir(sharded).tensors[NORM].shard == SECOND
    with pytest.raises(ModelFileError, match="'absent'"):
        open_model_dir(sharded).read("absent")


def test_one_file_named_by_an_index_is_read(tmp_path, weights):
    path = save_model(
        tmp_path / "m", {"model.safetensors": weights}, weight_map=dict.fromkeys(weights, "model.safetensors")
    )
    assert len(open_model_dir(path).tensors) == len(weights)


def test_side_files_and_generation_config_are_found(sharded):
    (sharded / "tokenizer.json").write_text("{}")
    (sharded / "generation_config.json").write_text('{"eos_token_id": 7}')
    (sharded / "README.md").write_text("no")
    model = open_model_dir(sharded)
    assert [path.name for path in model.side_files] == ["generation_config.json", "tokenizer.json"]
    assert model.generation_config == {"eos_token_id": 7}


def test_all_missing_shards_are_listed_at_once(sharded):
    edit_index(sharded, other="model-00003-of-00003.safetensors")
    (sharded / FIRST).unlink()
    with pytest.raises(ModelFileError, match=f"2 of 3 shards are missing: {FIRST}, model-00003"):
        open_model_dir(sharded)


def test_all_foreign_shards_are_named_at_once(sharded):
    (sharded / FIRST).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (sharded / SECOND).write_bytes(b"<html></html>")
    with pytest.raises(ModelFileError, match=rf"(?s){FIRST}.*LFS pointer \(43 bytes\).*{SECOND}.*HTML"):
        open_model_dir(sharded)


def test_index_and_headers_that_disagree_name_tensor_and_shard(sharded):
    edit_index(sharded, ghost=FIRST)
    with pytest.raises(ModelFileError, match=f"ghost is not in {FIRST}, where the index has it"):
        open_model_dir(sharded)


def test_tensor_that_the_index_lacks_is_named(sharded):
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"][NORM]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=f"{NORM} is in {SECOND}, but not in the index"):
        open_model_dir(sharded)


def test_tensor_in_two_shards_is_named(sharded, weights):
    save_file({NORM: weights[NORM], HEAD: weights[HEAD], EMBED: weights[EMBED]}, sharded / SECOND)
    with pytest.raises(ModelFileError, match=f"{EMBED} is both in {FIRST} and in {SECOND}"):
        open_model_dir(sharded)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "a\0b", "a\nb"]
)
def test_names_with_path_parts_are_refused(sharded, name):
    edit_index(sharded, ghost=name)
    with pytest.raises(ModelFileError, match="not a plain file name"):
        open_model_dir(sharded)


@pytest.mark.parametrize("name", [FIRST, "config.json", INDEX, "tokenizer.json"])
def test_symlinks_that_leave_the_directory_are_refused(tmp_path, sharded, name):
    (sharded / "tokenizer.json").write_text("{}")
    (sharded / name).rename(tmp_path / "outside")
    (sharded / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ModelFileError, match="leaves the directory"):
        open_model_dir(sharded)


def test_symlinks_inside_and_in_the_hub_cache_are_followed(tmp_path, sharded, weights):
    (sharded / FIRST).rename(sharded / "real")
    (sharded / FIRST).symlink_to("real")
    assert torch.equal(open_model_dir(sharded).read(EMBED), weights[EMBED])
    (sharded / FIRST).unlink()
    (sharded / "real").rename(sharded / FIRST)
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "1234"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in list(sharded.iterdir()):
        file.rename(blobs / f"hash-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash-{file.name}")
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, tmp_path / "link"):
        assert torch.equal(open_model_dir(path).read(EMBED), weights[EMBED])
    with pytest.raises(ModelFileError, match="snapshots folder"):
        open_model_dir(tmp_path / "models--a--b")


def test_directory_of_other_formats_is_named(tmp_path, sharded):
    shutil.copy(sharded / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelFileError, match=r"pytorch_model.bin \(4 bytes\).*save_pretrained"):
        open_model_dir(tmp_path)
    with pytest.raises(ModelFileError, match="not a directory"):
        open_model_dir("some/hub-model")


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, "version https://git-lfs"])
def test_config_and_index_that_are_no_json_objects_are_refused(sharded, content):
    for name in (INDEX, "config.json"):
        (sharded / name).write_text(content)
        with pytest.raises(ModelFileError, match=f"{name}.*(JSON|read)"):
            open_model_dir(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 1}, {"a": None}])
def test_wrong_weight_maps_are_refused(sharded, weight_map):
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelFileError, match="weight_map"):
        open_model_dir(sharded)


def test_two_descriptions_of_one_model_are_refused(sharded, weights):
    save_file(weights, sharded / "model.safetensors")
    with pytest.raises(ModelFileError, match="doesn't name it"):
        open_model_dir(sharded)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq, 4 bits"),
        ({"quantization": {"bits": 4}}, "4 bits"),
    ],
)
def test_quantized_models_are_refused_by_name(tmp_path, weights, config, text):
    path = save_model(tmp_path / "m", {"model.safetensors": weights}, config)
    with pytest.raises(ModelFileError, match=text):
        open_model_dir(path)


def test_unquantized_config_with_null_entry_is_read(tmp_path, weights):
    assert open_model_dir(save_model(tmp_path / "m", {"model.safetensors": weights}, {"quantization_config": None}))


def test_tied_head_is_absent_equal_or_an_error(tmp_path, weights):
    def opened(**tensors):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        return open_model_dir(save_model(path, {"model.safetensors": tensors}))

    embed = weights[EMBED]
    absent = opened(**{EMBED: embed})
    assert not resolve_tied(absent, True)
    with pytest.raises(ModelFileError, match="tie_word_embeddings"):
        resolve_tied(absent, False)
    equal = opened(**{EMBED: embed, HEAD: embed.clone()})
    assert resolve_tied(equal, True)
    assert not resolve_tied(equal, False)
    for other in (embed + 1, embed.float(), embed[:5]):
        different = opened(**{EMBED: embed, HEAD: other.clone()})
        assert not resolve_tied(different, False)
        with pytest.raises(ModelFileError, match="they differ"):
            resolve_tied(different, True)


def test_one_different_bit_in_a_tied_head_is_found(tmp_path, weights):
    head = weights[EMBED].clone()
    head.view(torch.int16)[-1, -1] ^= 1
    path = save_model(tmp_path / "m", {"model.safetensors": {EMBED: weights[EMBED], HEAD: head}})
    with pytest.raises(ModelFileError, match="they differ"):
        resolve_tied(open_model_dir(path), True)


def test_fitting_params_pass_and_rotary_buffers_are_noted(tmp_path, weights, sharded):
    assert check_params(make_model(), open_model_dir(sharded)) == []
    more = weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    more[HEAD] = weights[EMBED].clone()
    path = save_model(tmp_path / "old", {"model.safetensors": more})
    tied_notes = check_params(make_model(tied=True), open_model_dir(path))
    assert len(tied_notes) == 2
    assert "tied" in tied_notes[0]
    assert "rotary" in tied_notes[1]


def test_params_that_do_not_fit_are_all_listed(tmp_path, weights):
    weights[NORM] = torch.ones(5, dtype=torch.bfloat16)
    weights["model.layers.1.w"] = torch.ones(4, 4, dtype=torch.float8_e4m3fn)
    weights["model.layers.2.w"] = weights.pop("model.layers.0.w")
    path = save_model(tmp_path / "m", {"model.safetensors": weights})
    with pytest.raises(ModelFileError) as caught:
        check_params(make_model(), open_model_dir(path))
    text = str(caught.value)
    for part in (
        "1 tensors are missing:\n  model.layers.0.w",
        f"{NORM}: [5], expected [4]",
        "model.layers.1.w: torch.float8_e4m3fn",
        "unknown to this architecture:\n  model.layers.2.w",
    ):
        assert part in text


def test_nothing_is_read_before_the_headers_fit(tmp_path, weights, monkeypatch):
    path = save_model(tmp_path / "m", {"model.safetensors": weights})
    model_dir = open_model_dir(path)
    monkeypatch.setattr("lazytrain.tensorfile.TensorFile.raw", lambda *_: pytest.fail("read a tensor"))
    with pytest.raises(ModelFileError, match=r"\[4, 4\], expected \[4, 5\]"):
        check_params(make_model(w1=(4, 5)), model_dir)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "num_tensors"),
    [
        ("Devstral-Small-2507-24B", 363),
        ("Llama-3.1-8B-4shards", 291),
        ("Qwen3-1.7B", 310),
        ("cogito-qwen2.5-14B", 579),
        ("gemma-2b", 164),
        ("Qwen3-14B-MLX-4bit", None),
    ],
)
def test_real_indexes_are_read_or_refused(tmp_path, shared_dir, name, num_tensors):
    shutil.copyfile(shared_dir / "data/index" / f"{name}.{INDEX}", tmp_path / INDEX)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    (tmp_path / "config.json").write_text("{}")
    if num_tensors is None:
        with pytest.raises(ModelFileError, match=r"quantized model .*scales"):
            open_model_dir(tmp_path)
        return
    shards = sorted(set(weight_map.values()))
    with pytest.raises(ModelFileError) as caught:
        open_model_dir(tmp_path)
    assert all(shard in str(caught.value) for shard in shards)
    for shard in shards:
        save_file({key: torch.ones(1) for key, value in weight_map.items() if value == shard}, tmp_path / shard)
    assert len(open_model_dir(tmp_path).tensors) == num_tensors


@pytest.mark.data
def test_real_model_reads_as_with_the_library(shared_dir):
    from safetensors.torch import load_file

    path = shared_dir / "data/models/stories260K"
    model, expected = open_model_dir(path), load_file(path / "model.safetensors")
    assert model.tensors.keys() == expected.keys()
    assert all(torch.equal(model.read(name), tensor) for name, tensor in expected.items())
    assert {side.name for side in model.side_files} == {
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_opening_reads_headers_only(sharded, monkeypatch):
    num_read = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda *args: num_read.append(args[1]) or real(*args))
    monkeypatch.setattr("lazytrain.tensorfile.TensorFile.raw", lambda *_: pytest.fail("read a tensor"))
    open_model_dir(sharded)
    assert sum(num_read) < 4 * 1024
