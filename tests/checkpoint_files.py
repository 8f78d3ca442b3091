"""Small checkpoints for tests."""

import warnings

import torch

from lazytrain.checkpoint import latest_valid
from lazytrain.store_saving import save_checkpoint


def make_files(value):
    generator = torch.Generator().manual_seed(value)
    return [
        ("embed.safetensors", {"w": torch.randn(7, 3, generator=generator).bfloat16(), "t": torch.tensor(value)}),
        ("block_0.states", lambda: {"w": torch.randn(123, generator=generator), "m": torch.zeros(0)}),
    ]


def save(run_dir, step, keep=2, meta=None):
    return save_checkpoint(run_dir, step, make_files(step), meta or {"step": step}, keep=keep)


def assert_whole(checkpoint):
    """Check that a checkpoint holds what `save` wrote for its step."""
    assert checkpoint.meta == {"step": checkpoint.step}
    for name, tensors in make_files(checkpoint.step):
        file = checkpoint.open_file(name)
        expected = tensors() if callable(tensors) else tensors
        assert file.tensors.keys() == expected.keys()
        assert all(torch.equal(file.read(key), tensor) for key, tensor in expected.items())


def steps(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def latest_without_warning(run_dir):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return latest_valid(run_dir)
