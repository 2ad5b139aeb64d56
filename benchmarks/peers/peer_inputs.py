"""The calibration material as plain files: the inputs of OnPTQ's own methods, for programs without OnPTQ.

    prompts.jsonl     a manifest as `onptq quantize --calibration` takes it, with images/ beside it
    responses.jsonl   {"id", "tokens", "text"}: the dense model's own greedy response to every prompt
    material.json     which model they belong to, how many there are, and their digest

OnPTQ's gptq, awq and search calibrate on every prompt followed by that response; so do the peers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from onptq.checkpoint.source import Source
from onptq.data.manifest import load_manifest, manifest_digest
from onptq.data.prompts import Prompt
from onptq.errors import OnPTQError
from onptq.progress import Reporter

PROMPTS, RESPONSES, RECORD, IMAGES = "prompts.jsonl", "responses.jsonl", "material.json", "images"


def write_material(
    source: Source, prompts: Sequence[Prompt], max_tokens: int, folder: Path, reporter: Reporter
) -> Path:
    """Write everything into `folder`, the record last. Material that is there already must be the same."""
    record = {
        "model": source.sha256(),
        "prompts": manifest_digest(prompts),
        "count": len(prompts),
        "max_tokens": max_tokens,
    }
    path = folder / RECORD
    if path.is_file():
        if (earlier := json.loads(path.read_text(encoding="utf-8"))) != record:
            raise OnPTQError(
                f"{folder} has the material of another run: {earlier}, expected {record}; give another --out"
            )
        return folder
    write_prompts(prompts, folder)
    _write_lines(folder / RESPONSES, respond(source, prompts, max_tokens, reporter))
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return folder


def write_prompts(prompts: Sequence[Prompt], folder: Path) -> None:
    """Write the manifest and its images; refuse prompts that do not read back the same."""
    (folder / IMAGES).mkdir(parents=True, exist_ok=True)
    _write_lines(folder / PROMPTS, (_line(prompt, folder) for prompt in prompts))
    if manifest_digest(load_manifest(folder / PROMPTS)) != manifest_digest(prompts):
        raise OnPTQError(f"{folder / PROMPTS} does not read back as the prompts it was written from")


def respond(source: Source, prompts: Sequence[Prompt], max_tokens: int, reporter: Reporter) -> Iterator[dict[str, Any]]:
    """The dense model's greedy responses, computed as in OnPTQ's methods."""
    from onptq.checkpoint.load import load_policy
    from onptq.engine.prefixes import Prefixes
    from onptq.engine.rollout import rollouts
    from onptq.models.encoding import encode
    from onptq.models.processing import PromptProcessor

    processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
    policy = load_policy(source, "W16A16")
    with reporter.phase("Encode", total=len(prompts), unit="prompts") as bar:
        encoded = encode(policy, processor.ahead(prompts, max_tokens), advance=bar.advance)
    with reporter.phase("Respond", total=len(prompts), unit="prompts") as bar:
        answers = rollouts(Prefixes(policy, encoded, max_tokens=max_tokens), side="D", advance=bar.advance)
    for prompt, answer in zip(prompts, answers, strict=True):
        yield {"id": prompt.id, "tokens": list(answer.tokens), "text": processor.tokenizer.decode(answer.tokens)}


def _line(prompt: Prompt, folder: Path) -> dict[str, Any]:
    if prompt.audios:
        raise OnPTQError(f"prompt {prompt.id!r} has audio; the peers take text and images only")
    names = []
    for media in prompt.images:
        data = media.read()
        name = f"{IMAGES}/{media.sha256[:16]}{_suffix(data)}"
        (folder / name).write_bytes(data)
        names.append(name)
    return {"id": prompt.id, "messages": [dict(message) for message in prompt.messages], "images": names}


def _suffix(data: bytes) -> str:
    return ".png" if data.startswith(b"\x89PNG") else ".jpg" if data.startswith(b"\xff\xd8") else ""


def _write_lines(path: Path, records: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
