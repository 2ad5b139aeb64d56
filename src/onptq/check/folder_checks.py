"""Checks of the files: shards, index, and the files beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from onptq.check.findings import Finding, some
from onptq.check.inspected import Inspected
from onptq.checkpoint.companions import companions
from onptq.checkpoint.folder import INDEX, SINGLE, Checkpoint
from onptq.models.processing import SETTINGS_FILES, TOKENIZER_FILES

TOKENIZERS = (*TOKENIZER_FILES, "tekken.json", "qwen.tiktoken")
TEMPLATES = ("chat_template.jinja", "chat_template.json")
TOKENIZER_CONFIG = "tokenizer_config.json"  # may hold a chat template
GENERATION = "generation_config.json"
SPEAKERS = "spk_dict.pt"


def check_shards(inspected: Inspected) -> Iterator[Finding]:
    shards = inspected.checkpoint.shards
    if not shards:
        yield Finding(
            "no-weights", f"{inspected.checkpoint.folder} holds no .safetensors file", "Nothing can be loaded."
        )
    missing = [shard.file.name for shard in shards if shard.missing]
    if missing:
        lost = sum(file in missing for file in (inspected.checkpoint.weight_map or {}).values())
        yield Finding(
            "missing-shard",
            f"{INDEX} names {some(missing)}, with {lost} tensors, but the folder does not hold it",
            "No reader can load the checkpoint; fetch the file again.",
        )
    for shard in shards:
        if shard.unreadable is not None and not shard.missing:
            yield Finding(
                "unreadable-shard",
                f"cannot read {shard.file.name} ({shard.actual_bytes:,} bytes): {shard.unreadable}",
                "No reader can load it. A truncated download? Fetch it again.",
            )
        elif shard.unreadable is None and not shard.whole:
            yield Finding(
                "truncated-shard",
                f"{shard.file.name} has {shard.actual_bytes:,} bytes, its header describes {shard.expected_bytes:,}",
                "An interrupted download or copy; every reader refuses the file. Fetch it again.",
            )


def check_index(inspected: Inspected) -> Iterator[Finding]:
    checkpoint = inspected.checkpoint
    missing = {shard.file.name for shard in checkpoint.shards if shard.missing}
    problems = []
    if checkpoint.index_error is not None:
        problems.append(checkpoint.index_error)
    if checkpoint.weight_map is None and len(checkpoint.shards) > 1:
        problems.append(f"is missing, though the weights lie in {len(checkpoint.shards)} files")
    if checkpoint.weight_map is not None and checkpoint.index_error is None:
        holders = {(name, shard.file.name) for shard in checkpoint.shards for name in shard.tensors}
        named = set(checkpoint.weight_map.items())
        wrong = sorted(name for name, file in named - holders if file not in missing)
        if wrong:
            problems.append(f"names {len(wrong)} tensors where they are not: {some(wrong)}")
        unnamed = sorted({name for name, _ in holders} - {name for name, _ in named})
        if unnamed:
            problems.append(f"does not name {len(unnamed)} stored tensors: {some(unnamed)}")
    if problems:
        yield Finding(
            "wrong-index",
            f"{INDEX} " + "; ".join(problems),
            "Readers open the shards that it names: tensors of any other shard become random numbers. Readers that look "
            "each tensor up where the index says refuse the checkpoint.",
            fixable=can_rebuild_index(inspected),
        )


def can_rebuild_index(inspected: Inspected) -> bool:
    """Whether all shards are whole and every tensor has one place: an index must not hide a loss."""
    checkpoint = inspected.checkpoint
    whole = bool(checkpoint.shards) and all(shard.whole for shard in checkpoint.shards)
    return whole and not checkpoint.doubles and not checkpoint.stale_single


def check_doubles(inspected: Inspected) -> Iterator[Finding]:
    doubles = inspected.checkpoint.doubles
    if inspected.checkpoint.stale_single:
        yield Finding(
            "stale-weights",
            f"{SINGLE} lies beside {INDEX}, which does not name it",
            "transformers reads the one, servers the other. Delete the stale one.",
        )
    elif doubles:
        name, files = next(iter(doubles.items()))
        yield Finding(
            "tensor-twice",
            f"{len(doubles)} tensors are stored more than once: {name} in {' and '.join(files)}",
            "Readers that open every shard take whichever they read last. Shards of an earlier export?",
        )


def check_companions(inspected: Inspected) -> Iterator[Finding]:
    checkpoint = inspected.checkpoint
    if not checkpoint.has(*TOKENIZERS):
        yield _absent("tokenizer", TOKENIZER_FILES, "Prompts cannot be tokenized, by any reader.")
    if inspected.multimodal and not checkpoint.has(*SETTINGS_FILES):
        yield _absent(
            "processor", SETTINGS_FILES, "Servers refuse images and audio, or silently load the model as a text model."
        )
    if chat_template(checkpoint) is None:
        yield _absent(
            "chat-template",
            (*TEMPLATES, f"chat_template in {TOKENIZER_CONFIG}"),
            "Chat requests fail, and no reader knows where an image's tokens belong.",
            note=not inspected.multimodal,
        )
    if not checkpoint.has(GENERATION):
        yield _absent(
            "generation-config",
            (GENERATION,),
            "The end-of-turn tokens and sampling defaults of the source are lost; answers may not stop.",
            note=not inspected.multimodal,
        )
    speaks = "talker_config" in checkpoint.config and checkpoint.config.get("enable_audio_output", True)
    if speaks and not checkpoint.has(SPEAKERS):
        yield _absent("speakers", (SPEAKERS,), "transformers cannot load the full Omni model without its speakers.")


def chat_template(checkpoint: Checkpoint) -> str | None:
    """The file that holds the chat template."""
    in_tokenizer = bool(checkpoint.json(TOKENIZER_CONFIG).get("chat_template"))
    own = next((name for name in TEMPLATES if checkpoint.has(name)), None)
    return own or (TOKENIZER_CONFIG if in_tokenizer else None)


def lost_companions(inspected: Inspected, source: Path) -> Iterator[Finding]:
    """The files that the source has beside its weights and the checkpoint has not."""
    lost = sorted(set(companions(source)) - set(companions(inspected.checkpoint.folder)))
    if lost:
        yield Finding("lost-files", f"no {some(map(str, lost))}, which the source has", "Copy them from the source.")


def _absent(kind: str, expected: tuple[str, ...], why: str, *, note: bool = False) -> Finding:
    return Finding(f"missing-{kind}", f"no {' or '.join(expected)}", f"{why} Copy the file from the source.", note=note)
