"""A checkpoint folder in transformers, dense or quantized: greedy, with its own chat template and nothing else of its own."""

from __future__ import annotations

from typing import Any

import torch
from lmms_eval.api.model import lmms
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForMultimodalLM,
    AutoProcessor,
    CompressedTensorsConfig,
    GenerationConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
)

from onptq_lmms.requests import Question, questions

# Of checkpoints that hold more than answers need.
CLASSES = dict.fromkeys(("qwen2_5_omni", "qwen2_5_omni_thinker"), Qwen2_5OmniThinkerForConditionalGeneration)


class Folder(lmms):  # type: ignore[misc]
    """Every family by the class that transformers has for it; no remote code."""

    is_simple = True

    def __init__(
        self,
        pretrained: str,
        device: str | None = None,
        batch_size: int | str = 1,
        dtype: str = "auto",
        repetition_penalty: float = 1.0,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> None:
        super().__init__()
        chosen = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
        self.batch = int(batch_size)
        config = AutoConfig.from_pretrained(pretrained)
        kind = CLASSES.get(config.model_type, AutoModelForMultimodalLM)
        stored = "auto" if torch.device(chosen).type == "cuda" else "float32"
        options: dict[str, Any] = {"dtype": stored if dtype == "auto" else dtype, "device_map": chosen}
        quantized = getattr(config, "quantization_config", None)
        if quantized is not None:
            options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
        self.decoder = kind.from_pretrained(pretrained, **options).eval()
        if quantized is not None and not any(hasattr(one, "quantization_scheme") for one in self.decoder.modules()):
            raise ValueError(f"{pretrained} says that it is quantized, but {kind.__name__} loads it as dense")
        pixels = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        self.processor = AutoProcessor.from_pretrained(
            pretrained, **{name: int(count) for name, count in pixels.items() if count is not None}
        )
        own = self.decoder.generation_config
        # as the model's own, since transformers fills what a request leaves out from there
        self.decoder.generation_config = GenerationConfig(
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id,
            bos_token_id=own.bos_token_id,
            do_sample=False,
            num_beams=1,
            repetition_penalty=float(repetition_penalty),
        )

    def generate_until(self, requests: list[Any]) -> list[str]:
        answers = [""] * len(requests)
        waiting: list[Question] = []
        for one in tqdm(questions(requests, self.task_dict), total=len(requests), desc="Answers"):
            if waiting and (len(waiting) == self.batch or waiting[0].max_tokens != one.max_tokens):
                self._answer(waiting, answers)
                waiting = []
            waiting.append(one)
        if waiting:
            self._answer(waiting, answers)
        return answers

    @torch.inference_mode()
    def _answer(self, batch: list[Question], answers: list[str]) -> None:
        texts = [self._template(one) for one in batch]
        images = [image for one in batch for image in one.images]
        audios = [audio for one in batch for audio in one.audios]
        inputs = self.processor(
            text=texts,
            **({"images": images} if images else {}),
            **({"audio": audios, "sampling_rate": 16_000} if audios else {}),
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(self.decoder.device, dtype=self.decoder.dtype)
        tokens = self.decoder.generate(**inputs, max_new_tokens=batch[0].max_tokens)
        new = tokens[:, inputs["input_ids"].shape[1] :]
        for one, text in zip(batch, self.processor.batch_decode(new, skip_special_tokens=True), strict=True):
            answers[one.place] = one.cut(text)

    def _template(self, question: Question) -> str:
        parts: list[dict[str, Any]] = [
            {"type": "audio" if hasattr(one, "dtype") else "image"} for one in question.media
        ]
        content = [*parts, {"type": "text", "text": question.text}]
        text: str = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return text

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        raise NotImplementedError("the benchmarks are answered in words; none asks for likelihoods")

    def generate_until_multi_round(self, requests: list[Any]) -> list[str]:
        raise NotImplementedError("the benchmarks have one turn")
