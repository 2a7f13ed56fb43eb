"""Modules under a budget: the same bits as before, whatever runs in whatever order, and never more memory."""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import h3store
from h3store._ffi import lib
from h3store.errors import BudgetError, CorruptBlockError, ReadOnlyError, StorageFullError, UsageError
from h3store.modules import Attached
from h3store.modules.plan import Step, make_plan, merged_order
from h3store.tensor import TieredTensor
from tests.tiered import run_python

MiB = 1024**2


class Stack(nn.Module):
    """Layers that run in the reverse of the order in which they were made, some of them left out."""

    def __init__(self, layers: int = 8, width: int = 512, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(layers))
        self.norm = nn.LayerNorm(width, dtype=dtype)

    def forward(self, x: Tensor, skip: tuple[int, ...] = (), fail_at: int = -1) -> Tensor:
        for i in reversed(range(len(self.layers))):
            if i == fail_at:
                raise RuntimeError("on purpose")
            if i not in skip:
                x = torch.tanh(self.layers[i](x))
        return self.norm(x)


def weight_bytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


@pytest.fixture
def stack() -> Stack:
    return Stack().eval()


def threads() -> int:
    return sum(thread.name.startswith("h3store-weights") for thread in threading.enumerate())


# ---- plans ----


def test_a_plan_fits_and_keeps_what_it_can() -> None:
    sizes = [100, 300, 200, 400, 100]
    steps = [Step(i, (i,)) for i in range(5)]
    plan = make_plan(steps, sizes, 2000)
    assert dict(plan.resident) == dict(enumerate(sizes)) and plan.window_bytes == 0
    for usable in (400, 500, 800, 1000):
        plan = make_plan(steps, sizes, usable)
        kept = sum(plan.resident.values())
        assert kept + plan.window_bytes == usable
        assert all(sizes[i] - plan.resident[i] <= plan.window_bytes for i in range(5))
        assert all(0 <= plan.resident[i] <= sizes[i] for i in range(5))
    assert sum(make_plan(steps, sizes, 1000).resident.values()) > 450  # the largest step takes 240 of 1000 beside


def test_a_step_beyond_the_budget_is_left_to_faults() -> None:
    plan = make_plan([Step("a", (0,)), Step("b", (1,)), Step("c", (0, 2))], [50, 500, 60], 100)
    assert [step.units for step in plan.steps] == [(0,), (), ()]


def test_resident_parts_are_whole_blocks() -> None:
    sizes = [10_000] * 20
    plan = make_plan([Step(i, (i,)) for i in range(20)], sizes, 100_000, 4096)
    assert all(n % 4096 == 0 or n == 10_000 for n in plan.resident.values())
    assert sum(plan.resident.values()) > 30_000


def test_orders_merge() -> None:
    assert merged_order("abcd", "abcd") == list("abcd")
    assert merged_order("acd", "abcd") == list("abcd")
    assert merged_order("bca", "xabc") == list("xbca")
    assert merged_order("", "ab") == list("ab")


# ---- the same bits, within the budget ----


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_within_the_budget(dtype: torch.dtype) -> None:
    model = Stack(dtype=dtype, width=1024).eval()
    x = torch.randn(3, 1024).to(dtype)
    expected = [model(x), model(x, skip=(2, 5))]
    budget = weight_bytes(model) // 2
    with h3store.attach(model, ddr_bytes=budget) as handle:
        assert all(isinstance(layer.weight, TieredTensor) for layer in model.layers)
        for _ in range(3):
            assert torch.equal(model(x), expected[0])
        before = handle.stats()
        for _ in range(4):
            assert torch.equal(model(x), expected[0])
        after = handle.stats()
        # each pass reads what does not stay, and no more
        read = after["bytes_decoded"] - before["bytes_decoded"]
        streamed = after["weight_bytes"] - after["planned_resident_bytes"]
        assert 0 < read <= 4.5 * streamed + 2 * MiB < 4 * after["weight_bytes"]
        assert after["faults"] - before["faults"] <= 16
        assert after["modules_unplanned"] == before["modules_unplanned"]
        assert torch.equal(model(x, skip=(2, 5)), expected[1])
        assert torch.equal(model(x), expected[0])
        assert after["peak_resident_bytes"] <= budget
    assert handle.stats()["pinned_bytes"] == 0
    assert torch.equal(model(x), expected[0])  # closed: read when touched


