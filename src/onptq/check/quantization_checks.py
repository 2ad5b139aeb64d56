"""Checks of quantization_config against the tensors: which modules readers take for quantized, and which are."""

from __future__ import annotations

from collections.abc import Iterator

from onptq.check.findings import Finding, some
from onptq.check.inspected import Inspected, Linear
from onptq.checkpoint.quantization import COMPRESSED


def check_declared(inspected: Inspected) -> Iterator[Finding]:
    quantized, stated = inspected.quantized_modules, inspected.quantization
    if stated is None and quantized:
        kinds = ", ".join(sorted(set(quantized.values())))
        yield Finding(
            "undeclared-quantization",
            f"{len(quantized)} modules are stored quantized ({kinds}), but config.json has no quantization_config",
            "Readers take the integers for weights, or miss the weights and fill them with random numbers. "
            "The tensors do not show the activations' format: write the section again.",
        )
    weights = stated is not None and any(group.weights is not None for group in stated.groups)
    if stated is not None and weights and not quantized and inspected.checkpoint.tensors:
        yield Finding(
            "no-quantized-tensors",
            f"config.json says {stated.method} ({stated.format}), but every tensor is dense",
            "Readers look for scales and packed weights that are not there. Was the model saved before it was packed?",
        )


def check_names(inspected: Inspected) -> Iterator[Finding]:
    """Findings on targets and ignore list: transformers matches run-time names, vLLM names on disk."""
    if inspected.quantization is None or inspected.quantization.method != COMPRESSED:
        return
    dense = [linear for linear in inspected.linears.values() if linear.storage is None]
    quantized = [linear for linear in inspected.linears.values() if linear.storage is not None]
    one_group = len(inspected.quantization.groups) == 1  # with several, the files do not say which one a linear is of
    if inspected.quantized_modules:
        yield from _dense_at_run_time(inspected, dense)
    ignored = [linear for linear in quantized if not all(_expects(inspected, linear, n) for n in linear.run_time)]
    if ignored:
        yield Finding(
            "quantized-but-ignored",
            f"{len(ignored)} linears are stored quantized, but ignored or no target in transformers: {_on_disk(ignored)}",
            "Their integers are taken for weights, or not found and filled with random numbers.",
            fixable=one_group,
        )
    unignored = [linear for linear in dense if _expects(inspected, linear, linear.on_disk)]
    if unignored and inspected.quantized_modules:
        yield Finding(
            "dense-but-not-ignored",
            f"{len(unignored)} dense linears are not ignored under their names on disk: {_on_disk(unignored)}",
            "vLLM looks for their scales and packed weights and does not start.",
            fixable=True,
        )
    ignored = [linear for linear in quantized if not _expects(inspected, linear, linear.on_disk)]
    if ignored:
        yield Finding(
            "ignored-on-disk",
            f"{len(ignored)} linears are stored quantized, but ignored or no target under their names on disk: "
            f"{_on_disk(ignored)}",
            "vLLM looks for dense weights that are not there.",
            fixable=one_group,
        )


def _dense_at_run_time(inspected: Inspected, dense: list[Linear]) -> Iterator[Finding]:
    names = {linear.on_disk: [n for n in linear.run_time if _expects(inspected, linear, n)] for linear in dense}
    names = {on_disk: run_time for on_disk, run_time in names.items() if run_time}
    if names:
        on_disk, run_time = next(iter(names.items()))
        parts = ", ".join(dict.fromkeys(name.removeprefix("thinker.").split(".")[0] for name in names))
        yield Finding(
            "ignored-under-other-names",
            f"{len(names)} dense linears are not ignored under the names they have in transformers: "
            f"{on_disk} on disk is {run_time[0]} at run time (in {parts})",
            "transformers loads them as quantized, with scales that are not there: from int8 storage answers about images "
            "are NaN or noise while text looks right, from packed storage they fail.",
            fixable=True,
        )


def check_patterns(inspected: Inspected) -> Iterator[Finding]:
    unmatched = unmatched_patterns(inspected)
    if unmatched:
        yield Finding(
            "ignore-matches-nothing",
            f"{len(unmatched)} ignore patterns match no module on disk or at run time: {some(unmatched)}",
            "The modules they were meant for are not ignored; often a prefix that another version named differently.",
            fixable=True,
        )


def check_storage(inspected: Inspected) -> Iterator[Finding]:
    stated = inspected.quantization
    scheme = stated.scheme if stated is not None else None
    if stated is None or stated.method != COMPRESSED or scheme is None or not scheme.quantizes_activations:
        return
    if scheme.weight_bits == 4 and stated.groups[0].format == "int-quantized":
        yield Finding(
            "four-bits-in-a-byte",
            f"{scheme} stored int-quantized: one 4-bit value per byte",
            "Twice the size of pack-quantized, and on NVIDIA some versions of vLLM find no kernel for it.",
            note=True,
        )


def check_head(inspected: Inspected) -> Iterator[Finding]:
    tied = bool(inspected.checkpoint.config.get("tie_word_embeddings"))
    for name, kind in inspected.quantized_modules.items():
        end = name.rpartition(".")[2]
        if end == "lm_head" or end.startswith("embed_tokens"):
            yield Finding(
                "quantized-head" if end == "lm_head" else "quantized-embeddings",
                f"{name} is stored quantized ({kind}){', and tie_word_embeddings is set' if tied else ''}",
                "Few kernels serve a quantized head, none a quantized embedding; accuracy suffers most here. "
                + ("A tied head is taken from the dense embeddings, so the two disagree." if tied else ""),
                note=not tied and end == "lm_head",
            )


def check_tied_twice(inspected: Inspected) -> Iterator[Finding]:
    if not inspected.checkpoint.config.get("tie_word_embeddings"):
        return
    for name, parameters in inspected.checkpoint.modules.items():
        if name.rpartition(".")[2] == "lm_head" and "weight" in parameters and name not in inspected.quantized_modules:
            yield Finding(
                "tied-twice",
                f"{name}.weight is stored ({parameters['weight'].nbytes:,} bytes), though tie_word_embeddings is set",
                "Wasted bytes where it equals the embeddings; where it does not, readers disagree on which one to use.",
                note=True,
            )


def unmatched_patterns(inspected: Inspected) -> list[str]:
    """The ignore patterns that match no module, under any name that a reader uses."""
    stated = inspected.quantization
    if stated is None or stated.method != COMPRESSED:
        return []
    from compressed_tensors.utils.match import match_name

    names = {
        *inspected.checkpoint.modules,
        "lm_head",
        *(name for layout in inspected.layouts.each for name in layout.names),
    }
    # A name on disk stands for all that lies below it.
    names |= {".".join(parts[:end]) for parts in (name.split(".") for name in names) for end in range(1, len(parts))}
    classes = {kind for layout in inspected.layouts.each for kinds in layout.linears.values() for kind in kinds}
    return [p for p in stated.ignore if p not in classes and not any(match_name(name, p) for name in names)]


def _expects(inspected: Inspected, linear: Linear, name: str) -> bool:
    """Whether a reader expects quantized weights of the linear under this name."""
    group = inspected.quantization.group(name, linear.classes) if inspected.quantization else None
    return group is not None and group.weights is not None


def _on_disk(linears: list[Linear]) -> str:
    return some(linear.on_disk for linear in linears)
