"""The bound that an outside observer sees: decoding a sequence whose KV is far above the budget, peak resident set read
from the kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.tiny_models import write_tiny

MIB = 1024**2
BUDGET = 4 * MIB
TOKENS = 4000
# rows of a prefill chunk, float panels of one span, scratch of the codec, and the growth of the allocator's heaps
SLACK = 40 * MIB

SCRIPT = """
import json, sys, torch
from pathlib import Path
from h3store.models.decode import Decoder, SamplingParams

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

torch.set_num_threads(2)
ids = torch.randint(3, 99, (int(sys.argv[2]),), generator=torch.Generator().manual_seed(0)).tolist()
with Decoder.from_pretrained(sys.argv[1], ddr_bytes=int(sys.argv[3])) as decoder:
    decoder.complete(ids[:600], SamplingParams(4, ignore_eos=True))
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    done = decoder.complete(ids[::-1], SamplingParams(8, ignore_eos=True))
    print(json.dumps({"grown": peak() - before, "kv": decoder.kv_bytes_per_token * len(ids), "new": len(done.token_ids),
                      "restored": done.restored_tokens, "stats": decoder.store.stats()}))
"""


def test_peak_memory_stays_near_the_budget(tmp_path: Path) -> None:
    write_tiny(tmp_path, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=4, head_dim=64,
               max_position_embeddings=8192)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(TOKENS), str(BUDGET)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["kv"] > 90 * MIB and seen["new"] == 8 and seen["restored"] == 0
    assert seen["stats"]["peak_resident_bytes"] <= BUDGET
    assert seen["grown"] <= BUDGET + SLACK
