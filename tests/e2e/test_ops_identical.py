"""Torch operations on TieredTensors under eviction give the bits that plain tensors give: as root, as an unprivileged
user, and with userfaultfd refused; two intra-op threads, four Python threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from h3store.pager import Pager
from h3store.tensor import TieredTensor
from tests.tiered import BECOME_NOBODY, REFUSE_USERFAULTFD, run_python, tiered_copy

# Every operand is two to eight times the budget.
BUDGET = 512 * 1024
BLOCK_BYTES = 16 * 1024
Op = Callable[..., torch.Tensor]


def floats(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# name, operands, operation. Operands together are several times the budget.
def cases() -> Iterator[tuple[str, list[torch.Tensor], Op]]:
    a, b = floats(512, 512, seed=1), floats(512, 384, seed=2)
    wide = floats(1024, 512, seed=3)
    q, k, v = (floats(2, 4, 256, 64, seed=s) for s in (4, 5, 6))
    ints = torch.randint(-1000, 1000, (200_000,), generator=torch.Generator().manual_seed(7))
    rows = torch.randint(0, 1024, (3000,), generator=torch.Generator().manual_seed(8))
    half = wide.to(torch.bfloat16)
    yield "matmul", [a, b], lambda x, y: x @ y
    yield "matmul_t", [a, b], lambda x, y: y.T @ x
    yield "linear", [a, wide.view(1024, 512)], lambda x, w: F.linear(x[:64], w)
    yield "bf16_matmul", [half], lambda x: x @ x[:256].T
    yield "addmm", [a, b], lambda x, y: torch.addmm(y, x, y)
    yield "bmm", [q, k], lambda x, y: torch.bmm(x.flatten(0, 1), y.flatten(0, 1).transpose(1, 2))
    yield "einsum", [q, k], lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y)
    yield "sdpa", [q, k, v], lambda x, y, z: F.scaled_dot_product_attention(x, y, z, is_causal=True)
    yield "embedding", [wide], lambda w: F.embedding(rows, w)
    yield "embedding_bag", [wide], lambda w: F.embedding_bag(rows.view(-1, 10), w, mode="sum")
    yield "index_select", [wide], lambda w: w.index_select(0, rows)
    yield "advanced_index", [wide], lambda w: w[rows, rows % 512]
    yield "bool_index", [wide], lambda w: w[w > 1.0]
    yield "gather", [wide], lambda w: w.gather(1, (rows[:1024] % 512).view(-1, 1))
    yield "strided_slice", [wide], lambda w: w[5:1000:7, ::3].clone()
    yield "sort", [a], lambda x: torch.cat([t.to(torch.float32) for t in x.sort(dim=-1)])
    yield "sort_flat", [ints], lambda x: x.sort().values
    yield "argsort", [a], lambda x: x.argsort(dim=0)
    yield "topk", [a], lambda x: x.topk(50, dim=-1).values
    yield "unique", [ints], lambda x: x.unique()
    yield "cumsum", [a], lambda x: x.cumsum(0)
    yield "cumprod", [a], lambda x: (1 + x / 1000).cumprod(1)
    yield "sum", [a], lambda x: x.sum()
    yield "mean_dim", [a], lambda x: x.mean(0)
    yield "std", [a], lambda x: x.std(dim=1)
    yield "max_dim", [a], lambda x: x.max(dim=0).indices
    yield "norm", [a], lambda x: torch.linalg.vector_norm(x, dim=1)
    yield "softmax", [a], lambda x: x.softmax(-1)
    yield "layer_norm", [wide], lambda x: F.layer_norm(x, (512,))
    yield "rms_norm", [wide], lambda x: F.rms_norm(x, (512,))
    yield "gelu", [wide], lambda x: F.gelu(x)
    yield "add_broadcast", [a], lambda x: x + x[0]
    yield "where", [a], lambda x: torch.where(x > 0, x, -x)
    yield "transpose_copy", [a], lambda x: x.T.contiguous()
    yield "permute_copy", [q], lambda x: x.permute(2, 0, 3, 1).contiguous()
    yield "cat", [a, b], lambda x, y: torch.cat([x, y], dim=1)
    yield "roll", [a], lambda x: x.roll(100, 0)
    yield "flip", [a], lambda x: x.flip(0, 1)
    yield "conv1d", [wide], lambda x: F.conv1d(x[:64].unsqueeze(0), x[:32, :64].unsqueeze(-1).contiguous())
    yield "conv2d", [q], lambda x: F.conv2d(x, x[:1, :, :3, :3].contiguous())
    yield "fft", [a], lambda x: torch.view_as_real(torch.fft.rfft(x, dim=1))
    yield "cdist", [wide], lambda x: torch.cdist(x[:200], x[200:500])
    yield "to_bf16", [a], lambda x: x.to(torch.bfloat16)
    yield "to_int", [a], lambda x: (x * 100).to(torch.int64)
    yield "view_dtype", [a], lambda x: x.view(torch.int32).bitwise_xor(7)
    yield "histc", [a], lambda x: x.histc(50)
    yield "searchsorted", [a], lambda x: torch.searchsorted(x[0].sort().values, x)
    yield "numpy", [a], lambda x: torch.from_numpy(x.numpy() * 2)
    yield (
        "grad",
        [a, b],
        lambda x, y: torch.autograd.grad((leaf := x.detach().clone().requires_grad_()).matmul(y).sin().sum(), leaf)[0],
    )


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = left.as_subclass(torch.Tensor).contiguous(), right.as_subclass(torch.Tensor).contiguous()
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8))
    )


def check_all(pager: Pager, n_threads: int) -> list[str]:
    """Runs every case in every thread over shared tensors and returns what differed."""
    wrong: list[str] = []
    prepared = []
    for name, plain, op in cases():
        tiered = [tiered_copy(tensor, pager, BLOCK_BYTES) for tensor in plain]
        assert all(type(tensor) is TieredTensor for tensor in tiered)
        prepared.append((name, plain, tiered, op, op(*plain)))

    def work(k: int) -> None:
        torch.manual_seed(0)
        for i in range(len(prepared)):
            name, _, tiered, op, expected = prepared[(i + k * 11) % len(prepared)]
            try:
                if not same(op(*tiered), expected):
                    wrong.append(name)
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def main(expected_delivery: str) -> None:
    torch.set_num_threads(2)
    pager = Pager(BUDGET)
    assert pager.stats()["delivery"] == expected_delivery, pager.stats()
    wrong = check_all(pager, 4)
    stats = pager.stats()
    print(sorted(set(wrong)), stats["evictions"], stats["peak_resident_bytes"])
    sys.exit(bool(wrong) or int(stats["evictions"]) < 1000 or int(stats["peak_resident_bytes"]) > BUDGET)


VARIANTS = {
    "as_is": ("", "signal"),
    "nobody": (BECOME_NOBODY, "signal"),
    "refused": (BECOME_NOBODY + REFUSE_USERFAULTFD, "dispatch"),
    "no_move": ("import os\nos.environ['H3STORE_DELIVERY'] = 'signal-copy'\n", "signal-copy"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_operation_gives_the_same_bits(variant: str) -> None:
    drop, delivery = VARIANTS[variant]
    if "setuid" in drop and os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    # Everything is imported before the privileges go: the checkout may lie where only its owner can read.
    code = f"import h3store.store, tests.e2e.test_ops_identical as t\n{drop}\nt.main({delivery!r})"
    done = run_python("", prelude=code, timeout_s=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