@torch.no_grad()
def test_a_transformers_model_generates_the_same() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=300, hidden_size=192, intermediate_size=512, num_hidden_layers=4, eos_token_id=None,
                         num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128,
                         tie_word_embeddings=True)
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(20).reshape(2, 10)
    logits, tokens = model(ids).logits, model.generate(ids, max_new_tokens=4, do_sample=False)
    names = list(model.state_dict())
    with h3store.attach(model, ddr_bytes=weight_bytes(model) // 2) as handle:
        assert model.lm_head.weight is model.model.embed_tokens.weight  # tied still, and stored once
        assert handle.stats()["weight_bytes"] < sum(p.nbytes for p in model.parameters()) + 1
        assert torch.equal(model(ids).logits, logits)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), tokens)
        assert list(model.state_dict()) == names and model.dtype == torch.float32


def test_gradients_flow_through_frozen_weights(stack: Stack) -> None:
    x = torch.randn(2, 512, requires_grad=True)
    stack(x).sum().backward()
    expected = x.grad
    x.grad = None
    handle = h3store.attach(stack, ddr_bytes=weight_bytes(stack) // 2)
    stack(x).sum().backward()
    assert torch.equal(x.grad, expected)
    assert not stack.layers[0].weight.requires_grad and stack.norm.weight.requires_grad
    with pytest.raises(ReadOnlyError):
        stack.layers[0].weight.add_(1)
    handle.close()


@torch.no_grad()
def test_copies_and_state_dicts_are_of_the_same_values(stack: Stack, tmp_path: Path) -> None:
    x = torch.randn(2, 512)
    expected = stack(x)
    values = {name: value.clone() for name, value in stack.state_dict().items()}
    with h3store.attach(stack, ddr_bytes=weight_bytes(stack) // 2) as handle:
        stack(x)
        twin = copy.deepcopy(stack)
        assert torch.equal(twin(x), expected) and not isinstance(twin.layers[0].weight, TieredTensor)
        early = handle.stats()["modules_early"] + handle.stats()["modules_waited"]
        twin(x)
        assert early == handle.stats()["modules_early"] + handle.stats()["modules_waited"]
        for name, value in stack.state_dict().items():
            assert torch.equal(value, values[name])
        torch.save(stack.state_dict(), tmp_path / "s.pt")
        loaded = torch.load(tmp_path / "s.pt", weights_only=True)
        assert torch.equal(loaded["layers.3.weight"], values["layers.3.weight"])
        stack.load_state_dict({name: value * 2 for name, value in values.items()}, assign=True)
        twin.load_state_dict({name: value * 2 for name, value in values.items()})
        assert torch.equal(stack(x), twin(x))


@torch.no_grad()
def test_weights_that_share_memory_are_stored_once() -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 300))
    model[2].weight = nn.Parameter(model[0].weight.detach())  # another parameter over the same memory
    model.register_buffer("table", torch.randn(400, 300))
    x = torch.randn(1, 300)
    expected = model(x)
    handle = h3store.attach(model, ddr_bytes="1MiB")
    assert torch.equal(model(x), expected) and isinstance(model.table, TieredTensor)
    assert handle.stats()["weight_bytes"] == (2 * 300 * 300 + 400 * 300) * 4
    assert model[0].weight.data_ptr() == model[2].weight.data_ptr()


# ---- orders that nobody promised ----


