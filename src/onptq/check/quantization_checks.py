"""Defects of quantization_config against the tensors: what readers take for quantized, and what is."""

from __future__ import annotations

from collections.abc import Iterator

from onptq.check.subject import Defect, Linear, Subject, some
from onptq.checkpoint.quantization import COMPRESSED


def check_declared(subject: Subject) -> Iterator[Defect]:
    """The config and the tensors must tell the same story."""
    quantized, stated = subject.quantized_modules, subject.quantization
    if stated is None and quantized:
        kinds = ", ".join(sorted(set(quantized.values())))
        yield Defect(
            "undeclared-quantization",
            f"{len(quantized)} modules are stored quantized ({kinds}), but config.json has no quantization_config",
            "Readers take the integers for weights, or miss the weights and fill them with random numbers. "
            "The activations' format cannot be told from the tensors: write the section again.",
        )
    weights = stated is not None and any(group.weights is not None for group in stated.groups)
    if stated is not None and weights and not quantized and subject.reading.tensors:
        yield Defect(
            "no-quantized-tensors",
            f"config.json says {stated.method} ({stated.format}), but every tensor is dense",
            "Readers look for scales and packed weights that are not there. Was the model saved before it was packed?",
        )


def check_run_time_names(subject: Subject) -> Iterator[Defect]:
    """transformers matches targets and ignore list against run-time names, which are not those on disk."""
    dense = [linear for linear in _stored_dense(subject) if any(_weights(subject, linear, n) for n in linear.run_time)]
    if dense and subject.quantized_modules:
        example = next(name for name in dense[0].run_time if _weights(subject, dense[0], name))
        yield Defect(
            "ignored-under-other-names",
            f"{len(dense)} dense linears are not ignored under the names they have in transformers: "
            f"{dense[0].on_disk} on disk is {example} at run time ({_parts(dense)})",
            "transformers loads them as quantized, with scales that are not there: from int8 storage answers about pictures "
            "are NaN or noise while text looks right, from packed storage they fail.",
            mendable=True,
        )
    codes = [linear for linear in _stored_quantized(subject) if not all(_treated(subject, linear, linear.run_time))]
    if codes:
        yield Defect(
            "quantized-but-ignored",
            f"{len(codes)} linears are stored quantized, but ignored or no target in transformers: {_on_disk(codes)}",
            "Their integers are taken for weights, or not found and filled with random numbers.",
            mendable=_one_group(subject),
        )


def check_disk_names(subject: Subject) -> Iterator[Defect]:
    """vLLM matches against the names on disk, which it maps to its own."""
    dense = [linear for linear in _stored_dense(subject) if _weights(subject, linear, linear.on_disk)]
    if dense and subject.quantized_modules:
        yield Defect(
            "dense-but-not-ignored",
            f"{len(dense)} dense linears are not ignored under their names on disk: {_on_disk(dense)}",
            "vLLM looks for their scales and packed weights and does not start.",
            mendable=True,
        )
    codes = [linear for linear in _stored_quantized(subject) if not all(_treated(subject, linear, (linear.on_disk,)))]
    if codes:
        yield Defect(
            "ignored-on-disk",
            f"{len(codes)} linears are stored quantized, but ignored or no target under their names on disk: {_on_disk(codes)}",
            "vLLM looks for dense weights that are not there.",
            mendable=_one_group(subject),
        )


def check_patterns(subject: Subject) -> Iterator[Defect]:
    unmatched = unmatched_patterns(subject)
    if unmatched:
        yield Defect(
            "ignore-matches-nothing",
            f"{len(unmatched)} ignore patterns match no module on disk or at run time: {some(unmatched)}",
            "Whatever they were meant for is not ignored; often a prefix that another version named differently.",
            mendable=True,
        )


def check_storage(subject: Subject) -> Iterator[Defect]:
    stated = subject.quantization
    scheme = stated.scheme if stated is not None else None
    if stated is None or stated.method != COMPRESSED or scheme is None or not scheme.quantizes_activations:
        return
    if scheme.weight_bits == 4 and stated.groups[0].format == "int-quantized":
        yield Defect(
            "four-bits-in-a-byte",
            f"{scheme} stored int-quantized: one 4-bit value per byte",
            "Twice the size of pack-quantized, and on NVIDIA some versions of vLLM find no kernel for it.",
            note=True,
        )


def check_head(subject: Subject) -> Iterator[Defect]:
    tied = bool(subject.reading.config.get("tie_word_embeddings"))
    for name, kind in subject.quantized_modules.items():
        end = name.rpartition(".")[2]
        if end == "lm_head" or end.startswith("embed_tokens"):
            yield Defect(
                "quantized-head" if end == "lm_head" else "quantized-embeddings",
                f"{name} is stored quantized ({kind}){', and tie_word_embeddings is set' if tied else ''}",
                "Few kernels serve a quantized head, none a quantized embedding; accuracy suffers most here. "
                + ("A tied head is taken from the dense embeddings, so the two disagree." if tied else ""),
                note=not tied and end == "lm_head",
            )


def check_tied_twice(subject: Subject) -> Iterator[Defect]:
    if not subject.reading.config.get("tie_word_embeddings"):
        return
    for name, parameters in subject.reading.modules.items():
        if name.rpartition(".")[2] == "lm_head" and "weight" in parameters and name not in subject.quantized_modules:
            yield Defect(
                "tied-twice",
                f"{name}.weight is stored ({parameters['weight'].nbytes:,} bytes), though tie_word_embeddings is set",
                "Wasted room where it equals the embeddings; where it does not, readers disagree on which one to use.",
                note=True,
            )


def unmatched_patterns(subject: Subject) -> list[str]:
    stated = subject.quantization
    if stated is None or stated.method != COMPRESSED:
        return []
    from compressed_tensors.utils.match import match_name

    names = {*subject.reading.modules, "lm_head", *(name for layout in subject.layouts.each for name in layout.names)}
    # A name on disk stands for all that lies below it.
    names |= {".".join(parts[:end]) for parts in (name.split(".") for name in names) for end in range(1, len(parts))}
    classes = {kind for layout in subject.layouts.each for kinds in layout.linears.values() for kind in kinds}
    return [p for p in stated.ignore if p not in classes and not any(match_name(name, p) for name in names)]


def _stored_dense(subject: Subject) -> Iterator[Linear]:
    if subject.quantization is not None and subject.quantization.method == COMPRESSED:
        yield from (linear for linear in subject.linears.values() if linear.storage is None)


def _stored_quantized(subject: Subject) -> Iterator[Linear]:
    if subject.quantization is not None and subject.quantization.method == COMPRESSED:
        yield from (linear for linear in subject.linears.values() if linear.storage is not None)


def _weights(subject: Subject, linear: Linear, name: str) -> bool:
    """Whether a reader expects quantized weights of the linear under this name."""
    group = subject.quantization.group(name, linear.classes) if subject.quantization else None
    return group is not None and group.weights is not None


def _one_group(subject: Subject) -> bool:
    """With several, the files do not say which of them a linear belongs to."""
    return subject.quantization is not None and len(subject.quantization.groups) == 1


def _treated(subject: Subject, linear: Linear, names: tuple[str, ...]) -> Iterator[bool]:
    return (_weights(subject, linear, name) for name in names)


def _on_disk(linears: list[Linear]) -> str:
    return some(linear.on_disk for linear in linears)


def _parts(linears: list[Linear]) -> str:
    firsts = dict.fromkeys(linear.on_disk.removeprefix("thinker.").split(".")[0] for linear in linears)
    return "in " + ", ".join(firsts)
