"""Streams: what spending leads to, placeholders, and generators of devices that are not here."""

from __future__ import annotations

import copy
import io
import pickle
import random
import sys
import threading

import pytest
import torch
from torch import nn

from tests.equality import in_threads, materialize, verify_values
from torchcompat import fake_tensor
from torchcompat._random import streams
from torchcompat._random.streams import Cursor, Origin, Position, Spending, spend
from torchcompat._tape import Const, Geometry, Op, Storage, Value
from torchcompat.deferred_init import deferred_init, materialize_tensor

normal_, uniform_ = torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default

# Spending.


def strided_normals(count: int, generator: torch.Generator) -> None:
    """Draw normals one by one, as torch does where it cannot fill a block."""
    torch.empty(2 * count)[::2].normal_(generator=generator)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("normals", [0, 1, 2, 3, 4, 5, 17, 100, 1001])
@pytest.mark.parametrize("drawn", [0, 7, 1000])
def test_spending_leads_where_drawing_leads(drawn, normals, cached):
    generator = torch.Generator().manual_seed(4)
    torch.rand(700 + drawn, generator=generator)
    if cached:
        torch.randn(1, generator=generator)
    state = generator.get_state()
    kept = state.clone()
    torch.rand(drawn, generator=generator)
    strided_normals(normals, generator)
    assert torch.equal(spend(state, Spending(drawn, normals)), generator.get_state())
    assert torch.equal(state, kept)


@pytest.mark.parametrize("seed", range(5))
def test_positions_add_up(seed):
    """A chain of plain draws and serial normals, some of whose halves are kept for later."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    torch.randn(seed % 2, generator=generator)
    position = Position(Origin(generator.get_state()))
    pairs = []
    for _ in range(40):
        drawn, normals = chance.randrange(30), chance.choice([0, 0, 1, 2, 3, 16, 35])
        op = Op(None, (), {})
        op.position, op.after = position, position.after(Spending(drawn, normals), op)
        torch.rand(drawn, generator=generator)
        strided_normals(normals, generator)
        position = op.after
        pairs.append((position, generator.get_state()))
    chance.shuffle(pairs)
    for position, state in pairs:
        assert torch.equal(position.state(), state)


@pytest.mark.parametrize("seed", range(5))
def test_a_cursor_finds_every_position(seed):
    """Positions branch off each other, as where a state is saved and set again."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    torch.randn(seed % 2, generator=generator)
    steps = [(Position(Origin(generator.get_state())), Spending(0))]
    for _ in range(60):
        before, spending = chance.choice(steps)
        spending = Spending(*chance.choice([(0, 1), (0, 2), (0, 21), (3, 0), (50, 0), (0, 0)]))
        op = Op(None, (), {})
        op.position, op.after = before, before.after(spending, op)
        steps.append((op.after, chance.choice([Spending(4), Spending(0, 3)])))
    cursor = Cursor(torch.device("cpu"))
    for position, spending in chance.choices(steps, k=200):
        for _ in range(chance.choice([1, 3])):
            state = cursor.seek(position).get_state()
            assert torch.equal(state, position.state())
            torch.rand(spending.draws, generator=cursor.generator)
            strided_normals(spending.normals, cursor.generator)
            position = position.after(spending, None)
            cursor.passed(position)
            assert torch.equal(cursor.generator.get_state(), position.state())


# Placeholders, which stand in the visible generator while a constructor runs.


def inside(act):
    """Run `act` in a construction, behind some draws."""

    def build():
        torch.rand(5)
        act()

    deferred_init(build)


def test_nobody_sees_a_placeholder_s_seed():
    seeds = []

    def build(generator):
        for seed in (3, 2**31 + 5, 2**63 + 11, -7):
            generator.manual_seed(seed)
            torch.rand(3, generator=generator)
            seeds.append((generator.initial_seed(), seed % 2**64))

    deferred_init(build, torch.Generator())
    deferred_init(build, torch.default_generator)
    assert all(seen == set_ for seen, set_ in seeds)


