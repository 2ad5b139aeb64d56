"""From `method:scheme` to its theta, and what that cost: seconds, peak memory, bytes of the checkpoint."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onptq.checkpoint.source import Source
from onptq.checkpoint.write import storage_format
from onptq.data.prompts import Prompt
from onptq.evaluate.candidates import Built
from onptq.models.encoding import EncodedPrompt
from onptq.models.structure import LINEARS
from onptq.progress import Reporter
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.run import run_home

# Phases of the job that are no calibration: what every method needs alike, and what follows it.
UNCOUNTED = ("Hash", "Load", "Encode", "Export", "Verify")


@dataclass
class Peak:
    """The most memory held while a block ran; None where the system does not say."""

    bytes: int | None = None


def build_at_once(
    policy: Policy,
    name: str,
    method: Callable[[Policy, Sequence[EncodedPrompt], Callable[[int], None]], Theta],
    prompts: Sequence[EncodedPrompt],
    source: Source,
    reporter: Reporter,
) -> tuple[Theta, dict[str, Any]]:
    """Theta of a method that goes over the blocks once, and its cost."""
    with (
        reporter.phase(f"Build {name}", total=policy.blocks, unit="blocks") as bar,
        measured_peak(policy.device) as peak,
    ):
        began = time.monotonic()
        theta = method(policy, prompts, bar.advance)
        seconds = time.monotonic() - began
    cost = {"seconds": seconds, "peak_bytes": peak.bytes, "checkpoint_bytes": checkpoint_bytes(policy, source)}
    return theta, cost


def build_by_the_cycle(
    candidate: Built,
    source: Source,
    calibration: Sequence[Prompt],
    holdout: Sequence[Prompt],
    folder: Path,
    device: torch.device,
    reporter: Reporter,
    start: Path,
) -> tuple[Theta, dict[str, Any]]:
    """The whole job into `folder`, checkpoint included, from the theta^(0) in the file `start`; after a kill it goes on where
    it was."""
    from onptq.pipeline import INIT, quantize  # above this module, which the job's own comparison shares

    data = candidate.recipe.data
    with measured_peak(device) as peak:
        result = quantize(
            source.name,
            folder,
            calibration=calibration[: data.prompts],
            holdout=holdout[: data.holdout],
            recipe=candidate.recipe,
            reporter=reporter,
            verify=False,
            start=start,
        )
    rounds = candidate.recipe.rounds
    last = ("rounds", str(rounds - 1), "theta.safetensors") if rounds else (INIT,)
    theta = Theta.load(run_home(folder).joinpath(*last), device)
    seconds = _calibration_seconds(result.summary["seconds"])
    return theta, {
        "seconds": seconds,
        "peak_bytes": peak.bytes,
        "checkpoint_bytes": result.summary["checkpoint"]["bytes"],
    }


def checkpoint_bytes(policy: Policy, source: Source) -> int:
    """What the exporter would write: the source's bytes, with codes and steps in place of the decoder's linears."""
    scheme = policy.scheme
    bits = scheme.weight_bits if storage_format(scheme) == "pack-quantized" else 8
    total = folder_bytes(source.shards)
    for block in policy.structure.blocks:
        for name in LINEARS:
            rows, columns = block.child(name).weight.shape  # type: ignore[union-attr, misc]
            groups = rows * (columns // (scheme.group_size or columns))
            step = policy.storage.itemsize + (not scheme.symmetric)
            total += math.ceil(rows * columns * bits / 8) + groups * step - rows * columns * policy.storage.itemsize
    return int(total)


def folder_bytes(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


@contextmanager
def measured_peak(device: torch.device) -> Iterator[Peak]:
    """On a GPU what tensors held, on a CPU what the process held."""
    peak = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device)
        return
    reset = False
    with suppress(OSError):  # Linux forgets the high-water mark when asked so
        Path("/proc/self/clear_refs").write_text("5")
        reset = True
    yield peak
    if reset:
        status = Path("/proc/self/status").read_text()
        peak.bytes = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def _calibration_seconds(phases: Mapping[str, float]) -> float:
    return sum(seconds for phase, seconds in phases.items() if phase.split()[0] not in UNCOUNTED)
