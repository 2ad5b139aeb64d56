"""Random checkpoints of the real architectures, written once per session, and policies made of them."""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some CPUs announce AMX and then refuse bf16 products

import copy
import gc
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import nn
from web_server import Answering, FakeServer, Serve

from onptq.checkpoint.load import load_model
from onptq.checkpoint.source import Source, find_source
from onptq.data.manifest import load_manifest
from onptq.models.encoding import EncodedPrompt, encode
from onptq.models.language_model import LanguageModel
from onptq.models.processing import ModelInputs, PromptProcessor
from onptq.quantizer.policy import Policy
from onptq.schemes import Scheme
from onptq.zoo.random import write_random

torch.set_num_threads(1)  # more threads than free cores make small products many times slower

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)  # the same every time, however slow
if "CI" in os.environ:
    settings.load_profile("ci")


def in_turn(values: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Parameters: every value once, with values of the others that take turns. For what fails by one of them alone."""
    return [(value, *(other[place % len(other)] for other in others)) for place, value in enumerate(values)]


MULTIMODAL = ("qwen2.5-vl", "qwen3-vl", "qwen2.5-omni")
FAMILIES = (*MULTIMODAL, "llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Tiny:
    """A random checkpoint and its prompts."""

    folder: Path
    source: Source
    processor: PromptProcessor

    @property
    def manifest(self) -> Path:
        return self.folder / "prompts.jsonl"

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A model of one's own, of a registered family read from disk once per session."""
        if self.source.family.derived:
            return load_model(self.source, dtype, torch.device("cpu"))
        if (self.folder, dtype) not in _loaded:
            _loaded[self.folder, dtype] = load_model(self.source, dtype, torch.device("cpu"))
        return copy.deepcopy(_loaded[self.folder, dtype])

    def policy(
        self, scheme: str = "W4A8", dtype: torch.dtype = torch.float32, eos: Collection[int] | None = None
    ) -> Policy:
        ends = self.source.eos() if eos is None else tuple(eos)
        return Policy(self.model(dtype), Scheme.parse(scheme), storage=self.source.storage(), eos=ends)

    def inputs(self, ordinal: int) -> ModelInputs:
        """What the processor makes of a prompt, once per session."""
        if (self.folder, ordinal) not in _processed:
            _processed[self.folder, ordinal] = self.processor(load_manifest(self.manifest)[ordinal])
        return _processed[self.folder, ordinal]

    def encode(self, model: LanguageModel, count: int) -> list[EncodedPrompt]:
        return [encode_one(model, self.inputs(ordinal), ordinal) for ordinal in range(count)]


_loaded: dict[tuple[Path, torch.dtype], nn.Module] = {}
_processed: dict[tuple[Path, int], ModelInputs] = {}


def encode_one(model: LanguageModel, inputs: ModelInputs, ordinal: int = 0) -> EncodedPrompt:
    """The prompt encoded in a forward of its own, so that no neighbour changes its last bits."""
    return encode(model, [inputs], [ordinal])[0]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """`tiny("qwen3-vl")`: the family's random checkpoint, the same one for the whole session."""
    made: dict[str, Tiny] = {}

    def get(family: str) -> Tiny:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            write_random(family, folder, prompts=12)
            source = find_source(folder)
            made[family] = Tiny(folder, source, PromptProcessor.from_folder(folder, source.family, source.config))
        return made[family]

    return get


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is quantized in a second, and its prompts. Not to be written to."""
    folder = tmp_path_factory.mktemp("small")
    return write_random(
        "qwen2.5-vl", folder, prompts=6, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=512, image_size=56
    )


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(answering)`: a web server on loopback that answers by a function of path and body."""
    servers: list[FakeServer] = []

    def start(answering: Answering) -> FakeServer:
        servers.append(FakeServer(answering))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`tmpfs("2m")`: a file system of that size, where one can be mounted."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        try:
            worked = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
        except FileNotFoundError:
            worked = False
        if not worked:
            pytest.skip("no small file system can be mounted here")
        mounted.append(folder)
        return folder

    yield mount
    gc.collect()  # what a failed run leaves to be collected may still hold its files open
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)