def test_another_thread_gets_sound_numbers():
    """What it draws from the placeholder are random numbers, though not those of the stream."""
    drawn = []

    def act():
        for _ in range(30):
            torch.rand(2)
            thread = threading.Thread(target=lambda: drawn.append(torch.rand(1000)))
            thread.start()
            thread.join()

    inside(act)
    numbers = torch.stack(drawn)
    assert 0.49 < float(numbers.mean()) < 0.51
    assert float((numbers < 0.01).float().mean()) < 0.02
    assert len(torch.unique(numbers[:, :5], dim=0)) == 30


@pytest.fixture
def hasty():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_threads_that_record_on_one_generator_share_its_numbers(hasty):
    """Each number goes to one of them, and the generator ends where as many numbers lead."""
    torch.manual_seed(3)
    expected = torch.rand(800, 5)
    end = torch.get_rng_state()
    torch.manual_seed(3)
    start, results = threading.Barrier(4), []

    def build():
        start.wait()
        return [torch.rand(5) for _ in range(200)]

    in_threads([lambda: results.append(deferred_init(build)) for _ in range(4)])
    assert torch.equal(torch.get_rng_state(), end)
    found = [materialize_tensor(t).tolist() for tensors in results for t in tensors]
    assert sorted(found) == sorted(expected.tolist())


def test_placeholders_are_forgotten():
    deferred_init(nn.Linear, 3, 4)
    assert not streams._positions


# Saved states: each is used in the construction, after it, and on another generator.


def states_of_a_generator(generator):
    first = torch.rand(4, generator=generator)
    state = generator.get_state()
    found = [first, torch.randn(5, generator=generator)]
    generator.set_state(state)
    found.append(torch.randn(5, generator=generator))
    return [*found, state, torch.rand(2)]


def states_exchanged(generator):
    mine, visible = generator.get_state(), torch.get_rng_state()
    torch.set_rng_state(mine)
    generator.set_state(visible)
    return [torch.rand(20), torch.randn(3, generator=generator)]


def states_compared(_):
    state = torch.get_rng_state()
    torch.rand(3)
    moved = torch.get_rng_state()
    return [torch.equal(state, moved), bytes(moved.tolist()), torch.rand(3)]


def one_seed_twice(generator):
    found = []
    for _ in range(2):
        generator.manual_seed(11)
        found.append(torch.rand(3, generator=generator))
    return found


def seeds_from_seeds(generator):
    torch.rand(3)
    generator.manual_seed(generator.initial_seed() + torch.initial_seed())
    return [torch.rand(3, generator=generator), generator.initial_seed()]


def forks_in_forks(_):
    found = [torch.rand(3)]
    with torch.random.fork_rng(devices=[]):
        found.append(torch.randn(3))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            found.append(torch.randn(20))
            state = torch.get_rng_state()
        found.append(torch.rand(3))
        with pytest.raises(KeyError), torch.random.fork_rng(devices=[]):
            torch.rand(2)
            raise KeyError
        found.append(torch.rand(3))
    found.append(torch.rand(3))
    torch.set_rng_state(state)
    return [*found, torch.rand(2), state]


def many_generators(generator):
    others = [torch.Generator().manual_seed(n) for n in range(3)]
    found = [torch.randn(3, generator=g) for g in (*others, generator, *others)]
    others[0].set_state(generator.get_state())
    return [*found, torch.rand(2, generator=others[0])]


