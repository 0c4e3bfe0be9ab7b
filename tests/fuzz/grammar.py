"""Writing random constructor programs that eager torch accepts.

A statement is made from a template: `{x}` stands for a live tensor, `{new}` for a fresh name,
`{n}` for a number, and so on. Each statement is tried at once in a live eager namespace; what
torch refuses is left out, or kept as a statement that must fail. So the grammar knows no rule of
torch, and yet every program is valid. The random source only needs the methods of
`random.Random`, so hypothesis can drive it too.

What eager torch itself answers by accident of its bookkeeping is no oracle. `Rules` keeps it out,
which makes this a list of what the fuzz does not look for:

- `.data =`, `set_`, `t_`, `squeeze_` and `unsqueeze_` on a tensor with a history, and `set_` to or
  from a tensor that requires grad: the graph goes on describing the memory that was there before;
- `set_` and `.data =` between tensors of inference mode and others;
- a view whose base came to require grad later, or no longer does, or that was taken under `no_grad`
  of a tensor that requires grad: such a view requires grad and has no `grad_fn`, until something
  looks. It is deleted, with the modules that hold it;
- after the construction, `.data =` and `set_` on what may be a real tensor: they would hand torch
  itself a fake, and no Python code is asked;
- writes through `.data`, `numpy()` or what was set to the same memory, into real memory that a
  graph has saved: eager gradients then come from the new values, and no version counter tells;
- comparisons of a real tensor with a deferred one by `==` or `<`: Python has the subclass compare
  first, and how a result lies in memory depends on the first operand;
- tensors of inference mode that require grad: kernels that copy give them a graph, others do not;
- `as_strided` of a view in a graph: what it reaches outside the view gets a gradient only once the
  view's graph is made anew;
- `out=` of another size, where others share its memory: they disagree on its size;
- `copy_` from another shape and dtype, which reads what is not there on torch 1.13;
- `torch.normal` of means that are integers, which 2.1 and later accept where there are none;
- errors that depend on the values in an index: they come when the values do.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from typing import Any

import torch
from torch import nn

SHAPES = (
    "()",
    "(1,)",
    "(3,)",
    "(16,)",
    "(17,)",
    "(35,)",
    "(2, 3)",
    "(4, 4)",
    "(2, 2, 3)",
    "(0, 2)",
    "(3, 8)",
)
NUMBERS = ("0", "1", "-1", "2", "0.5", "-0.75", "3.25", "1e-3")
DTYPES = (
    "float32",
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "uint8",
    "bool",
    "complex64",
)

FACTORIES = """
{new} = torch.zeros({s})
{new} = torch.ones({s}, dtype={d})
{new} = torch.full({s}, {n})
{new} = torch.rand({s})
{new} = torch.rand({s}, dtype={d})
{new} = torch.randn({s})
{new} = torch.randn({s}, dtype={d})
{new} = torch.randn({s}, requires_grad=True)
{new} = torch.arange({i}, {i} + 6)
{new} = torch.arange(12, dtype={d}).reshape(3, 4)
{new} = torch.linspace({n}, 2, 5)
{new} = torch.eye(3, dtype={d})
{new} = torch.tensor([1.5, {n}, -2.0])
{new} = torch.tensor([[1, 2], [3, {i}]], dtype={d})
{new} = torch.tensor({n})
{new} = torch.empty({s}, dtype={d}).fill_({n})
{new} = torch.empty({s}).normal_({n}, 2)
{new} = torch.empty({s}, dtype={d}).uniform_()
{new} = torch.empty_strided((3, 4), (1, 3)).uniform_(-1, 1)
{new} = torch.randint(0, 9, {s})
{new} = torch.randperm({i} + 4)
{new} = torch.Tensor(2, 3).fill_({n})
{new} = torch.FloatTensor(4).normal_()
{new} = torch.Tensor([1.0, {n}])
{new} = torch.zeros_like({x})
{new} = torch.full_like({x}, {n}, dtype={d})
{new} = torch.rand_like({x})
{new} = torch.randn_like({x}, dtype=torch.float64)
{new} = {x}.new_ones({s})
{new} = {x}.new_tensor([1, 2])
{new} = {x}.new_full((2,), {n})
{new} = torch.normal({x}, 0.5)
{new} = torch.bernoulli(torch.full({s}, 0.5))
{new} = torch.nn.functional.dropout({x}, 0.5)
{new} = torch.empty({s}).exponential_(2.0)
{new} = torch.empty({s}).bernoulli_(0.3)
{new} = torch.empty({s}).random_(0, 50)
{new} = torch.randn({s}, generator={g})
{new} = torch.empty({s}).uniform_(generator={g})
"""

VIEWS = """
{new} = {x}[0]
{new} = {x}[-1:]
{new} = {x}[..., ::2]
{new} = {x}[{i}:]
{new} = {x}[:, 1]
{new} = {x}[None]
{new} = {x}.view(-1)
{new} = {x}.view(2, -1)
{new} = {x}.reshape(-1)
{new} = {x}.t()
{new} = {x}.T
{new} = {x}.transpose(0, -1)
{new} = {x}.permute(1, 0)
{new} = {x}.unsqueeze({i})
{new} = {x}.squeeze()
{new} = {x}.expand(3, *{x}.shape)
{new} = {x}.expand_as({y})
{new} = {x}.narrow(0, {i}, 1)
{new} = {x}.diagonal()
{new} = {x}.detach()
{new} = {x}.data
{new} = {x}.data.view(-1)[1:]
{new} = {x}.flatten()
{new} = {x}.unfold(0, 2, 1)
{new} = {x}.as_strided((2,), (1,), {x}.storage_offset() + {i})
{new} = {x}.view(torch.int32)
{new} = {x}.real
{new} = torch.view_as_real({x})
{new}, {new2} = {x}.split({i} + 1)[:2]
{new}, {new2} = {x}.chunk(2, -1)
{new}, {new2} = {x}.unbind(0)[:2]
{new} = {x}.contiguous()
{new} = {x}.to({d})
{new} = {x}.to(torch.float32)
{new} = {x}.requires_grad_()
"""

INPLACE = """
{x}.add_({n})
{x}.add_({y})
{x}.mul_({n})
{x}.mul_({y})
{x}.fill_({n})
{x}.zero_()
{x}.copy_({y})
{x}.copy_({y}.flatten()[0])
{x}.normal_()
{x}.normal_(0, 0.02)
{x}.uniform_(-1, 1)
{x}.exponential_()
{x}.bernoulli_(0.5)
{x}.random_(0, 20)
{x}.normal_(generator={g})
{x}.clamp_(-1, 1)
{x}.neg_()
{x}.tanh_()
{x}.tril_()
{x}.cumsum_(0)
{x}.sub_({y}, alpha=0.5)
{x}.masked_fill_({x} > 0, {n})
{x}.index_fill_(0, torch.tensor([0]), {n})
{x}[0] = {n}
{x}[0] = {y}
{x}[..., -1] = {y}
{x}[1:].mul_(2)
{x}[{x} > 0.5] = {n}
{x}[torch.tensor([0, 1])] = {n}
{x}.data.mul_(0.5)
{x}.data[0] = {n}
{x}.data.copy_({y})
{x}.detach().normal_()
{x}.flatten().add_(1)
{x}.t_()
{x}.unsqueeze_(0)
{x}.squeeze_()
{x}.detach_()
{x}.requires_grad_()
{x}.requires_grad_(False)
{x}.data = {y}
{x}.data = {y}.clone()
{x}.data = {x}.data.to({d})
{x}.set_({y})
{x} += {n}
{x} *= {y}
torch.add({x}, {y}, out={x})
torch.mul({x}, 2, out={y})
torch._foreach_add_([{x}, {y}], 1.0)
torch._foreach_mul_([{x}], [{y}])
nn.init.normal_({x}, std=0.02)
nn.init.uniform_({x})
nn.init.trunc_normal_({x}, std=0.02)
nn.init.trunc_normal_({x}, std=1.0, a=-1.0, b=1.0)
nn.init.kaiming_uniform_({x}, a=2.0)
nn.init.xavier_normal_({x})
nn.init.orthogonal_({x})
nn.init.constant_({x}, {n})
"""

VALUES = """
{new} = {x} + {y}
{new} = {x} * {y}
{new} = {x} * {n}
{new} = {x} - {n}
{new} = {x} / 3
{new} = {x} @ {y}
{new} = -{x}
{new} = {x}.exp()
{new} = {x} > {n}
{new} = torch.eq({x}, {y})
{new} = ~{x}
{new} = {x}.clone()
{new} = {x}.sum()
{new} = {x}.mean(-1, keepdim=True)
{new} = {x}.cumsum(0)
{new} = {x}.softmax(-1)
{new} = {x}.tril()
{new} = {x}.flip(0)
{new} = {x}.repeat(2, 1)
{new} = {x}.sort(-1)[0]
{new}, {new2} = {x}.max(-1)
{new} = {x}.where({x} > 0, {y})
{new} = {x}.masked_fill({x} > 0, {n})
{new} = {x}.index_select(0, torch.tensor([0, 0]))
{new} = {x}[torch.tensor([0, -1])]
{new} = torch.cat([{x}, {y}])
{new} = torch.stack([{x}, {x}])
{new} = torch.outer({x}.flatten(), {y}.flatten())
{new} = torch.einsum("i,j->ji", {x}.flatten(), {y}.flatten())
{new} = {x}.half()
{new} = {x}.double()
{new} = {x}.bfloat16()
{new} = {x}.float()
{new} = {x}.type_as({y})
{new} = copy.deepcopy({x})
{new} = nn.Parameter({x})
{new} = nn.Parameter({x}.clone())
{new} = nn.Parameter({x}.detach(), requires_grad=False)
{new} = torch._foreach_mul([{x}, {y}], 2.0)[0]
{new} = {x}.numpy().copy() if {x}.requires_grad else {x}.clone()
{new} = {m}.weight
{new} = torch.linalg.qr({x})[0]
del {x}
"""

READS = """
{seen} = {x}.sum().item()
{seen} = {x}.tolist()
{seen} = [float(e.sum()) for e in {x}]
{seen} = {x}.numpy().copy().tolist()
{seen} = bool(({x} > {n}).any())
{seen} = int({x}.flatten()[0])
{x}.add_(1) if {x}.sum().item() > 0 else {x}.mul_(2)
{new} = torch.ones(int({x}.abs().sum()) % 4)
{new} = {x}[{x} > 0]
{new} = {x}.nonzero()
{new} = torch.unique({x})
{new} = torch.tensor({x}.tolist())
{new} = {x}.masked_select({x} > 0)
{new} = torch.from_numpy({x}.numpy().copy())
{x}.numpy()[...] = 2
for row in {x}: row.add_(1)
torch.rand(1).item() > 0.5 and {x}.mul_(3)
"""

SEEDS = """
torch.manual_seed({i})
torch.rand({i} + 1)
torch.randn(20)
{gen} = torch.Generator().manual_seed({i})
{state} = torch.get_rng_state()
torch.set_rng_state({old})
with torch.random.fork_rng(devices=[]): {new} = torch.randn({s})
torch.set_default_dtype(torch.float64)
torch.set_default_dtype(torch.float32)
"""

MODULES = """
{mod} = nn.Linear(3, 4)
{mod} = nn.Linear(4, 3, bias=False)
{mod} = nn.Linear(16, 2)
{mod} = nn.Embedding(5, 3, padding_idx=1)
{mod} = nn.LayerNorm(4)
{mod} = nn.Conv1d(2, 3, 2)
{mod} = nn.BatchNorm1d(3)
{mod} = nn.GRUCell(2, 3)
{mod} = nn.LSTM(2, 3)
{mod} = nn.Sequential({m}, nn.Linear(2, 2))
{mod} = nn.ModuleList([{m}, {m}])
{mod} = copy.deepcopy({m})
{mod} = nn.utils.spectral_norm({m})
{m}.half()
{m}.double()
{m}.to(torch.bfloat16)
{m}.requires_grad_(False)
{m}.weight = nn.Parameter({x})
{m}.weight = {m}.weight
{m}.register_buffer("extra", {x})
{m}.register_buffer("hidden", {x}, persistent=False)
{m}.loose = {x}
{m}.listed = [{x}, {y}]
{m}.weight.mark = {i}
{m}.load_state_dict({m}.state_dict())
{m}.weight.data.normal_(0.0, 0.02)
{m}.weight.data[0].zero_()
{m}.weight.requires_grad_(False)
{m}.bias.data = {x}
{m}.reset_parameters()
{m}.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
nn.init.orthogonal_({m}.weight)
nn.init.normal_({m}.weight)
nn.init.zeros_({m}.bias)
"""

INSIDE = (
    (FACTORIES, 6),
    (VIEWS, 6),
    (INPLACE, 8),
    (VALUES, 5),
    (READS, 2),
    (SEEDS, 1),
    (MODULES, 4),
)
AFTER = ((INPLACE, 5), (VIEWS, 3), (VALUES, 3), (MODULES, 3), (FACTORIES, 1), (READS, 1))

# Errors that depend on shapes and autograd state alone: recording must raise them too.
MUST_FAIL = re.compile(
    "leaf Variable that requires grad|must match the size|is invalid for input of size"
    "|cannot be multiplied|view size is not compatible|match the broadcast shape"
    "|out of bounds for dimension|Dimension out of range|size mismatch"
)

_VALUE_ERROR = re.compile(r"torch\.tensor\(\[")  # an index of values, good or bad

_REBINDS = re.compile(
    r"([\w.]+)\.(data = |set_\(|t_\(|unsqueeze_\(|squeeze_\()((?:\w+)?(?:\.(?!clone|data)\w+)*)"
)
_OUTPUTS = re.compile(r"out=([\w.]+)\)")
_COPIES = re.compile(r"([\w.]+)\.copy_\((.+)\)$")
_UNCOUNTED = re.compile(r"([\w.]+)\.(?:data(?=[.\[].*(?:_\(| = ))|numpy\(\)\[)")
_NORMAL = re.compile(r"torch\.normal\(([\w.]+),")
_STRIDED = re.compile(r"([\w.]+)\.as_strided\(")
_GRAD_TURNS = re.compile(r"no_grad|requires_grad_\(")
_MAKES = re.compile(r"(\w+) = torch\.(?:zeros|ones|full|rand|randn|arange|linspace|eye|empty)\(")
_REALS = re.compile(r"(\w+) = torch\.(?:tensor|as_tensor|asarray|from_numpy)\(")
ACCIDENT = "  # an accident"
_BUILDS = re.compile(r"(\w+) = nn\.[A-Z]\w+\(\d")

ATTEMPT = """try:
    {line}
