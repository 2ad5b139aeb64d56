"""Find a model: a folder, a name of an installed catalog, or a hub id."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from onptq.checkpoint.catalogs import did_you_mean, is_cataloged, locate
from onptq.checkpoint.companions import check_links
from onptq.checkpoint.folder import DTYPES as STORED
from onptq.checkpoint.folder import Checkpoint, read_folder, read_json
from onptq.checkpoint.names import Decoder, find_decoder, storage_dtype
from onptq.errors import OnPTQError
from onptq.models import family_of
from onptq.models.family import Family, text_config

HASHED = ("*.safetensors", "*.json", "*.jinja", "*.txt")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PART, BLOCK = 2**28, 2**22  # bytes of a file that are hashed by one thread, and read at a time


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk, not yet loaded."""

    name: str  # as the user gave it
    folder: Path
    config: Mapping[str, Any]
    family: Family

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return read_folder(self.folder)

    @cached_property
    def whole(self) -> Checkpoint:
        """The checkpoint with the shards that readers take. Raises where it is damaged."""
        return self.checkpoint.require_whole()

    @cached_property
    def decoder(self) -> Decoder:
        """The language model among the tensors. Raises where there is none."""
        return find_decoder(self.whole.tensors, self.family.ignore, self.family.linears)

    @property
    def quantized(self) -> bool:
        return self.checkpoint.quantization is not None

    @property
    def shards(self) -> list[Path]:
        return [shard.file for shard in self.whole.shards]

    @property
    def files(self) -> list[Path]:
        """The files that decide what the model computes: weights, settings, tokenizer and chat template."""
        return sorted(path for pattern in HASHED for path in self.folder.glob(pattern) if path.is_file())

    def sha256(self, advance: Callable[[int], None] = lambda files: None) -> str:
        """The hash over all files, taken part by part, so that a large shard keeps every core busy."""
        digest = hashlib.sha256()
        sizes = {path: max(1, path.stat().st_size) for path in self.files}
        parts = [(path, start) for path, size in sizes.items() for start in range(0, size, PART)]
        with ThreadPoolExecutor() as pool:
            for (path, start), part in zip(parts, pool.map(_part_sha256, parts), strict=True):
                digest.update(f"{path.name}{f'@{start}' if start else ''}:{part}\n".encode())
                advance(int(start + PART >= sizes[path]))
        return digest.hexdigest()

    @cached_property
    def generation(self) -> Mapping[str, Any]:
        """generation_config.json; empty where there is none."""
        path = self.folder / "generation_config.json"
        return read_json(path) if path.is_file() else {}

    def eos(self) -> tuple[int, ...]:
        """Every token that ends a response, from generation_config.json or else config.json."""
        for settings in (self.generation, self.config, text_config(self.config)):
            value = settings.get("eos_token_id")
            if value is not None:
                ids = tuple(value) if isinstance(value, list) else (value,)
                if not all(type(token) is int for token in ids):
                    raise OnPTQError(f"{self.folder}: eos_token_id is {value!r}; expected a token id or a list of them")
                return ids
        return ()

    def storage(self) -> torch.dtype:
        """The dtype of the language model's linears on disk, which folded gains and scales are rounded to."""
        return STORED[storage_dtype(self.whole, self.decoder)]


def find_source(model: str | Path) -> Source:
    """The dense checkpoint that `model` names: a cataloged name, a folder, or a hub id (`owner/name`).

    Only a hub id uses the network.
    """
    name, folder = str(model), Path(model)
    if is_cataloged(name):
        folder = locate(name)
    elif not folder.is_dir():
        folder = _download(name)
    source = _source(name, folder)
    source.whole.require_dense()
    check_links(folder)
    return source


def open_checkpoint(name: str) -> Source:
    """The checkpoint in a folder or under a cataloged name, quantized or not, whole or damaged; no network."""
    return _source(name, locate(name) if is_cataloged(name) else Path(name))


def is_hub_id(model: str) -> bool:
    """Whether `model` has to be fetched: no folder here, and of the form `owner/name`."""
    somewhere = model.startswith((".", "/")) or model.endswith("/") or is_cataloged(model)
    return model.count("/") == 1 and not somewhere and not Path(model).is_dir()


def choose_device(device: str) -> torch.device:
    """The device by its name; a GPU always with its number, which some of PyTorch's functions want."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise OnPTQError(f"compute.device is {device!r} but this machine has no usable GPU; valid here: cpu, auto")
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def choose_dtype(dtype: str, device: torch.device, note: Callable[[str], None] = lambda text: None) -> torch.dtype:
    """float32 on a CPU, bfloat16 on a GPU. Some CPUs refuse 16-bit GEMMs: then float32, with a note."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    chosen = DTYPES[dtype]
    try:
        probe = torch.ones(64, 256, dtype=chosen, device=device)
        torch.nn.functional.linear(probe, torch.ones(256, 256, dtype=chosen, device=device))
    except RuntimeError as error:
        note(f"{dtype} GEMMs do not work on this {device.type} ({error}); computing in float32 instead")
        return torch.float32
    return chosen


def _source(name: str, folder: Path) -> Source:
    checkpoint = read_folder(folder)
    source = Source(name, folder, checkpoint.config, family_of(checkpoint.config, checkpoint.tensors))
    source.__dict__["checkpoint"] = checkpoint
    return source


def _part_sha256(part: tuple[Path, int]) -> str:
    path, start = part
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        for _ in range(0, PART, BLOCK):
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if not is_hub_id(name):
        raise OnPTQError(
            f"{name!r} is neither a folder here nor a hub id{did_you_mean(name)}; expected a checkpoint folder or "
            "owner/name"
        )
    try:
        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise OnPTQError(
            f"cannot fetch {name!r} from the hub: {error}. A folder of that name does not exist here either"
        ) from error
