"""Single positions' states on disk: each is written once, to its own place, and none is held in memory."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int64


@dataclass(frozen=True)
class SampleFile:
    """The states of the sampled positions as one raw float32 array (L+1, samples, D), little-endian.

    A place depends only on the seed and the corpus, so writing a batch again after a kill changes nothing, and the
    file needs no saving along with the sums.
    """

    path: Path
    n_states: int
    n_samples: int
    width: int

    def create(self) -> None:
        """Make the file unless it is there; it takes up disk space only as places are written."""
        with self.path.open("ab") as file:
            file.truncate(self.n_states * self.n_samples * self.width * 4)

    def write(self, places: Int64[np.ndarray, " k"], states: Float32[np.ndarray, "states k D"]) -> None:
        """Write the states of some places."""
        if len(places) == 0:
            return
        with self.path.open("r+b", buffering=0) as file:
            for state, values in enumerate(states):
                for place, value in zip(places, values, strict=True):
                    file.seek((state * self.n_samples + int(place)) * self.width * 4)
                    file.write(value.astype("<f4", copy=False).data)

    def read(self, state: int) -> Float32[np.ndarray, "samples D"]:
        """Map one state of all places, read-only; places never written are zero."""
        shape = (self.n_samples, self.width)
        if self.n_samples == 0:
            return np.zeros(shape, np.float32)
        offset = state * self.n_samples * self.width * 4
        return np.memmap(self.path, "<f4", mode="r", offset=offset, shape=shape)
