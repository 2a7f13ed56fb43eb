"""A packed model answers as its folder does, and packing is bounded in memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import h3store
from tests.e2e.conftest import Cli, command, environment
from tests.tiered import run_python


def test_a_packed_model_computes_what_its_folder_does(inline: Cli, tiny_model: Path, tmp_path: Path) -> None:
    shown = json.loads(inline("pack", tiny_model, "m.h3", "--json", check=0).stdout)
    assert shown["raw_bytes"] > shown["archive_bytes"] and shown["base"] is None
    ids = torch.arange(60).reshape(2, 30)
    with (h3store.Decoder.from_pretrained(tiny_model) as plain,
          h3store.Decoder.from_pretrained(tmp_path / "m.h3", store=tmp_path / "kv.h3") as packed,
          h3store.Decoder.from_pretrained(tmp_path / "m.h3", weights_ddr_bytes="1MiB") as tiered):
        expected = plain(ids)
        assert torch.equal(packed(ids), expected) and torch.equal(tiered(ids), expected)
        assert packed.tokenizer.encode("a cat") == plain.tokenizer.encode("a cat")
        assert packed.tokenizer.has_chat_template and packed.eos_token_ids == plain.eos_token_ids
        prompt = list(range(200))
        answer = packed.generate([prompt], 4)
    # what one of them has read the other restores: their weights are the same bytes
    with h3store.Decoder.from_pretrained(tiny_model, store=tmp_path / "kv.h3") as again:
        done = again.complete(prompt, h3store.models.decode.SamplingParams(4))
        assert done.restored_tokens == 192 and done.token_ids == answer[0][: len(done.token_ids)]


def test_unpack_and_its_refusals(inline: Cli, tiny_model: Path, tmp_path: Path) -> None:
    inline("pack", tiny_model, "m.h3", check=0)
    assert "--force" in inline("pack", tiny_model, "m.h3", check=2).stderr
    shown = json.loads(inline("unpack", "m.h3", "back", "--json", check=0).stdout)
    assert shown["files"] == len(list(tiny_model.iterdir()))
    for path in tiny_model.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    assert "no.h3" in inline("unpack", "no.h3", "other", check=2).stderr
    (tmp_path / "m.h3").write_bytes((tmp_path / "m.h3").read_bytes()[:-9])
    assert "m.h3" in inline("unpack", "m.h3", "other", check=3).stderr
    assert not (tmp_path / "other").exists()


def test_an_answer_from_a_packed_model(inline: Cli, tiny_model: Path, tmp_path: Path) -> None:
    inline("pack", tiny_model, "m.h3", check=0)
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "the cat", "max_tokens": 3}}
    (tmp_path / "in").write_text(json.dumps(row))
    inline("run-batch", "-i", "in", "-o", "out", "--model", "m.h3", check=0)
    assert json.loads((tmp_path / "out").read_text())["response"]["status_code"] == 200


@pytest.mark.slow
def test_a_full_disk_leaves_nothing(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    import resource

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    done = cli("pack", tiny_model, "m.h3", check=3, preexec_fn=small_files)
    assert "no space left" in done.stderr
    assert list(tmp_path.iterdir()) == []
    cli("pack", tiny_model, "m.h3", check=0)
    done = cli("unpack", "m.h3", "back", check=3, preexec_fn=small_files)
    assert "no space left" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["m.h3"]


@pytest.mark.slow
def test_a_killed_pack_leaves_no_archive(tmp_path: Path) -> None:
    save_file({f"{i}": torch.randn(2048, 2048) for i in range(12)}, tmp_path / "x.safetensors")
    for delay_s in (0.5, 0.8, 1.1):
        job = subprocess.Popen(command(["pack", "x.safetensors", "m.h3"]), cwd=tmp_path, env=environment(),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay_s)
        job.send_signal(signal.SIGKILL)
        job.wait()
        assert not (tmp_path / "m.h3").exists() or h3store.load(tmp_path / "m.h3").keys() == {str(i) for i in range(12)}
        (tmp_path / "m.h3").unlink(missing_ok=True)
    job = subprocess.run(command(["pack", "x.safetensors", "m.h3"]), cwd=tmp_path, env=environment(), check=True)
    assert sorted(os.listdir(tmp_path)) == ["m.h3", "x.safetensors"]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """VmHWM of packing and unpacking 48 and 384 MiB, in processes of their own, differ by less than 24 MiB."""
    peaks: dict[str, list[int]] = {}
    for count in (3, 24):
        data = {f"{i}": torch.randn(2048, 2048) for i in range(count)}
        save_file(data, tmp_path / "x.safetensors")
        for code in ("pack('x.safetensors', 'm.h3', force=True)",
                     "pack('x.safetensors', 'd.h3', base='m.h3', force=True)",
                     "unpack('d.h3', 'back', force=True)"):
            done = run_python(f"""
                import os, h3store.packed, h3store.store
                os.chdir({str(tmp_path)!r})
                h3store.packed.{code}
                print(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1])
                """)
            assert done.returncode == 0, done.stderr
            peaks.setdefault(code, []).append(int(done.stdout) // 1024)
    for code, (small, large) in peaks.items():
        assert large < small + 24, f"{code}: {peaks}"