@torch.no_grad()
def test_any_order_of_modules_gives_the_same(stack: Stack) -> None:
    plain = copy.deepcopy(stack)
    x = torch.randn(2, 512)
    generator = torch.Generator().manual_seed(3)
    with h3store.attach(stack, ddr_bytes=weight_bytes(stack) // 2) as handle:
        for _ in range(12):
            skip = tuple(torch.randperm(8, generator=generator)[:3].tolist())
            assert torch.equal(stack(x, skip=skip), plain(x, skip=skip))
        for _ in range(3):  # the model is never called, only its parts
            y, z = x, x
            for i in (0, 1, 1, 7, 3):
                y, z = stack.layers[i](y), plain.layers[i](z)
            assert torch.equal(y, z)
        assert handle.stats()["peak_resident_bytes"] <= weight_bytes(plain) // 2


@torch.no_grad()
def test_a_forward_that_fails_leaves_nothing_held(stack: Stack) -> None:
    x = torch.randn(2, 512)
    expected = stack(x)
    with h3store.attach(stack, ddr_bytes=weight_bytes(stack) // 2) as handle:
        for fail_at in (0, 4, 7, 3):
            with pytest.raises(RuntimeError, match="on purpose"):
                stack(x, fail_at=fail_at)
            with pytest.raises(RuntimeError, match="shape"):
                stack.layers[2](torch.randn(2, 3))
            assert torch.equal(stack(x), expected)
    assert handle.stats()["pinned_bytes"] == 0


@torch.no_grad()
def test_several_threads_may_run_it(stack: Stack) -> None:
    x = torch.randn(2, 512)
    expected, wrong = stack(x), []
    with h3store.attach(stack, ddr_bytes=weight_bytes(stack) // 2) as handle:
        def run() -> None:
            with torch.no_grad():
                wrong.extend(1 for _ in range(6) if not torch.equal(stack(x), expected))

        runners = [threading.Thread(target=run) for _ in range(3)]
        for runner in runners:
            runner.start()
        for runner in runners:
            runner.join(60)
        assert not wrong and not any(runner.is_alive() for runner in runners)
    assert handle.stats()["pinned_bytes"] == 0


@torch.no_grad()
def test_a_weight_larger_than_the_budget() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 64), nn.Linear(64, 1024))
    x = torch.randn(1, 1024)
    expected = model(x)
    with h3store.attach(model, ddr_bytes="1MiB") as handle:
        assert torch.equal(model(x), expected) and torch.equal(model(x), expected)
        assert handle.stats()["peak_resident_bytes"] <= MiB
    with pytest.raises(BudgetError):
        h3store.attach(nn.Linear(1024, 1024), ddr_bytes=8192)


@torch.no_grad()
def test_a_forked_child_reads_without_the_threads(stack: Stack) -> None:
    x = torch.randn(1, 512)
    torch.set_num_threads(1)
    expected = stack(x)
    with h3store.attach(stack, ddr_bytes=weight_bytes(stack) // 2):
        assert torch.equal(stack(x), expected)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(stack(x), expected) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(stack(x), expected)


# ---- where weights come from ----


@torch.no_grad()
def test_weights_come_from_an_archive(stack: Stack, tmp_path: Path) -> None:
    x = torch.randn(2, 512)
    expected = stack(x)
    h3store.save(stack.state_dict(), tmp_path / "w.h3")
    with torch.device("meta"):
        empty = Stack().eval()
    h3store.attach(empty, ddr_bytes="4MiB", path=tmp_path / "w.h3")
    assert torch.equal(empty(x), expected)
    with torch.device("meta"):
        narrow, wide = Stack(dtype=torch.bfloat16), Stack(layers=9)
    with pytest.raises(UsageError, match="is float32"):
        h3store.attach(narrow, ddr_bytes="4MiB", path=tmp_path / "w.h3")
    with pytest.raises(UsageError, match=r"no tensor 'layers\.8\.weight'"):
        h3store.attach(wide, ddr_bytes="4MiB", path=tmp_path / "w.h3")
    assert wide.layers[0].weight.is_meta  # nothing was changed
    with pytest.raises(UsageError, match="on the meta device"):
        h3store.attach(wide, ddr_bytes="4MiB")


@torch.no_grad()
def test_weights_are_written_where_there_is_no_archive(stack: Stack, tmp_path: Path) -> None:
    x = torch.randn(2, 512)
    expected = stack(x)
    again = Stack().eval()
    h3store.attach(stack, ddr_bytes="4MiB", path=tmp_path / "w.h3")
    assert torch.equal(stack(x), expected)
    assert set(h3store.load(tmp_path / "w.h3")) == set(again.state_dict())
    h3store.attach(again, ddr_bytes="4MiB", path=tmp_path / "w.h3")
    assert torch.equal(again(x), expected)


@torch.no_grad()
def test_weights_that_are_tiered_already_are_read_where_they_are(stack: Stack, tmp_path: Path) -> None:
    x = torch.randn(2, 512)
    expected = stack(x)
    h3store.save(stack.state_dict(), tmp_path / "w.h3")
    stack.load_state_dict(h3store.load(tmp_path / "w.h3", ddr_bytes="4MiB"), assign=True)
    before = sorted(os.listdir(tmp_path))
    handle = h3store.attach(stack, ddr_bytes="5MiB")
    assert torch.equal(stack(x), expected) and sorted(os.listdir(tmp_path)) == before
    assert handle.stats()["fills"] > 0


@torch.no_grad()
def test_a_model_is_attached_once_at_a_time(stack: Stack) -> None:
    x = torch.randn(2, 512)
    expected = stack(x)
    handle = h3store.attach(stack, ddr_bytes="4MiB")
    with pytest.raises(UsageError, match=r"close\(\) its handle"):
        h3store.attach(stack, ddr_bytes="4MiB")
    handle.close()
    with h3store.attach(stack, ddr_bytes="3MiB"):
        assert torch.equal(stack(x), expected)
    assert torch.equal(stack(x), expected)


# ---- endings and failures ----


@torch.no_grad()
def test_threads_end_with_the_model_or_the_handle() -> None:
    x = torch.randn(1, 512)
    model = Stack()
    handle = h3store.attach(model, ddr_bytes="2MiB")
    model(x)
    assert threads() > 0 and isinstance(handle, Attached) and "2.0 MiB" in repr(handle)
    handle.close()
    handle.close()
    assert threads() == 0
    model = Stack()
    h3store.attach(model, ddr_bytes="2MiB")
    model(x)
    del model, handle
    gc.collect()
    deadline_s = time.monotonic() + 10
    while threads() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert threads() == 0


def test_a_process_ends_while_weights_are_being_read() -> None:
    done = run_python("""
        import torch, h3store
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
        h3store.attach(model, ddr_bytes="16MiB")
        model(torch.randn(1, 1024))
        """)
    assert done.returncode == 0 and done.stderr == ""


@torch.no_grad()
def test_a_damaged_block_is_an_error_of_the_forward(stack: Stack, tmp_path: Path) -> None:
    h3store.save(stack.state_dict(), tmp_path / "w.h3")
    data = bytearray((tmp_path / "w.h3").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "w.h3").write_bytes(data)
    handle = h3store.attach(stack, ddr_bytes="4MiB", path=tmp_path / "w.h3")
    for _ in range(3):
        with pytest.raises(CorruptBlockError, match=r"layers\.\d\.weight"):
            stack(torch.randn(1, 512))
    handle.close()


@torch.no_grad()
def test_a_full_disk_leaves_the_model_as_it_was(stack: Stack, tmp_path: Path) -> None:
    x = torch.randn(1, 512)
    expected = stack(x)
    lib.h3_fault_arm(lib.H3_FAULT_WRITE, 5, -1, 28)
    try:
        with pytest.raises(StorageFullError):
            h3store.attach(stack, ddr_bytes="4MiB", path=tmp_path / "w.h3")
    finally:
        lib.h3_fault_arm(lib.H3_FAULT_WRITE, 0, 0, 0)
    assert torch.equal(stack(x), expected) and not isinstance(stack.layers[0].weight, TieredTensor)
    assert list(tmp_path.iterdir()) == [] and threads() == 0


@torch.no_grad()
@pytest.mark.parametrize("kind", ["READ", "IOCTL"])
def test_reads_that_fail_ahead_fail_nothing_that_works_later(stack: Stack, kind: str) -> None:
    x = torch.randn(1, 512)
    expected = stack(x)
    with h3store.attach(stack, ddr_bytes=weight_bytes(stack) // 2) as handle:
        for nth in range(1, 12):
            lib.h3_fault_arm(getattr(lib, f"H3_FAULT_{kind}"), nth, 1, 5)
            try:
                assert torch.equal(stack(x), expected)
            except h3store.H3Error:  # it was the forward's own read that failed
                pass
            finally:
                lib.h3_fault_arm(getattr(lib, f"H3_FAULT_{kind}"), 0, 0, 0)
            assert torch.equal(stack(x), expected)
    assert handle.stats()["pinned_bytes"] == 0


def test_an_archive_gives_every_weight_that_it_names(tmp_path: Path) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 3))

    first, inputs = make(0), torch.randn(2, 256)
    wanted = first(inputs)
    h3store.save(first.state_dict(), tmp_path / "saved.h3")
    second = make(1)
    h3store.attach(second, ddr_bytes="1MiB", path=tmp_path / "saved.h3")
    assert torch.equal(second(inputs), wanted)
    h3store.attach(first, ddr_bytes="1MiB", path=tmp_path / "made.h3")
    third = make(2)
    h3store.attach(third, ddr_bytes="1MiB", path=tmp_path / "made.h3")
    assert torch.equal(third(inputs), wanted)