@pytest.mark.parametrize(
    "build",
    [
        states_of_a_generator,
        states_exchanged,
        states_compared,
        one_seed_twice,
        seeds_from_seeds,
        forks_in_forks,
        many_generators,
    ],
    ids=lambda build: build.__name__,
)
def test_states_and_seeds_inside(build):
    outcomes = []
    for call in (lambda g: build(g), lambda g: deferred_init(build, g)):
        torch.manual_seed(5)
        torch.rand(7)
        generator = torch.Generator().manual_seed(9)
        torch.randn(1, generator=generator)
        made = call(generator)
        found = [torch.rand(2), torch.randn(3, generator=generator), torch.get_rng_state()]
        for state in [m for m in made if isinstance(m, torch.Tensor) and m.dtype == torch.uint8]:
            other = torch.Generator()
            other.set_state(state)
            found.append(torch.randn(3, generator=other))
        made = [materialize(m) if isinstance(m, torch.Tensor) else m for m in reversed(made)]
        outcomes.append([*found, *made])
    for eager, deferred in zip(*outcomes):
        same = torch.equal if isinstance(eager, torch.Tensor) else lambda a, b: a == b
        assert same(eager, deferred)


def cloned(generator):
    copy_ = generator.clone_state()
    return [copy_, torch.default_generator.clone_state(), torch.rand(2, generator=generator)]


def deep_copied(generator):
    return [copy.deepcopy({"it": generator})["it"], torch.rand(2, generator=generator)]


def pickled(generator):
    return [pickle.loads(pickle.dumps(generator)), torch.rand(2, generator=generator)]


def cloned_and_used(generator):
    copy_ = generator.clone_state()
    return [torch.rand(3, generator=copy_), torch.rand(3, generator=generator), copy_]


@pytest.mark.since((2, 4), why="generators can be cloned and pickled")
@pytest.mark.parametrize("build", [cloned, deep_copied, pickled, cloned_and_used])
def test_copies_of_generators_inside(build):
    def drawn(generator):
        torch.rand(4, generator=generator)
        torch.rand(3)
        return build(generator)

    outcomes = []
    for call in (drawn, lambda generator: deferred_init(drawn, generator)):
        torch.manual_seed(2)
        generator = torch.Generator().manual_seed(9)
        torch.randn(1, generator=generator)
        made = call(generator)
        copies = [m for m in made if isinstance(m, torch.Generator)]
        assert copies
        outcomes.append([c.get_state() for c in copies])
        outcomes[-1] += [torch.randn(3, generator=g) for g in (*copies, generator)]
        outcomes[-1] += [materialize(m) for m in made if isinstance(m, torch.Tensor)]
    assert all(map(torch.equal, *outcomes))


def test_states_loaded_inside():
    """What is loaded is deferred, and C++ would look for the bytes of a state in vain."""

    def build(generator):
        file = io.BytesIO()
        torch.rand(3)
        torch.save({"visible": torch.get_rng_state(), "own": generator.get_state()}, file)
        torch.rand(3, generator=generator)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        torch.set_rng_state(loaded["own"])
        generator.set_state(loaded["visible"])
        return [torch.randn(20), torch.rand(2, generator=generator), loaded["own"]]

    outcomes = []
    for call in (build, lambda generator: deferred_init(build, generator)):
        torch.manual_seed(2)
        made = call(torch.Generator().manual_seed(9))
        outcomes.append([*(materialize(m) for m in reversed(made)), torch.get_rng_state()])
    assert all(map(torch.equal, *outcomes))


def test_another_thread_sees_true_states():
    seen = []

    def build():
        torch.randn(5)
        in_threads([lambda: seen.append(torch.get_rng_state())])
        return torch.rand(3)

    torch.manual_seed(4)
    eager, end = build(), torch.get_rng_state()
    torch.manual_seed(4)
    deferred = deferred_init(build)
    assert torch.equal(torch.get_rng_state(), end)
    assert torch.equal(*seen)
    assert torch.equal(eager, materialize_tensor(deferred))


@pytest.fixture
def noisy():
    library = torch.library.Library("torchcompat_streams", "DEF")
    library.define("noisy(Tensor x) -> Tensor")
    library.impl("noisy", lambda x: x + torch.rand(x.shape), "CPU")
    yield torch.ops.torchcompat_streams.noisy
    del library  # with it goes the operator


def test_foreign_operators_on_real_tensors_draw_eager_numbers(noisy):
    ones = torch.ones(5)

    def build():
        return [torch.rand(3), noisy(ones), torch.rand(3)]

    verify_values(lambda: dict(zip("abc", build())))