except (RuntimeError, IndexError):
    pass
else:
    raise AssertionError("accepted what eager refuses")"""


def lines_of(text: str) -> list[str]:
    return text.strip().splitlines()


class NothingFits(Exception):  # noqa: N818
    """No live value can fill the template."""


def names() -> dict[str, Any]:
    """The names every program can use."""
    return {"torch": torch, "nn": nn, "copy": copy, "math": math}


class Rules:
    """Keeps out what the head of this module lists; told of every statement in turn."""

    def __init__(self) -> None:
        self.after = False
        self._deferred: list[torch.Tensor] = []  # certainly deferred when the constructor returns
        self._real: set[int] = set()  # memory that certainly is there in the constructor

    def forbid(self, line: str, space: dict[str, Any]) -> bool:
        """Tell whether eager torch would answer a statement by accident."""
        if "inference_mode" in line and "requires_grad=True" in line:
            return True
        for pattern, rule in (
            (_COPIES, _copies_what_is_not_there),
            (_NORMAL, lambda means, *_: not means.is_floating_point()),
            (_STRIDED, lambda t, *_: t.requires_grad and t._is_view()),
            (_OUTPUTS, _resizes_what_is_shared),
            (_UNCOUNTED, self._writes_what_is_saved),
            (_REBINDS, self._rebinds),
        ):
            found = pattern.search(line)
            target = _evaluated(found[1], space) if found else None
            if isinstance(target, torch.Tensor) and rule(target, found, space):
                return True
        return False

    def _writes_what_is_saved(
        self, target: torch.Tensor, _: re.Match[str], space: dict[str, Any]
    ) -> bool:
        memory = _storage(target)
        deferred = not self.after and memory in map(_storage, self._deferred)
        return not deferred and memory in _saved(space)

    def _rebinds(self, target: torch.Tensor, found: re.Match[str], space: dict[str, Any]) -> bool:
        source = _evaluated(found[3], space) if found[3] else target
        source = source if isinstance(source, torch.Tensor) else target
        if target.is_inference() != source.is_inference():
            return True
        if source is not target and _storage(source) in self._real:
            return True
        if self.after and not any(target is t for t in self._deferred):
            return True
        if found[2] == "set_(" and (
            target.requires_grad or source.requires_grad or target._is_view()
        ):
            return True
        return bool(target.requires_grad) and not _is_leaf(target)

    def construct(self, space: dict[str, Any]) -> None:
        """Be told that the constructor begins: what was made before is real."""
        self._deferred.clear()
        self._real.update(_storage(t) for value in space.values() for t in _tensors(value))

    def run(self, line: str, space: dict[str, Any]) -> str:
        """Run a statement; give it with an end that deletes what are accidents from now on."""
        views: list[tuple[torch.Tensor, bool]] = []
        if "requires_grad_(" in line:
            tensors = [t for v in space.values() for t in _tensors(v)]
            views = [(t, t._base.requires_grad) for t in tensors if t._is_view()]
        exec(compile(line, "<statement>", "exec"), space)
        if not self.after:
            self._take_note(line, space)
        late = {id(t) for t, before in views if t._base.requires_grad != before}
        modules = _GRAD_TURNS.search(line)
        spoiled = [
            name
            for name, value in space.items()
            if (name[0] == "t" or (modules and name[0] == "m"))
            and any(id(t) in late or accidental(t) for t in _tensors(value))
        ]
        for name in spoiled:
            del space[name]
        return f"{line}\ndel {', '.join(spoiled)}{ACCIDENT}" if spoiled else line

    def _take_note(self, line: str, space: dict[str, Any]) -> None:
        real = _REALS.search(line)
        if real and real[1] in space:
            self._real.add(_storage(space[real[1]]))
        made = _MAKES.search(line)
        if made and made[1] in space:
            self._deferred.append(space[made[1]])
        built = _BUILDS.search(line)
        if built and built[1] in space:
            self._deferred.extend(space[built[1]].parameters())


def bare(line: str) -> str:
    """Give a statement without the end that `Rules.run` gave it."""
    return line.rpartition("\ndel ")[0] if line.endswith(ACCIDENT) else line


def _evaluated(expression: str, space: dict[str, Any]) -> Any:
    """Give what an expression means; None if eager torch refuses to say."""
    try:
        return eval(expression, space)
    except Exception:
        return None


def _copies_what_is_not_there(
    target: torch.Tensor, found: re.Match[str], space: dict[str, Any]
) -> bool:
    source = _evaluated(found[2], space)
    if not isinstance(source, torch.Tensor):
        return False
    return target.shape != source.shape and target.dtype != source.dtype


def _resizes_what_is_shared(
    target: torch.Tensor, found: re.Match[str], space: dict[str, Any]
) -> bool:
    others = {id(t): t for value in space.values() for t in _tensors(value)}
    return [_storage(t) for t in others.values()].count(_storage(target)) > 1


def accidental(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a view outside the graph of its base."""
    return (
        tensor._is_view()
        and tensor._base.requires_grad
        and _is_leaf(tensor) is not False
        and tensor.is_floating_point()
    )


