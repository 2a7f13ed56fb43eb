"""A forward pass of a model twice the budget: h3store.attach against accelerate's disk offload, same weights and input.

Before each pass the files' pages are dropped, as a machine without that memory would have done; h3store keeps what its
budget holds, accelerate keeps no weights. The first pass, in which attach learns the order, is left out and tracked on
its own.

    python -m asv_bench.benchmarks.offload NAME    one contender, one process; prints its times as JSON
"""

from __future__ import annotations

import importlib.util
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .common import (
    BENCH_BYTES,
    MiB,
    bench_folder,
    drop_caches,
    fresh_medians,
    measure_each,
    median_of,
    named,
    print_result,
)
from .reads import digest

WIDTH = 4096
MODEL_BYTES = max(BENCH_BYTES // 2, 128 * MiB)
LAYERS = MODEL_BYTES // (2 * WIDTH * WIDTH)
BUDGET = MODEL_BYTES // 2
PASSES = 5
FORWARD, FIRST, WARM_FORWARD = "forward, cold files", "first forward", "forward, files cached"
PASSIVE = "forward, cold files, OMP_WAIT_POLICY=passive"


def model_on(device: str) -> Any:
    """Square linear layers of bfloat16; weights from state(), or none on the meta device."""
    import torch

    with torch.device(device):
        return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
                                     for _ in range(LAYERS))).requires_grad_(False)


def state() -> dict[str, Any]:
    """Weights with which activations neither grow nor fade."""
    import torch

    generator = torch.Generator().manual_seed(3)
    return {f"{i}.weight": (torch.randn(WIDTH, WIDTH, generator=generator) * WIDTH**-0.5).to(torch.bfloat16)
            for i in range(LAYERS)}


def archive() -> Path:
    """The weights as an archive."""
    return bench_folder() / "model.h3"


def offloaded() -> Path:
    """The weights as accelerate keeps them on disk."""
    return bench_folder() / "model-offloaded"


def prepare(name: str) -> None:
    """Writes the weights in a contender's form, if they are not there."""
    if name == "h3store" and not archive().exists():
        import h3store

        h3store.save(state(), part := archive().with_suffix(".part"), access="stream")
        part.rename(archive())
    if name != "h3store" and not offloaded().exists():
        from accelerate.utils import offload_state_dict

        part = offloaded().with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        offload_state_dict(str(part), state())
        part.rename(offloaded())


def h3store_model() -> Any:
    """Attached to the archive."""
    import h3store

    model = model_on("meta")
    model.attached = h3store.attach(model, ddr_bytes=BUDGET, path=archive())
    return model


def accelerate_model() -> Any:
    """Weights are read from their files before a layer runs, and dropped after it."""
    from accelerate import dispatch_model

    device_map = {str(i): "disk" for i in range(LAYERS)}
    return dispatch_model(model_on("meta"), device_map=device_map, main_device="cpu", offload_dir=str(offloaded()))


MODELS = {"h3store": (h3store_model, archive), "accelerate": (accelerate_model, offloaded)}


def measure(name: str) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of a forward pass, and its output."""
    import torch

    make, files = MODELS[name]
    drop_caches([files()])
    model = make()
    x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)

    def forward(cold: bool) -> tuple[float, Any]:
        if cold:
            drop_caches([files()])
        start = time.perf_counter()
        with torch.no_grad():
            out = model(x)
        return time.perf_counter() - start, out

    first = forward(True)[0]
    cold = [forward(True) for _ in range(PASSES)]
    warm = [forward(False)[0] for _ in range(PASSES)]
    outputs = {digest(out) for _, out in cold}
    if len(outputs) > 1:
        raise RuntimeError(f"{name}: passes differ: {outputs}")
    return ({FORWARD: statistics.median(t for t, _ in cold), FIRST: first, WARM_FORWARD: statistics.median(warm[1:])},
            {FORWARD: outputs.pop()})


def measure_all(say: Callable[[str], None] = lambda text: None, processes: int | None = None
                ) -> dict[str, dict[str, Any]]:
    """{contender: {work: median, all, output}}; raises RuntimeError when their outputs differ."""
    found = [name for name in MODELS if importlib.util.find_spec(name)]
    results = measure_each("offload", found, prepare, say, processes)
    for name in found:  # OpenMP's threads sleep while they wait, instead of spinning on a processor
        results[name][PASSIVE] = fresh_medians("offload", [name], processes, OMP_WAIT_POLICY="passive")[FORWARD]
        say(f"  {name:28}{PASSIVE} {results[name][PASSIVE]['median']:.3f}")
    if len({found[work]["output"] for found in results.values() for work in (FORWARD, PASSIVE)}) > 1:
        raise RuntimeError(f"models give different outputs: {results}")
    return results


class Forward:
    """A model twice the budget, batch of one."""

    params = [list(MODELS)]  # noqa: RUF012  asv reads it as a plain class attribute
    param_names = ["contender"]  # noqa: RUF012
    timeout = 1200

    def setup_cache(self) -> dict[str, dict[str, Any]]:
        """One fresh process for each."""
        return measure_all(processes=1)

    @named("Forward pass of a model twice the budget, files cold", "s")
    def track_forward(self, results: dict[str, dict[str, Any]], name: str) -> float:
        """Pages of the files dropped before each pass."""
        return median_of(results, name, FORWARD)

    @named("Forward pass of a model twice the budget, files cold, OMP_WAIT_POLICY=passive", "s")
    def track_passive_forward(self, results: dict[str, dict[str, Any]], name: str) -> float:
        """The same where OpenMP's idle threads leave the processors to those who decode."""
        return median_of(results, name, PASSIVE)

    @named("First forward pass of a model twice the budget", "s")
    def track_first_forward(self, results: dict[str, dict[str, Any]], name: str) -> float:
        """attach learns the order of layers in it."""
        return median_of(results, name, FIRST)

    @named("Forward pass of a model twice the budget, files in the page cache", "s")
    def track_cached_forward(self, results: dict[str, dict[str, Any]], name: str) -> float:
        """Where memory beside the budget holds the files after all."""
        return median_of(results, name, WARM_FORWARD)


if __name__ == "__main__":
    print_result(*measure(sys.argv[1]))
