"""What the README and the docstrings show runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re

import pytest
import torch
from torch import nn

import torchcompat
from tests.conftest import ROOT

BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
MODULES = [
    module.name
    for module in pkgutil.walk_packages(torchcompat.__path__, "torchcompat.")
    if not re.search(r"\.since_|__main__", module.name)
]


class Net(nn.Sequential):
    """A model for the README's FSDP examples."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


@pytest.fixture
def one_process(tmp_path):
    """A process group of one."""
    distributed = pytest.importorskip("torch.distributed")
    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_the_readme_has_the_examples_tested_here():
    assert len(BLOCKS) == 3


def test_first_example(capsys):
    exec(BLOCKS[0], {})
    assert "size=(2048, 64)" in capsys.readouterr().out


@pytest.mark.since((2, 2), why="FSDP1 cannot run on CPU before")
@pytest.mark.parametrize("blocks", [BLOCKS[1:2], BLOCKS[1:]], ids=["hook", "param_init_fn"])
@pytest.mark.filterwarnings("ignore:.*(FSDP|FullyShardedDataParallel|NO_SHARD|sharding)")
def test_fsdp_examples(one_process, blocks):
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(1)
    eager = Net()
    names = {
        "build_model": Net,
        "policy": ModuleWrapPolicy({nn.Sequential}),
        "device": torch.device("cpu"),
    }
    torch.manual_seed(1)
    exec(blocks[0], names)
    if len(blocks) > 1:
        torch.manual_seed(1)
        exec(blocks[1], names)
    x = torch.ones(2, 4)
    assert torch.equal(names["model"](x), eager(x))


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
