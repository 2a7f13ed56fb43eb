"""torch.compile, export and autograd over tiered memory: the bits that plain tensors give; damage is an exception."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import h3store
from h3store import TieredTensor
from h3store.errors import CorruptBlockError
from h3store.pager import Pager
from h3store.tensor import range_of
from tests.fault.test_corrupt_tensor import damage
from tests.tiered import tiered_copy

MiB = 2**20


def model(weights: dict[str, torch.Tensor], frozen: bool = True) -> torch.nn.Module:
    """Embedding, two linear layers; the weights are the given tensors themselves."""
    with torch.device("meta"):
        layers = torch.nn.Sequential(
            torch.nn.Embedding(512, 256), torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)
        )
    layers.load_state_dict(weights, assign=True)
    return layers.requires_grad_(not frozen)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    weights = {"0.weight": (512, 256), "1.weight": (1024, 256), "3.weight": (256, 1024)}
    biases = {"1.bias": (1024,), "3.bias": (256,)}
    return {name: torch.randn(shape) * 0.05 for name, shape in (weights | biases).items()}


@pytest.fixture
def tiered(weights: dict[str, torch.Tensor], tmp_path: Path) -> dict[str, TieredTensor]:
    h3store.save(weights, tmp_path / "m.h3")
    return h3store.load(tmp_path / "m.h3", ddr_bytes="1MiB")  # 2.5 MiB of weights


BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]  # it runs the C++ compiler for seconds
TOKENS = torch.randint(0, 512, (4, 33), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_gives_the_bits_of_plain_weights(
    weights: dict[str, torch.Tensor], tiered: dict[str, TieredTensor], backend: str
) -> None:
    plain = torch.compile(model(weights), backend=backend, fullgraph=True, dynamic=True)
    lazy = torch.compile(model(dict(tiered)), backend=backend, fullgraph=True, dynamic=True)
    for length in (33, 7, 20):  # dynamic shapes
        assert torch.equal(lazy(TOKENS[:, :length]), plain(TOKENS[:, :length]))
    assert range_of(tiered["1.weight"]).pager.stats()["evictions"] > 0


def test_compiled_functions_of_arguments(tiered: dict[str, TieredTensor], weights: dict[str, torch.Tensor]) -> None:
    table, weight = tiered["0.weight"], tiered["1.weight"]

    @torch.compile(backend="inductor", fullgraph=True)
    def f(ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(F.embedding(ids, table), weight).relu().sum(-1) + table.index_select(0, ids[0])[:, 0].sum()

    want = f(TOKENS, weights["0.weight"], weights["1.weight"])
    assert torch.equal(f(TOKENS, table, weight), want)
    assert torch.equal(f(TOKENS, table, weight), want)


def test_compiled_writes_to_a_writable_tensor_are_kept(tmp_path: Path) -> None:
    with h3store.open(tmp_path / "w.h3", mode="w", ddr_bytes="1MiB") as store:
        tensor = store.create("t", (1024, 1024), torch.float32)
        step = torch.compile(lambda t, x: t.add_(x), backend="inductor", fullgraph=True)
        for _ in range(3):
            step(tensor, torch.ones(1024))
    assert (h3store.load(tmp_path / "w.h3", ddr_bytes="1MiB")["t"] == 3).all()


def test_export(tiered: dict[str, TieredTensor], weights: dict[str, torch.Tensor]) -> None:
    program = torch.export.export(model(dict(tiered)), (TOKENS,))
    assert torch.equal(program.module()(TOKENS), model(weights)(TOKENS))


def test_gradients_through_frozen_weights(tiered: dict[str, TieredTensor], weights: dict[str, torch.Tensor]) -> None:
    gradients = []
    for source in (weights, tiered):
        layers = model(dict(source))[1:]
        x = torch.randn(8, 256, generator=torch.Generator().manual_seed(2)).requires_grad_()
        layers(x).square().sum().backward()
        second = torch.autograd.grad(layers(x).sin().sum(), x, create_graph=True)[0].square().sum()
        gradients.append((x.grad, *torch.autograd.grad(second, x)))
    for left, right in zip(*gradients, strict=True):
        assert torch.equal(left, right)
        assert type(left) is torch.Tensor


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "adam_single", "adamw"])
def test_training_a_writable_store_is_training_plain_tensors(
    weights: dict[str, torch.Tensor], tmp_path: Path, kind: str
) -> None:
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=True),
        "adam_single": lambda p: torch.optim.Adam(p, lr=1e-3, foreach=False),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    }

    def train(layers: torch.nn.Module) -> None:
        optimizer = makers[kind](layers.parameters())
        for step in range(3):
            loss = layers((TOKENS + step) % 512).square().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
            optimizer.step()

    plain = {name: value.clone() for name, value in weights.items()}
    train(model(plain, frozen=False))
    with h3store.open(tmp_path / "t.h3", mode="w", ddr_bytes="1MiB") as store:
        for name, value in weights.items():
            store[name] = value
        train(model({name: store[name] for name in store}, frozen=False))
        assert store.stats()["write_backs"] > 0
    trained = h3store.load(tmp_path / "t.h3", ddr_bytes="1MiB")
    for name, value in plain.items():
        assert torch.equal(trained[name], value), name


# ---- damage ----


@pytest.fixture
def damaged(weights: dict[str, torch.Tensor], tmp_path: Path) -> dict[str, TieredTensor]:
    h3store.save(weights, tmp_path / "bad.h3")
    damage(tmp_path / "bad.h3", "3.weight", 2)
    return h3store.load(tmp_path / "bad.h3", ddr_bytes="1MiB")


def test_damage_met_by_the_backward_pass_is_an_exception(damaged: dict[str, TieredTensor]) -> None:
    weight = damaged["3.weight"]
    x = torch.randn(8, 256, requires_grad=True)

    class Forgetful(torch.autograd.Function):
        """Touches the weight in the backward pass alone, by an operation that cannot know what it is."""

        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(8, 1024)

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
            return torch.empty(8, 256).copy_(grad @ weight.as_subclass(torch.Tensor).T)

    for _ in range(2):  # every time
        with pytest.raises(CorruptBlockError, match=r"bad\.h3: tensor '3\.weight', block 2"):
            Forgetful.apply(x).sum().backward()
        x.grad = None  # as after any failed backward pass, what it has accumulated is not to be used
    layers = model(dict(damaged))
    with pytest.raises(CorruptBlockError):
        layers(TOKENS)
    fine = layers[1](torch.randn(2, 256, requires_grad=True)).sum()
    fine.backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_damage_met_by_a_compiled_function_is_an_exception(
    damaged: dict[str, TieredTensor], weights: dict[str, torch.Tensor], backend: str
) -> None:
    compiled = torch.compile(lambda t: (t * 2 + 1).sum(0), backend=backend, fullgraph=True)
    for _ in range(3):
        with pytest.raises(CorruptBlockError, match=r"bad\.h3: tensor '3\.weight', block 2"):
            compiled(damaged["3.weight"])
    good = damaged["1.weight"]
    torch.testing.assert_close(compiled(good), (weights["1.weight"] * 2 + 1).sum(0))
    layers = torch.compile(model(dict(damaged)), backend=backend)
    with pytest.raises(CorruptBlockError):
        layers(TOKENS)
    trained = torch.compile(lambda x, w: F.linear(x, w).sin(), backend=backend, fullgraph=True)
    x = torch.randn(3, 1024, requires_grad=True)
    with pytest.raises(CorruptBlockError):
        trained(x, damaged["3.weight"]).sum().backward()


def test_other_threads_are_unharmed(damaged: dict[str, TieredTensor], weights: dict[str, torch.Tensor]) -> None:
    wrong: list[str] = []
    stop = threading.Event()

    def read_good() -> None:
        while not stop.is_set():
            try:
                if not torch.equal(damaged["1.weight"] + 0, weights["1.weight"]):
                    wrong.append("value")
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=read_good) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            with pytest.raises(CorruptBlockError):
                damaged["3.weight"].sum()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong[:3]


def test_a_scratch_tensor_takes_gradients() -> None:
    leaf = tiered_copy(torch.randn(600, 1024), Pager(MiB)).requires_grad_()
    (leaf * 2).sum().backward()
    assert (leaf.grad == 2).all()
    assert type(leaf.grad) is torch.Tensor
    with torch.no_grad():
        leaf -= leaf.grad
