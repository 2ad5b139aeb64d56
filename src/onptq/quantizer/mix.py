"""Mixed schemes: which linears may have a scheme of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from onptq.errors import OnPTQError, did_you_mean
from onptq.models.structure import DELTA_NET_READERS, GATE_UP, QKV, READERS
from onptq.schemes import DENSE, UNQUANTIZED, Scheme, selects

_READ = {name: pair for readers in (READERS, DELTA_NET_READERS) for pair, names in readers.items() for name in names}
_READ |= {QKV: "norm_qkv", GATE_UP: "norm_gate_up"}
_EXPERTS = ".experts."


def check_mix(scheme: Scheme, paths: Sequence[str]) -> None:
    """Refuse patterns that name no linear, and schemes that differ between linears that servers multiply as one.

    `paths` are the names of all linears, relative to the decoder."""
    for pattern, one in scheme.others:
        if not any(selects(pattern, path) for path in paths):
            names = dict.fromkeys(path.split(".", 2)[-1] for path in paths)
            raise OnPTQError(
                f"the pattern {pattern} of {pattern}={_name(one)} matches no linear{did_you_mean(pattern, tuple(names))}; "
                f"expected names such as {', '.join(names)}, or layers.0.*"
            )
    groups: dict[tuple[str, str], dict[Scheme, str]] = defaultdict(dict)
    for path in paths if scheme.others else ():
        groups[_product(path)].setdefault(scheme.of(path), path)
    for parts in groups.values():
        if len(parts) > 1:
            (one, path), (other, second), *_ = parts.items()
            raise OnPTQError(
                f"{path} would be {_name(one)} and {second} {_name(other)}, but they read the same input and servers "
                "multiply them as one: expected one scheme for both"
            )
    if scheme.others and all(scheme.of(path) == UNQUANTIZED for path in paths):
        raise OnPTQError(f"{scheme} leaves every linear {DENSE}: there is nothing to quantize")


def multiplied_together(paths: Sequence[str]) -> list[tuple[str, ...]]:
    """The linears in groups that servers multiply as one, which take one scheme."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in paths:
        groups[_product(path)].append(path)
    return [tuple(group) for group in groups.values()]


def _product(path: str) -> tuple[str, str]:
    """What servers multiply a linear in: with those that read the same input, and with all experts of a layer."""
    parent, _, name = path.rpartition(".")
    if _EXPERTS in path:
        return path.partition(_EXPERTS)[0], "experts"
    return parent, _READ.get(name, name)


def _name(scheme: Scheme) -> str:
    return DENSE if scheme == UNQUANTIZED else str(scheme)
