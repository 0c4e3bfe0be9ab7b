"""Under both names there is one module object, in whichever way and order it is imported."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import torchcompat
import torchdistx

STATEMENTS = (
    "import torchdistx.fake as a; import torchcompat.fake as b",
    "from torchdistx import fake as a; from torchcompat import fake as b",
    "import torchdistx; a = torchdistx.fake; import torchcompat.fake as b",
    "import torchcompat.fake as b; import torchdistx.fake as a",
    "import torchdistx.fake; from torchdistx import fake as a; from torchcompat import fake as b",
    "from torchdistx import deferred_init as a; from torchcompat import deferred_init as b",
    "from torchdistx.deferred_init import _C as a; from torchcompat.deferred_init import _C as b",
    "from torchdistx.deferred_init import _C as a; from torchdistx import _C as b",
    "import torchdistx; a = torchdistx.optimizers; from torchcompat import optimizers as b",
    "import torchdistx as t; a = t.optimizers.AnyPrecisionAdamW\n"
    "from torchcompat.optimizers import AnyPrecisionAdamW as b",
    "from torchdistx.slowmo import slowmo_comm as a; import torchcompat.slowmo.slowmo_comm as b",
    "import torchdistx.slowmo.slowmo_comm as a; import torchcompat.slowmo.slowmo_comm as b",
    "import torchdistx.gossip_grad as a; import torchcompat.gossip_grad as b",
)


@pytest.mark.parametrize("statement", STATEMENTS)
def test_one_object(fresh, statement):
    fresh(f"{statement}\nassert a is b, (a, b)")


def test_every_public_part_has_its_marker():
    def parts(package):
        found = {module.name for module in pkgutil.iter_modules(package.__path__)}
        return {name for name in found if not name.startswith("_")}

    assert parts(torchdistx) == set(torchdistx.__all__) == set(torchcompat.__all__)
    assert set(torchcompat.__all__) <= parts(torchcompat)


@pytest.mark.parametrize("part", torchcompat.__all__)
def test_every_part_imports(part):
    ours, alias = (
        importlib.import_module(f"{name}.{part}") for name in ("torchcompat", "torchdistx")
    )
    assert ours is alias
    assert getattr(torchcompat, part) is getattr(torchdistx, part)


def test_every_submodule_is_the_same_object(fresh):
    fresh("""
import importlib, pkgutil, torchcompat, torchdistx
for part in torchdistx.__all__:
    module = importlib.import_module("torchdistx." + part)
    for child in pkgutil.iter_modules(getattr(module, "__path__", ())):
        name = part + "." + child.name
        ours = importlib.import_module("torchcompat." + name)
        assert importlib.import_module("torchdistx." + name) is ours, name
""")


@pytest.mark.parametrize(
    "name",
    ["torchdistx", "torchdistx.deferred_init", "torchdistx.optimizers.anyprecision_optimizer"],
)
def test_find_spec(fresh, name):
    code = f"from importlib.util import find_spec\nassert find_spec({name!r}) is not None\n"
    fresh(f"{code}import {name}\n{code}")


def test_find_spec_of_what_is_not_there(fresh):
    fresh("from importlib.util import find_spec\nassert find_spec('torchdistx.nothing') is None")


def test_reload(fresh):
    fresh("""
import importlib, torchcompat.fake, torchdistx, torchdistx.fake
assert importlib.reload(torchdistx.fake) is torchcompat.fake is torchdistx.fake
assert importlib.reload(torchdistx).fake is torchcompat.fake
""")


def test_pickles_of_the_old_name(fresh):
    fresh(r"""
import pickle
old = pickle.loads(b"ctorchdistx.optimizers.anyprecision_optimizer\nAnyPrecisionAdamW\n.")
from torchcompat.optimizers import AnyPrecisionAdamW
assert old is AnyPrecisionAdamW
assert pickle.loads(pickle.dumps(old)) is old
""")


def test_two_threads_import_one_object(fresh):
    fresh("""
import importlib, threading, torch
names = ["torchdistx.fake", "torchcompat.fake"] * 4
found = []
threads = [
    threading.Thread(target=lambda n=n: found.append(importlib.import_module(n))) for n in names
]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(found) == 8 and len(set(map(id, found))) == 1
""")


def test_importable_without_metadata(fresh):
    package = str(Path(torchdistx.__file__).parent.parent)
    fresh(f"""
import sys
sys.path = [path for path in sys.path if path != {package!r}]
sys.path.append({package!r})
import torchdistx
assert torchdistx.__version__ and torchdistx.fake.is_fake
""")


def test_no_such_part():
    with pytest.raises(AttributeError, match="nothing"):
        torchdistx.nothing  # noqa: B018
    assert set(torchdistx.__all__) <= set(dir(torchdistx))