def test_a_device_that_shows_no_generator_is_refused(monkeypatch):
    monkeypatch.setattr(fake_tensor, "hardware", lambda kind: True)
    monkeypatch.setattr(streams, "default_generator", lambda device: None)
    with pytest.raises(NotImplementedError, match=r"uniform_ .* draws on mps:0, of which torch"):
        deferred_init(torch.rand, 3, device=torch.device("mps", 0))


def test_a_fresh_seed_inside():
    def build(generator):
        torch.rand(3, generator=generator)
        seed = generator.seed()
        return seed, torch.rand(3, generator=generator), generator.initial_seed()

    seed, tensor, seen = deferred_init(build, torch.Generator())
    expected = torch.rand(3, generator=torch.Generator().manual_seed(seed))
    assert seen == seed
    assert torch.equal(materialize_tensor(tensor), expected)


# Devices that are not here. Their stand-ins' kernels take an offset that depends on the size.


class SeedAndOffset:
    """Stands for a CUDA generator."""

    device = torch.device("cuda", 0)

    def __init__(self, device=None):
        self.seed, self.offset = 67280421310721, 0

    def get_state(self):
        return torch.tensor([self.seed, self.offset]).view(torch.uint8)

    def set_state(self, state):
        self.seed, self.offset = state.view(torch.int64).tolist()
        assert self.offset % 4 == 0
        assert self.offset >= 0
        return self

    def manual_seed(self, seed):
        self.seed, self.offset = seed, 0
        return self

    def initial_seed(self):
        return self.seed

    def run(self, numel):
        self.offset += 4 * -(-numel // 256)


class Opaque(SeedAndOffset):
    """Stands for a generator with a state of a form that nothing is known of."""

    def get_state(self):
        return torch.tensor([self.seed, self.offset * 3 + 1, 99]).view(torch.uint8)

    def set_state(self, state):
        self.seed, mixed, _ = state.view(torch.int64).tolist()
        self.offset = mixed // 3
        return self


@pytest.fixture(params=[SeedAndOffset, Opaque])
def stand_in(request, monkeypatch):
    """A visible generator of such a device; `runs` lists the sizes of what ran for a state."""
    visible = request.param()
    visible.runs = []

    def run_for_state(op):
        private = request.param().set_state(op.position.state())
        numel = op.writes[0].geometry.numel
        visible.runs.append(numel)
        private.run(numel)
        return private.get_state()

    monkeypatch.setattr(streams, "get_state", lambda generator: generator.get_state())
    monkeypatch.setattr(streams, "run_for_state", run_for_state)
    monkeypatch.setattr(streams, "_offsets", {})
    monkeypatch.setattr(
        streams,
        "default_generator",
        lambda device: visible if device.type == "cuda" else torch.default_generator,
    )
    return visible


def deferred_on_cuda(build):
    """The random operators of a construction, in order."""
    made = deferred_init(build)
    ops = {op.seq: op for t in made for op in t._value.storage.writers if op.position is not None}
    return [ops[seq] for seq in sorted(ops)]


def eager_states(generator, numels):
    """Where a fresh stand-in stands before each of some draws, and after them."""
    states = [generator.get_state()]
    for numel in numels:
        generator.run(numel)
        states.append(generator.get_state())
    return states


def layers(count):
    return lambda: [
        torch.empty(size, device="cuda").uniform_()
        for _ in range(count)
        for size in ((300, 7), (20,), (64, 64))
    ]


def test_devices_one_run_for_equal_operators(stand_in):
    numels = [2100, 20, 4096] * 10
    eager = eager_states(type(stand_in)(), numels)
    ops = deferred_on_cuda(layers(10))
    assert torch.equal(stand_in.get_state(), eager[-1])
    for index in random.Random(0).sample(range(30), 30):
        assert torch.equal(ops[index].position.state(), eager[index])
    assert len(stand_in.runs) == (3 if type(stand_in) is SeedAndOffset else 30)
    ops = deferred_on_cuda(layers(2))
    assert len(stand_in.runs) == (3 if type(stand_in) is SeedAndOffset else 36)
    assert torch.equal(ops[0].position.state(), eager[-1])


def test_devices_seeds_and_states_inside(stand_in):
    def build():
        found = [torch.empty(300, device="cuda").uniform_()]
        stand_in.manual_seed(5)
        found.append(torch.empty(600, device="cuda").uniform_())
        state = stand_in.get_state()
        found.append(torch.empty(300, device="cuda").normal_())
        stand_in.set_state(state)
        found.append(torch.empty(900, device="cuda").uniform_())
        stand_in.manual_seed(5)
        found.append(torch.empty(900, device="cuda").uniform_())
        return found

    eager = type(stand_in)()
    states = [eager.get_state()]
    seeded = eager.manual_seed(5).get_state()
    eager.run(600)
    states += [seeded, eager.get_state(), eager.get_state(), seeded]
    ops = deferred_on_cuda(build)
    for op, state in reversed(list(zip(ops, states))):
        assert torch.equal(op.position.state(), state)
    eager.set_state(seeded).run(900)
    assert torch.equal(stand_in.get_state(), eager.get_state())
    assert stand_in.initial_seed() == 5


def test_devices_what_an_offset_depends_on(stand_in):
    """Operators that differ in one of these must each run."""

    def build():
        empty = lambda *size, **kw: torch.empty(*size, device="cuda", **kw)  # noqa: E731
        return [
            empty(512).uniform_(),
            empty(512).normal_(),
            empty(512).uniform_(0, 2),
            empty(2, 256).uniform_(),
            empty(256, 2).t().uniform_(),
            empty(512, dtype=torch.float64).uniform_(),
            empty(513).uniform_(),
        ]

    deferred_on_cuda(build)
    assert len(stand_in.runs) == 7
    deferred_on_cuda(build)
    assert len(stand_in.runs) == (7 if type(stand_in) is SeedAndOffset else 14)


def test_devices_python_functions_and_real_arguments_always_run(stand_in):
    g = Geometry((10,), (1,), 0, torch.float32, stand_in.device)
    value = Value(Storage(g), g)

    def rejecting(tensor):
        raise AssertionError("it never runs here")

    for func, args in ((rejecting, (value,)), (normal_, (value, Const(torch.ones(3))))):
        for _ in range(2):
            op = Op(func, args, {})
            op.writes = (value,)
            streams.draw(op, stand_in, None, False)
    assert stand_in.runs == [10] * 4


def test_devices_running_for_real_teaches_too(stand_in, monkeypatch):
    """What a cursor has passed need not run again for the states behind it."""
    monkeypatch.setattr(streams, "_EXIT_ELEMENTS", 0)
    with pytest.warns(UserWarning, match="uniform_ .* is known only by running it"):
        ops = deferred_on_cuda(layers(2))
    eager = eager_states(type(stand_in)(), [2100, 20, 4096] * 2)
    monkeypatch.setattr(torch, "Generator", type(stand_in))
    cursor = Cursor(stand_in.device)
    for op, state in zip(ops, eager):
        assert torch.equal(cursor.seek(op.position).get_state(), state)
        cursor.generator.run(op.writes[0].geometry.numel)
        cursor.passed(op.after)
    assert stand_in.runs == []
    assert torch.equal(ops[-1].after.state(), eager[-1])


def test_devices_budget_counts_equal_operators_once(stand_in, monkeypatch):
    monkeypatch.setattr(streams, "_EXIT_ELEMENTS", 2100 + 20 + 4096)
    if type(stand_in) is SeedAndOffset:
        deferred_on_cuda(layers(20))
        monkeypatch.setattr(streams, "_EXIT_ELEMENTS", 0)
        deferred_on_cuda(layers(20))
        assert len(stand_in.runs) == 3
    else:
        with pytest.warns(UserWarning, match="124,320 elements"):
            deferred_on_cuda(layers(20))
        assert stand_in.runs == []
        assert not streams._positions
