"""From a local folder or a hub id to a loaded model of a supported family."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from onptq.errors import OnPTQError
from onptq.models import family_of
from onptq.models.family import Family, text_config

WEIGHTS = "*.safetensors"
HASHED = (WEIGHTS, "*.json", "*.jinja", "*.txt")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
PART, BLOCK = 2**28, 2**22  # bytes of a file that are hashed by one thread, and read at a time
CATALOGED = ("zoo:", "real:")  # prefixes of the names in onptq.zoo.catalog


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk, not yet loaded."""

    name: str  # as the user gave it
    folder: Path
    config: Mapping[str, Any]
    family: Family

    @property
    def shards(self) -> list[Path]:
        return sorted(self.folder.glob(WEIGHTS))

    @property
    def files(self) -> list[Path]:
        """Everything that decides what the model computes: weights, settings, tokenizer and chat template."""
        return sorted(path for pattern in HASHED for path in self.folder.glob(pattern))

    def sha256(self, advance: Callable[[int], None] = lambda files: None) -> str:
        """Of all files, part by part, so that a large shard keeps every core busy."""
        digest = hashlib.sha256()
        sizes = {path: max(1, path.stat().st_size) for path in self.files}
        parts = [(path, start) for path, size in sizes.items() for start in range(0, size, PART)]
        with ThreadPoolExecutor() as pool:
            for (path, start), found in zip(parts, pool.map(_part_sha256, parts), strict=True):
                digest.update(f"{path.name}{f'@{start}' if start else ''}:{found}\n".encode())
                advance(int(start + PART >= sizes[path]))
        return digest.hexdigest()

    def eos(self) -> tuple[int, ...]:
        """Every token that ends a response, from generation_config.json or else config.json."""
        for settings in (_read_json(self.folder / "generation_config.json"), self.config, text_config(self.config)):
            found = settings.get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (found,)
        return ()

    def storage(self) -> torch.dtype:
        """The dtype most of the checkpoint is stored in, which is also what folded gains and steps are rounded to."""
        sizes: dict[str, int] = {}
        with safe_open(self.shards[0], "pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                piece = file.get_slice(name)
                sizes[piece.get_dtype()] = sizes.get(piece.get_dtype(), 0) + math.prod(piece.get_shape())
        stored = max(sizes, key=lambda dtype: sizes[dtype])
        if stored not in STORED:
            raise OnPTQError(
                f"{self.folder}: weights are stored as {stored}; expected {', '.join(STORED)} (not quantized yet)"
            )
        return STORED[stored]


def _part_sha256(part: tuple[Path, int]) -> str:
    path, start = part
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        for _ in range(0, PART, BLOCK):
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def find_source(model: str | Path) -> Source:
    """A folder is taken as it is, `zoo:` and `real:` name the models that come with OnPTQ; anything else must be a hub id
    (`owner/name`), the only thing that uses the network."""
    folder = Path(model)
    if str(model).startswith(CATALOGED):
        from onptq.zoo.catalog import locate

        folder = locate(str(model))
    elif not folder.is_dir():
        folder = _download(str(model))
    config = _read_json(folder / "config.json")
    if not config:
        raise OnPTQError(f"{folder} has no readable config.json; expected a Hugging Face checkpoint folder")
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method")
        raise OnPTQError(f"{folder} is quantized already ({method}); expected a dense checkpoint")
    source = Source(str(model), folder, config, family_of(config))
    if not source.shards:
        raise OnPTQError(
            f"{folder} has no {WEIGHTS} files; expected a checkpoint in safetensors (pickled weights are not read)"
        )
    for shard in source.shards:
        _check_shard(shard)
    return source


def is_hub_id(model: str) -> bool:
    """Whether `model` has to be fetched: no folder here, and of the form `owner/name`."""
    somewhere = model.startswith((".", "/", *CATALOGED)) or model.endswith("/")
    return model.count("/") == 1 and not somewhere and not Path(model).is_dir()


def _check_shard(shard: Path) -> None:
    try:
        with safe_open(shard, "pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise OnPTQError(f"{shard} cannot be read: {error}; expected a whole safetensors file") from error


def choose_device(device: str) -> torch.device:
    """A GPU always with its number: some of PyTorch's functions want it."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise OnPTQError(f"compute.device is {device!r} but this machine has no usable GPU; valid here: cpu, auto")
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def choose_dtype(dtype: str, device: torch.device, note: Callable[[str], None] = lambda text: None) -> torch.dtype:
    """float32 on a CPU, bfloat16 on a GPU. Some CPUs refuse 16-bit products: then float32, with a note."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    chosen = DTYPES[dtype]
    try:
        probe = torch.ones(64, 256, dtype=chosen, device=device)
        torch.nn.functional.linear(probe, torch.ones(256, 256, dtype=chosen, device=device))
    except RuntimeError as error:
        note(f"{dtype} products do not work on this {device.type} ({error}); computing in float32 instead")
        return torch.float32
    return chosen


def load_model(source: Source, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The family's model with finite weights, on the device, never training."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model_class = getattr(transformers, source.family.model_class)
    try:
        model, report = model_class.from_pretrained(
            source.folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise OnPTQError(f"{source.folder} does not load as {source.family.model_class}: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise OnPTQError(
            f"{source.folder} lacks {len(missing)} tensors that {source.family.model_class} needs, e.g. {missing[0]}"
        )
    loaded: nn.Module = model.to(device).eval().requires_grad_(False)
    for name, parameter in loaded.named_parameters():
        if not torch.isfinite(torch.stack(parameter.aminmax())).all():  # of a NaN both ends are NaN; nothing is copied
            raise OnPTQError(f"{source.folder}: the weight {name} holds NaN or infinity; expected finite weights")
    return loaded


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise OnPTQError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise OnPTQError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if not is_hub_id(name):
        from onptq.zoo.catalog import did_you_mean

        raise OnPTQError(
            f"{name!r} is neither a folder here nor a hub id{did_you_mean(name)}; expected a checkpoint folder or owner/name"
        )
    try:
        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"]))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise OnPTQError(
            f"cannot fetch {name!r} from the hub: {error}. A folder of that name does not exist here either"
        ) from error
