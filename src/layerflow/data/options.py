"""What a collection is asked for: options that decide its numbers, and the part of the rows it reads."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from layerflow.data.windows import WindowOptions
from layerflow.errors import InputError


@dataclass(frozen=True, kw_only=True)
class CollectOptions(WindowOptions):
    """What decides the numbers of a collection, beside model and corpus (SPEC section 2).

    Attributes:
        min_count: occurrences a token needs to be kept.
        skip_positions: positions at the start of each row that are not counted at all.
        batch_tokens: tokens a batch holds at most, padding included; on a CPU more is no faster, a GPU wants more.
        n_samples: single positions to keep, drawn uniformly.
        seed: seeds halves, sample and calibration.

    Raises:
        InputError: An option is outside its range.
    """

    min_count: int = 5
    skip_positions: int = 0
    batch_tokens: int = 1024
    n_samples: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (
            ("min_count", 1),
            ("skip_positions", 0),
            ("batch_tokens", 1),
            ("n_samples", 0),
            ("seed", 0),
        ):
            if getattr(self, name) < least:
                option = f"--{name.removeprefix('n_').replace('_', '-')}"
                raise InputError(f"{option} {getattr(self, name)} is too small; give {least} or more")
        if self.skip_positions > self.max_tokens - 2:
            raise InputError(
                f"--skip-positions {self.skip_positions} leaves nothing to count in rows of --max-tokens "
                f"{self.max_tokens}; give at most {self.max_tokens - 2}"
            )


@dataclass(frozen=True)
class Shard:
    """One of ``count`` parts of a corpus's rows, by its number from 1: every count-th row.

    Rows are dealt out in turn rather than cut into stretches, so that shards of a corpus whose parts differ (books
    after headlines) take equally long.

    Raises:
        InputError: There is no such part.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise InputError(
                f"--shard {self} is not one of {self.count} shards; they are numbered from 1 to {self.count}"
            )

    def __str__(self) -> str:
        """Return ``i/n``."""
        return f"{self.index}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Read ``i/n``."""
        index, slash, count = text.partition("/")
        # Of what int() takes only plain digits: no sign, no underscore, no other script's.
        if not (slash and all(part.isascii() and part.isdecimal() for part in (index.strip(), count.strip()))):
            raise InputError(f"--shard {text!r} is not of the form i/n; the second of four shards is 2/4")
        return cls(int(index), int(count))

    def rows(self, n_rows: int) -> Int64[np.ndarray, " rows"]:
        """Return which of ``n_rows`` rows belong to this shard."""
        return np.arange(self.index - 1, n_rows, self.count)
