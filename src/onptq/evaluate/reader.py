"""Any checkpoint that transformers loads, as something that answers like a policy: whoever quantized it, and however.

Nothing of it is wrapped or changed. Its own blocks run over our batches, positions and caches, so that it meets the
same prompts under the same decoding as everybody else.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from onptq.errors import OnPTQError
from onptq.export.verify import unpack
from onptq.models import family_of
from onptq.models.decoder import Cache, KVCache, Tokens, head_logits, run_blocks
from onptq.models.encoding import EncodedPrompt, encode
from onptq.models.family import Family
from onptq.models.loading import CATALOGED, Source, load_model
from onptq.models.structure import Block, Structure
from onptq.policy import Policy, Side

COMPRESSED = "compressed-tensors"
QUANTIZED = (".weight_scale", ".weight_packed")  # what a quantized linear has on disk and no other one
_DECODER_LINEAR = re.compile(r"(?:.*\.)?(layers\.\d+\.(?:self_attn|mlp)\.\w+)")


class Reader:
    """A model as it was loaded. It has one voice: whichever side is asked for, it answers as itself."""

    def __init__(self, model: nn.Module, eos: Sequence[int]) -> None:
        self.model, self.eos = model.eval().requires_grad_(False), frozenset(eos)
        self.structure = find_blocks(model)
        weight = self.structure.embedding.weight
        self.dtype, self.device = weight.dtype, weight.device

    @property
    def vocabulary(self) -> int:
        return self.structure.head.weight.shape[0] if self._plain_head else self.structure.head.out_features

    @property
    def _plain_head(self) -> bool:
        head = self.structure.head
        return type(head) is nn.Linear and getattr(head, "quantization_scheme", None) is None

    def speaking(self, side: Side) -> nullcontext[None]:
        return nullcontext()

    def encode(self, inputs: Mapping[str, Tensor], modality: Tensor, ordinal: int = 0) -> EncodedPrompt:
        return encode(self.model, self.structure, inputs, modality, ordinal)

    def embed(self, ids: Tensor) -> Tensor:
        return self.structure.embedding(ids)  # type: ignore[no-any-return]

    def cache(self, batch: int, slots: int) -> KVCache:
        return KVCache(self.structure, batch, slots, self.dtype, self.device)

    def run(self, tokens: Tokens, cache: Cache | None = None) -> Tensor:
        return run_blocks(self.structure, tokens, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        if self._plain_head:
            return head_logits(self.structure, hidden)
        normed = self.structure.decoder.norm(hidden)  # type: ignore[operator]
        return self.structure.head(normed).float()  # type: ignore[no-any-return]

    def as_policy(self) -> Policy:
        """For what asks of a policy only that it encodes, runs and speaks."""
        return cast(Policy, self)


def open_checkpoint(name: str) -> Source:
    """A checkpoint folder, quantized or not, or a name of `onptq zoo list`."""
    folder = Path(name)
    if name.startswith(CATALOGED):
        from onptq.zoo.catalog import locate

        folder = locate(name)
    config = _read_config(folder)
    source = Source(name, folder, config, family_of(config))
    if not source.shards:
        raise OnPTQError(f"{folder} has no safetensors files; expected a checkpoint in safetensors")
    return source


def load_reader(source: Source, dtype: torch.dtype, device: torch.device, eos: Sequence[int]) -> Reader:
    quantization = source.config.get("quantization_config")
    if quantization is None:
        return Reader(load_model(source, dtype, device), eos)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    compressed = quantization.get("quant_method") == COMPRESSED
    options: dict[str, Any] = {}
    if compressed:
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=False)
    model_class = getattr(transformers, source.family.model_class)
    # compressed-tensors draws bars of its own, which nothing but their stream can turn off.
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()), _readable(source) as folder:
        warnings.filterwarnings("ignore", "You passed `quantization_config`")  # to say how, not what, to load
        try:
            model, report = model_class.from_pretrained(
                folder, dtype=dtype, local_files_only=True, output_loading_info=True, **options
            )
            if compressed:
                unpack(model, dtype)
        except Exception as error:  # a quantizer is a package of its own and may raise anything
            raise OnPTQError(
                f"{source.folder} ({quantization.get('quant_method')}) does not load in transformers: {error}"
            ) from error
    gaps = [key for kind in ("missing_keys", "mismatched_keys") for key in map(str, report.get(kind) or ())]
    if gaps:  # transformers itself only warns, and fills the gap with random numbers
        raise OnPTQError(f"{source.folder}: {len(gaps)} tensors are missing or misshapen, e.g. {sorted(gaps)[0]}")
    return Reader(model.to(device), eos)


def find_blocks(model: nn.Module) -> Structure:
    """As `find_structure`, but of the linears only their place is asked: packed ones are modules of many kinds."""
    decoders = [module for module in model.modules() if _is_decoder(module)]
    if len(decoders) != 1:
        raise OnPTQError(f"{type(model).__name__} has {len(decoders)} language models; expected exactly one")
    decoder = decoders[0]
    config: Any = decoder.config
    blocks = []
    for index, layer in enumerate(decoder.layers):  # type: ignore[arg-type]
        if getattr(layer.self_attn, "sliding_window", None):
            raise OnPTQError(f"layer {index} uses sliding-window attention; only full attention is supported")
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        blocks.append(Block(index, layer, heads, kv_heads, layer.self_attn.head_dim))
    return Structure(decoder, tuple(blocks), model.get_output_embeddings())  # type: ignore[operator]


def _is_decoder(module: nn.Module) -> bool:
    layers = getattr(module, "layers", None)
    return (
        all(hasattr(module, name) for name in ("embed_tokens", "rotary_emb", "norm"))
        and isinstance(layers, nn.ModuleList)
        and all(hasattr(layer, "self_attn") and hasattr(layer, "mlp") for layer in layers)
    )


@contextmanager
def _readable(source: Source) -> Iterator[Path]:
    """The folder as transformers reads it right: with every linear that is plain on disk named so that it stays plain.

    compressed-tensors writes the exact names on disk into its ignore list, transformers looks for those at run time. Where
    they differ (Qwen2.5-VL, Omni) it takes the towers for quantized, and pictures become noise. And the thinker of a full
    Omni checkpoint sees no quantization that only the outer config.json speaks of.
    """
    quantization = source.config["quantization_config"]
    if quantization.get("quant_method") != COMPRESSED:
        yield source.folder
        return
    ignore = [*(quantization.get("ignore") or ()), *plain_patterns(source.shards, source.family)]
    config = dict(source.config) | {"quantization_config": quantization | {"ignore": ignore}}
    if isinstance(config.get("thinker_config"), dict):
        inner = {"quantization_config": config["quantization_config"]}
        config["thinker_config"] = config["thinker_config"] | inner
    with tempfile.TemporaryDirectory(prefix="onptq-") as folder:
        for path in source.folder.iterdir():
            if path.is_file() and path.name != "config.json":
                (Path(folder) / path.name).symlink_to(path.resolve())
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(folder)


def plain_patterns(shards: Sequence[Path], family: Family) -> list[str]:
    """Regexes, for names at run time, of the linears that have no quantized tensors on disk; none if no linear has any."""
    names, matrices = set(), set()
    for shard in shards:
        try:
            with safe_open(shard, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    names.add(name)
                    if name.endswith(".weight") and len(file.get_slice(name).get_shape()) == 2:
                        matrices.add(name.removesuffix(".weight"))
        except (SafetensorError, OSError) as error:
            raise OnPTQError(f"{shard} cannot be read: {error}; expected a whole safetensors file") from error
    quantized = {name.removesuffix(end) for name in names for end in QUANTIZED if name.endswith(end)}
    if not quantized:
        return []
    towers = "|".join((*family.towers, *(f"{re.escape(prefix)}.*" for prefix in family.other_models)))
    patterns = [r"re:.*lm_head$"] if not any(name.endswith("lm_head") for name in quantized) else []
    for module in sorted(matrices - quantized):
        linear = _DECODER_LINEAR.fullmatch(module)
        if linear and not (towers and re.match(towers, module)):
            outside = f"(?!(?:{towers})$)" if towers else ""
            patterns.append(rf"re:{outside}(?:.*\.)?{re.escape(linear[1])}$")
        else:
            patterns.append(rf"re:(?:.*\.)?{re.escape(module.removeprefix('thinker.'))}$")
    return patterns


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OnPTQError(f"{folder} has no readable config.json: {error}; expected a checkpoint folder") from error
    if not isinstance(config, dict):
        raise OnPTQError(f"{folder / 'config.json'} holds a {type(config).__name__}; expected a JSON object")
    return config
