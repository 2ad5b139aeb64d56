"""Functions that task files name: audio left undecoded, OmniBench without calibration prompts, word errors by item."""

from __future__ import annotations

from typing import Any

CALIBRATION = 128  # of OmniBench's first questions, which calibrate


def undecoded(dataset: Any) -> Any:
    """The dataset with audio as bytes, which the models decode; `datasets` would need torchcodec and FFmpeg."""
    from datasets import Audio

    for name, feature in dataset.features.items():
        if isinstance(feature, Audio):
            dataset = dataset.cast_column(name, Audio(decode=False))
    return dataset


def audio(doc: Any) -> list[Any]:
    return [doc["audio"]]


def evaluation_part(dataset: Any) -> Any:
    """OmniBench without the questions that calibrate, by their index or else by their place, which is the same."""
    indices = dataset["index"] if "index" in dataset.column_names else range(len(dataset))
    places = [place for place, index in enumerate(indices) if int(index) >= CALIBRATION]
    return undecoded(dataset.select(places))


def librispeech(doc: Any, results: list[str]) -> dict[str, Any]:
    """lmms-eval's own result, and what it counts for this item: words that are wrong, and words spoken."""
    import editdistance
    from lmms_eval.tasks.librispeech.utils import librispeech_process_result

    result: dict[str, Any] = librispeech_process_result(doc, results)
    spoken, heard = (_words(result["wer"][name], result["wer"]["task"][4:]) for name in ("gt", "pred"))
    return result | {"word_errors": {"points": editdistance.eval(spoken, heard), "total": len(spoken)}}


def _words(text: str, language: str) -> list[str]:
    """The words as lmms-eval's `compute_wer` takes them from English text."""
    from lmms_eval.tasks.librispeech import utils

    if language != "en":
        raise ValueError(f"LibriSpeech is English; this item is {language!r}")
    plain = utils.basic_normalizer(utils.english_normalizer(utils.remove_sp(text, language)))
    tokenizer = utils.EvaluationTokenizer(tokenizer_type="none", lowercase=True, punctuation_removal=True)
    words: list[str] = tokenizer.tokenize(plain).split()
    return words