def _is_leaf(tensor: torch.Tensor) -> bool | None:
    try:
        return tensor.is_leaf
    except RuntimeError:  # one of several views that was written to: eager torch refuses to say
        return None


def _storage(tensor: torch.Tensor) -> int:
    """Give what tells a tensor's memory from all other."""
    untyped = getattr(tensor, "untyped_storage", lambda: tensor.storage()._storage)()
    return int(untyped._cdata)


def _saved(space: dict[str, Any]) -> set[int]:
    """Give the memory that the graphs of live tensors have saved for backward."""
    found: set[int] = set()
    nodes = [t.grad_fn for v in space.values() for t in _tensors(v) if _is_leaf(t) is False]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        for name in dir(node):
            if name.startswith("_saved_"):
                held = None
                with contextlib.suppress(RuntimeError):  # written since, or gone
                    held = getattr(node, name)
                held = held if isinstance(held, (list, tuple)) else [held]
                found.update(_storage(t) for t in held if isinstance(t, torch.Tensor))
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        nodes += following
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    """Give the tensor itself, or those that a module holds."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, nn.Module):
        for module in value.modules():
            own = vars(module)
            entries = (*module._parameters.values(), *module._buffers.values())
            extra = (own.get("loose"), own.get("weight"), *own.get("listed", ()))
            found.extend(t for t in (*entries, *extra) if isinstance(t, torch.Tensor))
    return found


class Writer:
    """Writes statements while running them, so that it sees what every name holds."""

    def __init__(self, rnd: Any, space: dict[str, Any]):
        self.rnd, self.space, self.count = rnd, space, 0
        self.lines: list[str] = []
        self.rules = Rules()

    def write(self, sections: Any, wanted: int) -> list[str]:
        """Return `wanted` statements or fewer from sections of templates with weights."""
        self.lines = []
        pools = [lines_of(text) for text, weight in sections for _ in range(weight)]
        for _ in range(wanted):
            self._add(self.rnd.choice(self.rnd.choice(pools)))
        return self.lines

    def _add(self, template: str) -> None:
        try:
            line = self._fill(template)
        except NothingFits:
            return
        wrapped = self.rnd.randrange(12)
        if wrapped == 0 and not line.startswith(("for", "with", "del")):
            line = f"with torch.no_grad(): {line}"
        elif wrapped == 1 and template in FACTORIES and self.rnd.randrange(4) == 0:
            line = f"with torch.inference_mode(): {line}"
        if self.rules.forbid(line, self.space):
            return
        try:
            line = self.rules.run(line, self.space)
        except Exception as error:
            found = _OUTPUTS.search(line)
            if found:  # it has its new size by now, and no memory for it
                self.space.pop(found[1], None)
            if template in READS or _VALUE_ERROR.search(line):
                return
            if not MUST_FAIL.search(str(error)) or self.rnd.randrange(4):
                return
            line = ATTEMPT.format(line=line)
        self.lines.append(line)

    def _fill(self, template: str) -> str:
        values = {}
        for key in dict.fromkeys(re.findall(r"\{(\w+)\}", template)):
            values[key] = getattr(self, f"_{key}")()
        return template.format(**values)

    def live(self, kinds: Any) -> list[str]:
        """The names that hold one of these classes."""
        return [k for k, v in self.space.items() if isinstance(v, kinds) and k[0] != "_"]

    def _choose(self, options: list[str]) -> str:
        if not options:
            raise NothingFits
        return self.rnd.choice(options)

    def _x(self) -> str:
        options = [k for k in self.live(torch.Tensor) if k[0] != "s"]
        if self.rnd.randrange(4) == 0:
            for name in self.live(nn.Module):
                module = self.space[name]
                slots = [*module._parameters.items(), *module._buffers.items()]
                options.extend(f"{name}.{key}" for key, value in slots if value is not None)
        return self._choose(options)

    _y = _x

    def _m(self) -> str:
        return self._choose(self.live(nn.Module))

    def _g(self) -> str:
        return self._choose(self.live(torch.Generator))

    def _old(self) -> str:
        return self._choose([k for k in self.live(torch.Tensor) if k[0] == "s"])

    def _n(self) -> str:
        return self.rnd.choice(NUMBERS)

    def _i(self) -> str:
        return str(self.rnd.randrange(3))

    def _s(self) -> str:
        return self.rnd.choice(SHAPES)

    def _d(self) -> str:
        return f"torch.{self.rnd.choice(DTYPES)}"

    def _fresh(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def _new(self) -> str:
        return self._fresh("t")

    _new2 = _new

    def _seen(self) -> str:
        return self._fresh("v")

    def _gen(self) -> str:
        return self._fresh("g")

    def _state(self) -> str:
        return self._fresh("s")

    def _mod(self) -> str:
        return self._fresh("m")
