"""What an outside observer sees: the process's peak resident set, as the kernel counts it, over reads and writes of a
tensor twenty times the budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiered import DELIVERIES, run_python

MiB = 1024 * 1024
BUDGET = 16 * MiB
OVERHEAD = 48 * MiB

OBSERVED = """
import os, sys, torch, h3store
from pathlib import Path

def status(field):
    text = Path("/proc/self/status").read_text()
    return int(text.split(field + ":")[1].split()[0]) * 1024

path, budget = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(2)
torch.ones(1 << 20).sum(); torch.randn(1 << 16).to(torch.bfloat16)
with h3store.open(path, mode="w", ddr_bytes=budget) as store:
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak starts again from what is resident now
    before = status("VmRSS")
    tensor = store.create("t", (20 * budget // 2048, 1024), torch.bfloat16)
    for start in range(0, len(tensor), 4096):  # written once
        tensor[start:start + 4096] = torch.randn(1, 1024).to(torch.bfloat16) + start
    total = [tensor.view(torch.int16).max().item() for _ in range(2)]  # scanned twice
    assert total[0] == total[1]
    store.commit()
    stats = store.stats()
    print(status("VmHWM") - before, stats["peak_resident_bytes"], stats["evictions"], stats["delivery"])
"""


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_peak_memory_stays_within_budget(delivery: str, tmp_path: Path) -> None:
    argv = ["", str(tmp_path / "t.h3"), str(BUDGET)]
    prelude = f"import os, sys\nos.environ['H3STORE_DELIVERY'] = {delivery!r}\nsys.argv = {argv!r}\n"
    done = run_python(OBSERVED, prelude=prelude, timeout_s=250)
    assert done.returncode == 0, done.stderr[-2000:]
    grown, peak, evictions, used = done.stdout.split()
    assert used == delivery
    assert int(evictions) > 20 * BUDGET // (64 * 1024)
    assert int(peak) <= BUDGET
    assert int(grown) <= BUDGET + OVERHEAD, f"grew by {int(grown) / MiB:.1f} MiB"
