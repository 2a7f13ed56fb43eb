"""inspect, verify, doctor, import-gguf and the rules that hold for every command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import h3store
from h3store.archive import Reader
from tests.e2e.conftest import Cli, environment


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    tensors = {
        "weight": torch.randn(300, 256).to(torch.bfloat16),
        "steps": torch.arange(50_000),
        "none": torch.zeros(0, 4),
    }
    h3store.save(tensors, tmp_path / "a.h3")
    return tmp_path / "a.h3"


def test_inspect_shows_tensors_and_totals(cli: Cli, archive: Path) -> None:
    shown = json.loads(cli("inspect", archive, "--json", check=0).stdout)
    tensors = {t["name"]: t for t in shown["tensors"]}
    assert set(tensors) == {"weight", "steps", "none"}
    assert (tensors["weight"]["dtype"], tensors["weight"]["shape"]) == ("bfloat16", [300, 256])
    assert tensors["weight"]["raw_bytes"] == 300 * 256 * 2
    assert tensors["weight"]["ratio"] > 1.2 and tensors["steps"]["ratio"] > 4
    assert shown["raw_bytes"] == sum(t["raw_bytes"] for t in tensors.values())
    table = cli("inspect", archive, check=0).stdout
    for said in ("weight", "bfloat16", "300 x 256", "steps", "total"):
        assert said in table


def test_inspect_shows_what_was_declared(cli: Cli, tmp_path: Path) -> None:
    with h3store.open(tmp_path / "a.h3", mode="w") as store:
        store.put("table", torch.randn(9_000), access="random", compression="none")
        store.create("odd", (5,), torch.float32, chunk_bytes=8192)
    shown = json.loads(cli("inspect", "a.h3", "--json", check=0).stdout)
    by_name = {t["name"]: (t["chunk_bytes"], t["access"], t["compression"]) for t in shown["tensors"]}
    assert by_name == {"table": (16384, "random", "none"), "odd": (8192, None, "auto")}
    table = " ".join(cli("inspect", "a.h3", check=0).stdout.split())
    assert "16KiB random RAW 3 (compression none)" in table and "8KiB ZERO 1" in table


def test_verify_finds_nothing_wrong(cli: Cli, archive: Path) -> None:
    assert "sound" in cli("verify", archive, check=0).stdout
    assert json.loads(cli("verify", archive, "--json", check=0).stdout)["bad"] == []


def test_verify_names_what_is_damaged(cli: Cli, archive: Path) -> None:
    data = bytearray(archive.read_bytes())
    data[len(data) // 4] ^= 1  # inside the largest tensor's stored bytes
    archive.write_bytes(data)
    done = cli("verify", archive, check=3)
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("h3store: error: ") and "a.h3" in line
    assert any(word in line for word in ("weight", "steps")) and "block" in line and "offset" in line


def test_verify_names_a_damaged_table(cli: Cli, archive: Path) -> None:
    with Reader(archive) as reader:
        at = reader.record("weight").table
    assert at is not None
    data = bytearray(archive.read_bytes())
    data[at.offset] ^= 1
    archive.write_bytes(data)
    done = cli("verify", archive, check=3)
    assert "1 damaged part, the first is tensor weight, its chunk table, offset" in done.stderr
    assert "block -1" not in done.stdout


def test_a_tensor_that_is_nearly_nothing_has_no_digits_of_a_ratio(cli: Cli, tmp_path: Path) -> None:
    h3store.save({"zeros": torch.zeros(10_000_000)}, tmp_path / "z.h3")
    shown = cli("inspect", "z.h3", check=0).stdout
    assert ">1000" in shown and "1 tensor " in shown


@pytest.mark.parametrize("cut", [0, 3, 100])
def test_a_cut_archive_is_an_integrity_error(cli: Cli, archive: Path, cut: int) -> None:
    data = archive.read_bytes()
    archive.write_bytes(data[:cut] if cut < 100 else data[:-cut])
    for command in ("inspect", "verify", "compact"):
        assert "a.h3" in cli(command, archive, check=3).stderr


def test_verify_rolls_back_only_when_asked(cli: Cli, archive: Path) -> None:
    assert "sound" in cli("verify", archive, "--rollback", check=2).stderr
    archive.write_bytes(archive.read_bytes()[:-1])
    assert "h3store verify a.h3 --rollback" in cli("verify", "a.h3", check=3).stderr
    done = cli("verify", archive, "--rollback", check=0)
    assert "now at commit 1" in done.stderr and "0 tensors" in done.stdout
    assert "0 tensors" in cli("verify", archive, check=0).stdout


def test_a_missing_archive_is_bad_input(cli: Cli) -> None:
    for command in ("inspect", "verify"):
        assert "no.h3" in cli(command, "no.h3", check=2).stderr


def test_doctor_says_what_to_do_where_something_is_missing(cli: Cli, tmp_path: Path) -> None:
    found = json.loads(cli("doctor", "--json", check=0).stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert {
        "kernel",
        "privilege",
        "userfaultfd",
        "fault delivery",
        "vm.max_map_count",
        "memory",
        "cgroup memory limit",
        "RLIMIT_AS",
        "processor",
        "versions",
        "CUDA",
        "disk",
    } <= set(checks)
    assert all(check["status"] == "ok" or check["advice"] for check in checks.values())
    assert checks["fault delivery"]["value"].startswith(("signal", "dispatch"))
    assert "MB/s" in checks["disk"]["value"]
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
    text = cli("doctor", check=0).stdout
    assert all(name in text for name in checks)


def test_doctor_measures_no_other_folder_than_it_was_told(cli: Cli, tmp_path: Path) -> None:
    found = json.loads(cli("doctor", "--json", "--path", str(tmp_path / "nope"), check=0).stdout)
    disk = next(check for check in found["checks"] if check["name"] == "disk")
    assert disk["status"] == "fail" and str(tmp_path / "nope") in disk["value"]


def test_doctor_reports_a_folder_that_can_not_be_written(cli: Cli) -> None:
    found = json.loads(cli("doctor", "--json", "--path", "/proc/no/such", check=0).stdout)
    (disk,) = [check for check in found["checks"] if check["name"] == "disk"]
    assert disk["status"] == found["status"] == "fail" and "--path" in disk["advice"]


def test_debug_shows_the_traceback(archive: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "h3store", "verify", str(archive) + ".no"],
        capture_output=True,
        text=True,
        env={**environment(), "H3STORE_DEBUG": "1"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and "Traceback" in done.stderr


def test_a_reader_that_goes_away_is_no_error(archive: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m h3store doctor | true; echo ${{PIPESTATUS[0]}}"],
        text=True,
        env=environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "0" and done.stderr == ""
