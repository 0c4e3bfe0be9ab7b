"""Importing the package changes nothing, brings nothing along, costs little, fails only one way."""

from __future__ import annotations

import json

import pytest

# Prints what an import changed: attributes of torch's modules and classes, and modules loaded.
OBSERVE = """
import json, sys, types
import torch, packaging.version
def attributes():
    found = {{}}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = id(value)
            # isinstance would ask some objects for their class, at which they warn.
            if issubclass(type(value), type) and value.__module__.partition(".")[0] == "torch":
                found.update({{(name, key, k): id(v) for k, v in list(vars(value).items())}})
    return found

attributes_before, modules_before = attributes(), set(sys.modules)
hooks_before = list(sys.meta_path), list(sys.path_hooks), sys.excepthook
{statement}
attributes_after = attributes()
changed = [key for key, value in attributes_before.items() if attributes_after.get(key) != value]
if (list(sys.meta_path), list(sys.path_hooks), sys.excepthook) != hooks_before:
    changed.append("import hooks")
print(json.dumps({{"changed": changed, "loaded": sorted(set(sys.modules) - modules_before)}}))
"""

IMPORTS = (
    "import torchcompat",
    "import torchdistx",
    "from torchcompat import deferred_init, fake",
    "from torchdistx import deferred_init, fake",
)


def observe(fresh, statement: str) -> dict[str, list[str]]:
    return json.loads(fresh(OBSERVE.format(statement=statement)))


@pytest.mark.parametrize("statement", IMPORTS)
def test_patches_nothing(fresh, statement):
    assert observe(fresh, statement)["changed"] == []


@pytest.mark.parametrize(
    "statement",
    [
        "torch.nn.init.normal_ = print",
        "torch.Tensor.__repr__ = print",
        "torch.cuda._lazy_init = print",
        "sys.meta_path.append(object())",
    ],
)
def test_a_patch_is_noticed(fresh, statement):
    assert len(observe(fresh, statement)["changed"]) >= 1


def heavy(loaded: list[str]) -> list[str]:
    """Return the modules that importing the core has no business to load."""
    roots = ("torch.distributed", "torch._dynamo", "torch.fx", "sympy", "numpy", "tqdm")
    parts = ("optimizers", "slowmo", "gossip_grad")
    unwanted = [
        *roots,
        *(f"{name}.{part}" for name in ("torchcompat", "torchdistx") for part in parts),
    ]
    return [name for name in loaded if any(f"{name}.".startswith(f"{root}.") for root in unwanted)]


@pytest.mark.parametrize("statement", IMPORTS)
def test_brings_nothing_along(fresh, statement):
    loaded = observe(fresh, statement)["loaded"]
    assert any(name.startswith("torchcompat") for name in loaded)
    assert heavy(loaded) == []


def test_what_is_brought_along_is_noticed(fresh):
    loaded = observe(fresh, "import torchcompat.optimizers")["loaded"]
    assert heavy(loaded)


def test_recording_a_plain_model_brings_nothing_along(fresh):
    statement = """
from torch import nn
from torchcompat.deferred_init import deferred_init, materialize_module
deferred_init(nn.Sequential, nn.Linear(3, 3), nn.LayerNorm(3))
deferred_init(nn.Linear, 3, 3)
def norms():
    normed = nn.utils.parametrizations
    nn.init.sparse_(torch.empty(3, 4), 0.3), nn.init.orthogonal_(torch.empty(3, 4))
    return normed.spectral_norm(nn.Linear(3, 3)), normed.orthogonal(nn.Linear(3, 3))
deferred_init(norms)
"""
    loaded = observe(fresh, statement)["loaded"]
    unwanted = ("sympy", "torch._dynamo", "torch.distributed.tensor")
    assert [
        name for name in loaded if f"{name}.".startswith(tuple(f"{u}." for u in unwanted))
    ] == []


def test_costs_under_50_ms(fresh):
    # Compiled once, and without a collection of torch's heap, which may come at any time.
    code = """
import gc, time
gc.disable()
start = time.process_time()
import torchdistx
from torchcompat import deferred_init, fake
print(time.process_time() - start)
"""
    assert min(float(fresh(code)) for _ in range(5)) < 0.05


def test_the_submodules_are_modules(fresh):
    fresh("""
import types, torchcompat
assert isinstance(torchcompat.deferred_init, types.ModuleType)
assert isinstance(torchcompat.fake, types.ModuleType)
from torchcompat import deferred_init
assert deferred_init is torchcompat.deferred_init
assert "deferred_init" in dir(torchcompat)
assert not hasattr(torchcompat, "no_such_part")
""")


@pytest.mark.parametrize("version", ["1.12.1", "0.4.1", "parrot"])
@pytest.mark.parametrize("package", ["torchcompat", "torchdistx", "torchdistx.fake"])
def test_an_unsupported_torch_is_an_import_error(fresh, version, package):
    output = fresh(f"""
import torch
torch.__version__ = {version!r}
try:
    import {package}
except ImportError as error:
    print(error)
""")
    assert version in output


def test_no_warning(run_python):
    run_python(args=("-W", "error", "-c", "import torchdistx.fake, torchdistx.deferred_init"))
