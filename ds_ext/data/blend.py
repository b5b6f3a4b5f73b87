"""`--data-path`: one dataset or several with weights, and the order in which a blend draws from them."""

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from ds_ext.data.layout import DATA_NAME
from ds_ext.errors import ConfigError


def parse_data_path(data_path: str | Sequence[str]) -> tuple[list[Fraction], list[Path]]:
    """Weights (of any scale) and file prefixes of "a", "0.3 a 0.7 b" or the list of those words.

    Raises:
        ConfigError: the words are not one path, or pairs of a positive weight and a path.
    """
    words = [data_path] if isinstance(data_path, str) else list(data_path)
    if len(words) == 1 and not _names_data(words[0]):
        words = words[0].split()
    if len(words) == 1:
        return [Fraction(1)], [resolve_prefix(words[0])]
    weights = [weight for weight in map(_weight, words[::2]) if weight is not None]
    paths = words[1::2]
    if not words or not len(weights) == len(paths) == len(words) / 2:
        raise ConfigError(
            "--data-path needs one path, or pairs of a positive weight and a path such as 0.3 a 0.7 b; got "
            f"{data_path!r}"
        )
    return weights, [resolve_prefix(path) for path in paths]


def resolve_prefix(path: str | Path) -> Path:
    """The prefix of a `.bin/.idx` pair, given as such, as one of the two, or as a folder of `prepare`."""
    path = Path(path)
    if path.suffix in (".bin", ".idx"):
        return path.with_suffix("")
    prepared = path / DATA_NAME
    if prepared.with_suffix(".idx").exists():
        return prepared
    # Megatron's own tool ends its prefixes so; anything else that is missing was meant as a folder of ours.
    is_prefix = Path(f"{path}.idx").exists() or path.name.endswith("_document")
    return path if is_prefix else prepared


class BlendTable:
    """Which dataset each sample of a blend comes from, and its number there.

    After any number n of samples each dataset with share w (of 1) has given w*n samples, with an error below
    one: the chairman assignment of Tijdeman (1980), computed on whole numbers so that every machine gets the
    same order. The order repeats as soon as all w*n are whole (for 0.3 and 0.7 after ten samples), so only
    one period is kept.
    """

    def __init__(self, weights: Sequence[Fraction], num_samples: int) -> None:
        scale = math.lcm(*(weight.denominator for weight in weights))
        whole = [int(weight * scale) for weight in weights]
        divisor = math.gcd(*whole)
        self._shares = [weight // divisor for weight in whole]
        self._period = sum(self._shares)
        length = min(self._period, max(num_samples, 1))
        self._sources = np.array(_chairman_assignment(self._shares, length), dtype=np.int32)
        self._places = np.empty(length, dtype=np.int64)
        for source in range(len(weights)):
            mine = self._sources == source
            self._places[mine] = np.arange(np.count_nonzero(mine))
        self.counts = self._counts(num_samples)

    def locate(self, index: int) -> tuple[int, int]:
        """(dataset, number of the sample in it) of sample `index` of the blend."""
        periods, rest = divmod(index, self._period)
        source = int(self._sources[rest])
        return source, periods * self._shares[source] + int(self._places[rest])

    def _counts(self, num_samples: int) -> list[int]:
        periods, rest = divmod(num_samples, self._period)
        begun = np.bincount(self._sources[:rest], minlength=len(self._shares))
        return [periods * share + int(more) for share, more in zip(self._shares, begun, strict=True)]


def _chairman_assignment(shares: Sequence[int], length: int) -> list[int]:
    """The first `length` choices among k candidates: of those owed enough, the one with the nearest deadline.

    All quantities are Tijdeman's times period * (2k - 2), which makes them whole.
    """
    candidates, period = len(shares), sum(shares)
    if candidates == 1:
        return [0] * length
    scale = 2 * candidates - 2
    owed = [0] * candidates
    chosen = []
    for _ in range(length):
        owed = [debt + scale * share for debt, share in zip(owed, shares, strict=True)]
        waiting = [source for source in range(candidates) if owed[source] >= period]
        best = min(waiting, key=lambda source: (scale * period - period - owed[source]) / shares[source])
        owed[best] -= scale * period
        chosen.append(best)
    return chosen


def _names_data(word: str) -> bool:
    """Whether `word` is one existing path, even when it has spaces in it."""
    return bool(word) and (Path(word).exists() or Path(f"{word}.idx").exists())


def _weight(word: str) -> Fraction | None:
    """The exact value of a decimal such as 0.3, or None when it is not a positive number."""
    try:
        weight = Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None
    return weight if weight > 0 else None
