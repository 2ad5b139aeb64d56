"""Encoded prompts, as many as there are: what fits into a budget stays in memory, the rest waits in files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import overload

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from onptq.files import explained
from onptq.models.encoding import EncodedPrompt

KINDS = 3  # text, image, audio
TENSORS = tuple(field.name for field in fields(EncodedPrompt) if field.name != "ordinal")


@dataclass(frozen=True)
class _Entry:
    ordinal: int
    origin: int  # the ordinal of the prompt that it is a copy of; else its own
    ids: Tensor  # [P] int32, on the host
    kinds: tuple[int, ...]  # tokens of text, image and audio
    prompt: EncodedPrompt | Path
    device: torch.device

    def load(self) -> EncodedPrompt:
        if isinstance(self.prompt, EncodedPrompt):
            return self.numbered(self.prompt)
        tensors = load_file(self.prompt, device=str(self.device))
        return EncodedPrompt(self.ordinal, **{name: tensors.get(name) for name in TENSORS})  # type: ignore[arg-type]

    def numbered(self, prompt: EncodedPrompt) -> EncodedPrompt:
        """The prompt, or a copy of it that shares its tensors, under this ordinal."""
        return prompt if prompt.ordinal == self.ordinal else replace(prompt, ordinal=self.ordinal)


class EncodedPrompts(Sequence[EncodedPrompt]):
    """A sequence of encoded prompts. Lengths, ids and kinds of tokens are at hand; a prompt itself may come from a file.

    Parts share their prompts with the whole."""

    def __init__(self, entries: Iterable[_Entry] = ()) -> None:
        self._entries = list(entries)

    @classmethod
    def of(
        cls, prompts: Iterable[EncodedPrompt], *, budget: int | None = None, folder: Path | None = None
    ) -> EncodedPrompts:
        """The prompts, of which at most `budget` bytes stay in memory; the others are written into `folder`."""
        if isinstance(prompts, EncodedPrompts):
            return prompts
        entries, used = [], 0
        for prompt in prompts:
            held: EncodedPrompt | Path = prompt
            if budget is not None and folder is not None and used + _bytes(prompt) > budget:
                held = _write(prompt, folder)
            else:
                used += _bytes(prompt)
            kinds = torch.bincount(prompt.modality.long(), minlength=KINDS).tolist()
            ids = prompt.ids.to("cpu", torch.int32)
            entries.append(_Entry(prompt.ordinal, prompt.ordinal, ids, tuple(kinds), held, prompt.ids.device))
        return cls(entries)

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, place: int) -> EncodedPrompt: ...
    @overload
    def __getitem__(self, place: slice) -> EncodedPrompts: ...
    def __getitem__(self, place: int | slice) -> EncodedPrompt | EncodedPrompts:
        if isinstance(place, slice):
            return EncodedPrompts(self._entries[place])
        return self._entries[place].load()

    def together(self, places: Iterable[int]) -> list[EncodedPrompt]:
        """The prompts at these places. Copies of one prompt share its tensors."""
        loaded: dict[int, EncodedPrompt] = {}
        prompts = []
        for entry in (self._entries[place] for place in places):
            if entry.origin not in loaded:
                loaded[entry.origin] = entry.load()
            prompts.append(entry.numbered(loaded[entry.origin]))
        return prompts

    @property
    def ordinals(self) -> list[int]:
        return [entry.ordinal for entry in self._entries]

    @property
    def origins(self) -> list[int]:
        """Ordinals; a copy has that of its prompt."""
        return [entry.origin for entry in self._entries]

    @property
    def lengths(self) -> list[int]:
        return [len(entry.ids) for entry in self._entries]

    @property
    def ids(self) -> list[list[int]]:
        return [entry.ids.tolist() for entry in self._entries]

    @property
    def kinds(self) -> Tensor:
        """[N, 3] tokens of text, image and audio of each prompt."""
        return torch.tensor([entry.kinds for entry in self._entries], dtype=torch.long).reshape(-1, KINDS)

    def spread(self, most: int) -> EncodedPrompts:
        """At most so many of them, spread evenly."""
        if len(self) <= most:
            return self
        places = torch.linspace(0, len(self) - 1, most).round().int().tolist()
        return EncodedPrompts(self._entries[place] for place in places)

    def repeated(self, times: int, stride: int) -> EncodedPrompts:
        """Every prompt so many times; the ordinal of a copy is a multiple of `stride` above the prompt's."""
        return EncodedPrompts(
            replace(entry, ordinal=entry.ordinal + copy * stride) for copy in range(times) for entry in self._entries
        )


def _tensors(prompt: EncodedPrompt) -> dict[str, Tensor]:
    return {name: tensor for name in TENSORS if (tensor := getattr(prompt, name)) is not None}


def _bytes(prompt: EncodedPrompt) -> int:
    return sum(tensor.nbytes for tensor in _tensors(prompt).values())


def _write(prompt: EncodedPrompt, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{prompt.ordinal}.safetensors"
    with explained(path):
        save_file({name: tensor.cpu().contiguous() for name, tensor in _tensors(prompt).items()}, path)
    return path
