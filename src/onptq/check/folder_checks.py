"""Defects of the files: shards, index, and what must lie beside them."""

from __future__ import annotations

from collections.abc import Iterator

from onptq.check.subject import Defect, Subject, some
from onptq.checkpoint.folder import INDEX

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "qwen.tiktoken")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
GENERATION = "generation_config.json"
SPEAKERS = "spk_dict.pt"


def check_shards(subject: Subject) -> Iterator[Defect]:
    shards = subject.reading.shards
    if not shards:
        yield Defect("no-weights", f"{subject.reading.folder} holds no .safetensors file", "Nothing can be loaded.")
    missing = [shard.file.name for shard in shards if shard.missing]
    if missing:
        lost = sum(file in missing for file in (subject.reading.weight_map or {}).values())
        yield Defect(
            "missing-shard",
            f"{INDEX} names {some(missing)}, with {lost} tensors, but the folder does not hold it",
            "No reader can load the checkpoint; fetch the file again.",
        )
    for shard in shards:
        if shard.unreadable is not None and not shard.missing:
            yield Defect(
                "unreadable-shard", f"{shard.file.name}: {shard.unreadable}", "No reader can load it; fetch it again."
            )
        elif shard.unreadable is None and not shard.whole:
            yield Defect(
                "truncated-shard",
                f"{shard.file.name} has {shard.actual_bytes:,} bytes, its header describes {shard.expected_bytes:,}",
                "An interrupted download or copy; every reader refuses the file. Fetch it again.",
            )


def check_index(subject: Subject) -> Iterator[Defect]:
    reading = subject.reading
    missing = {shard.file.name for shard in reading.shards if shard.missing}
    problems = []
    if reading.index_error is not None:
        problems.append(reading.index_error)
    if reading.weight_map is None and len(reading.shards) > 1:
        problems.append(f"is missing, though the weights lie in {len(reading.shards)} files")
    if reading.weight_map is not None and reading.index_error is None:
        holders = {(name, shard.file.name) for shard in reading.shards for name in shard.tensors}
        named = set(reading.weight_map.items())
        wrong = sorted(name for name, file in named - holders if file not in missing)
        if wrong:
            problems.append(f"names {len(wrong)} tensors where they are not: {some(wrong)}")
        unnamed = sorted({name for name, _ in holders} - {name for name, _ in named})
        if unnamed:
            problems.append(f"does not name {len(unnamed)} stored tensors: {some(unnamed)}")
    if problems:
        yield Defect(
            "wrong-index",
            f"{INDEX} " + "; ".join(problems),
            "Readers find the shards by it: one that it does not name is never read, and its tensors become random numbers; "
            "readers that look each tensor up where the index says refuse the checkpoint.",
            mendable=can_rebuild_index(subject),
        )


def can_rebuild_index(subject: Subject) -> bool:
    """Only from whole shards, and only where every tensor has one place: an index must not hide a loss."""
    shards = subject.reading.shards
    return bool(shards) and all(shard.whole for shard in shards) and not subject.reading.doubles


def check_doubles(subject: Subject) -> Iterator[Defect]:
    doubles = subject.reading.doubles
    if doubles:
        name, files = next(iter(doubles.items()))
        yield Defect(
            "tensor-twice",
            f"{len(doubles)} tensors are stored more than once: {name} in {' and '.join(files)}",
            "Readers that take every shard keep whichever they read last; left-over shards of an earlier export?",
        )


def check_companions(subject: Subject) -> Iterator[Defect]:
    reading = subject.reading
    if not reading.has(*TOKENIZERS):
        yield _absent("tokenizer", TOKENIZERS[:3], "Prompts cannot be tokenized, by any reader.")
    template = reading.has(*TEMPLATES) or bool(reading.json("tokenizer_config.json").get("chat_template"))
    if subject.multimodal and not reading.has(*PROCESSORS):
        yield _absent(
            "processor", PROCESSORS, "Servers refuse pictures and sounds, or silently load the model as a text model."
        )
    if not template:
        yield _absent(
            "chat-template",
            (*TEMPLATES[:2], "tokenizer_config.json's chat_template"),
            "Chat requests fail, and nobody knows where a picture's tokens belong.",
            note=not subject.multimodal,
        )
    if not reading.has(GENERATION):
        yield _absent(
            "generation-config",
            (GENERATION,),
            "The end-of-turn tokens and sampling defaults of the source are lost; answers may not stop.",
            note=not subject.multimodal,
        )
    speaks = "talker_config" in reading.config and reading.config.get("enable_audio_output", True)
    if speaks and not reading.has(SPEAKERS):
        yield _absent("speakers", (SPEAKERS,), "transformers cannot load the full Omni model without its voices.")


def _absent(what: str, expected: tuple[str, ...], why: str, *, note: bool = False) -> Defect:
    files = " or ".join(expected)
    return Defect(
        f"missing-{what}", f"no {files}", f"{why} Copy the file from the model this was made from.", note=note
    )
