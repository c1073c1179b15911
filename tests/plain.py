"""A collection as SPEC section 2 says it, by plain loops over documents and positions: the oracle of the collector.

One document at a time, no padding, no batches, float64 sums in dictionaries; nothing of `layerflow` is used but the
way halves are drawn, which is stated, not tested here.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Occurrence:
    """One counted position: where it is, what follows it, its states (L+1, D), its half and whether it is a sink."""

    row: int
    position: int
    target: int
    states: np.ndarray
    in_half_a: bool
    is_sink: bool


@dataclass(frozen=True)
class Means:
    """Mean states by token id, and what belongs to them."""

    token_ids: list[int]
    counts: np.ndarray
    states: np.ndarray
    count_a: np.ndarray
    half_a: np.ndarray
    half_b: np.ndarray


@torch.no_grad()
def occurrences(
    model: Any,
    tokenizer: Any,
    documents: Sequence[str],
    *,
    special_ids: set[int],
    max_tokens: int,
    medians: Sequence[float] | None = None,
    skip_positions: int = 0,
    seed: int = 0,
    split: bool = False,
) -> list[Occurrence]:
    """Return every position whose target may count, kept token or not."""
    found = []
    row = 0
    for document in documents:
        ids = tokenizer(document, add_special_tokens=False)["input_ids"]
        pieces = [ids[i : i + max_tokens] for i in range(0, len(ids), max_tokens)] if split else [ids[:max_tokens]]
        for piece in pieces:
            if len(piece) < 2:
                continue
            output = model(input_ids=torch.tensor([piece]), output_hidden_states=True)
            states = torch.stack(output.hidden_states)[:, 0].double().numpy()
            half_a = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0, row))).random(len(piece)) < 0.5
            for i in range(1, len(piece)):
                if i - 1 < skip_positions or piece[i] in special_ids or piece[i - 1] in special_ids:
                    continue
                here = states[:, i - 1]
                norms = np.linalg.norm(here, axis=1)
                is_sink = i == 1
                if medians is not None:
                    is_sink = is_sink or any(norms[state] > 10 * medians[state] for state in range(len(norms) - 1))
                found.append(Occurrence(row, i - 1, piece[i], here, bool(half_a[i]), is_sink))
            row += 1
    return found


def means(found: Sequence[Occurrence], min_count: int) -> Means:
    """Average by target over the tokens that occur often enough."""
    by_target = defaultdict(list)
    for occurrence in found:
        by_target[occurrence.target].append(occurrence)
    kept = sorted(target for target, those in by_target.items() if len(those) >= min_count)
    width = found[0].states.shape[1]
    halves = {
        half: [[o.states[-1] for o in by_target[target] if o.in_half_a is half] for target in kept]
        for half in (True, False)
    }
    empty = np.zeros(width)
    return Means(
        kept,
        np.array([len(by_target[target]) for target in kept]),
        np.stack([np.mean([o.states for o in by_target[target]], axis=0) for target in kept], axis=1),
        np.array([len(states) for states in halves[True]]),
        np.stack([np.mean(states, axis=0) if states else empty for states in halves[True]]),
        np.stack([np.mean(states, axis=0) if states else empty for states in halves[False]]),
    )
