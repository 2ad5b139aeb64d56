"""The fuzzing campaign: `python tests/fuzz/campaign.py --cases 5000`. Exit code 1 if a case was neither read nor refused.

With `--atheris NAME` one reader is fuzzed by coverage instead, for as long as it is let run; arguments after `--` are
libFuzzer's. This needs `pip install atheris`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from guarded import FAILED, READ, REFUSED, guarded, outcome
from mutations import drawn, mutated
from readers import READERS, readable

BATCH = 100  # cases of one process
MOST_FAILURES = 3  # failures of a reader after which the next one has its turn


def fuzz(name: str, cases: int, seed: int, folder: Path) -> tuple[Counter[str], list[str]]:
    """How many files were read and refused, and what went wrong with the others, whose bytes go to `folder`."""
    original = readable(name)
    counts: Counter[str] = Counter()
    troubles: list[str] = []
    done = 0
    while done < cases and len(troubles) < MOST_FAILURES:
        tally = folder / "tally"
        tally.write_text("")

        def work(case: Path, first: int = done, tally: Path = tally) -> None:
            with tally.open("a") as outcomes:
                for number in range(first, min(cases, first + BATCH)):
                    data = mutated(original, drawn(random.Random(f"{seed}/{name}/{number}")))
                    case.write_bytes(data)
                    outcomes.write(outcome(READERS[name].read, data) + "\n")
                    outcomes.flush()

        trouble, data = guarded(work)
        outcomes = tally.read_text().split()
        tally.unlink()
        counts.update(outcomes)
        done += len(outcomes)
        if trouble is not None:
            counts[FAILED] += 1
            file = folder / f"{name.replace(' ', '-').replace('/', '-')}-{done}"
            file.write_bytes(data)
            troubles.append(f"{file}: {trouble.strip()}")
            print(f"FAILED {name}: {troubles[-1][-1500:]}", flush=True)
            done += 1
    return counts, troubles


def by_coverage(name: str, arguments: Sequence[str]) -> None:
    """Fuzz one reader with atheris, which finds its own way to new branches."""
    import atheris  # type: ignore[import-not-found]

    seed = readable(name)
    corpus = Path(tempfile.mkdtemp(prefix="onptq-corpus-"))
    (corpus / "seed").write_bytes(seed)
    atheris.instrument_all()
    atheris.Setup([sys.argv[0], str(corpus), *arguments], lambda data: outcome(READERS[name].read, bytes(data)))
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz/campaign.py", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="of every reader")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no other reader begins")
    parser.add_argument("--readers", nargs="+", choices=list(READERS), default=list(READERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where failing files go; a temporary folder by default")
    parser.add_argument("--atheris", choices=list(READERS), metavar="NAME", help="fuzz this reader by coverage")
    parser.add_argument("arguments", nargs="*", help="of libFuzzer")
    given = parser.parse_args()
    if given.atheris is not None:
        by_coverage(given.atheris, given.arguments)
        return 0
    folder = given.folder or Path(tempfile.mkdtemp(prefix="onptq-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    total: Counter[str] = Counter()
    begun = time.monotonic()
    print(f"{'reader':26} {'cases':>7} {'read':>7} {'refused':>8} {'failed':>7}")
    for name in given.readers:
        if time.monotonic() - begun > given.seconds:
            break
        counts, _ = fuzz(name, given.cases, given.seed, folder)
        total += counts
        print(f"{name:26} {counts.total():7} {counts[READ]:7} {counts[REFUSED]:8} {counts[FAILED]:7}", flush=True)
    print(f"{'all':26} {total.total():7} {total[READ]:7} {total[REFUSED]:8} {total[FAILED]:7}")
    return 1 if total[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())
