"""What collecting costs beside the bare forward pass, and how much memory it takes (SPEC section 8).

    python benchmarks/collection.py [--documents 64] [--rounds 8] [--model smollm2-135m] [--corpus wikipedia-sample]

Speed: the same batches go through the backbone alone and through the collector in turn, in one process, so that
whatever else the machine does slows both; the figure is the median over pairs, and the reach is 0.95. Memory: the peak
of a process that loads a model and collects, against model + sums + 1 GiB, and against the estimate it printed.
"""

import argparse
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from layerflow.data.accumulator import Accumulator
from layerflow.data.collect import collect
from layerflow.data.corpus import open_corpus
from layerflow.data.documents import Corpus
from layerflow.data.memory import GIB, estimate_memory
from layerflow.data.models import LanguageModel, load_model
from layerflow.data.options import CollectOptions
from layerflow.data.positions import Batch, Positions, find_positions, in_batches
from layerflow.data.reduce import median_norms, reduce_batch
from layerflow.data.windows import tokenize


def measure_memory(model: LanguageModel, corpus: Corpus, positions: Positions, options: CollectOptions) -> None:
    """Collect, and compare the peak with the reach and the estimate."""
    with tempfile.TemporaryDirectory() as folder:
        collect(model, corpus, options, out=Path(folder) / "run")
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    estimate = estimate_memory(model, positions, options.batch_tokens)
    reach = estimate.model + estimate.sums + GIB
    print(f"peak memory     {peak / GIB:6.2f} GiB")
    print(f"reach           {reach / GIB:6.2f} GiB (model + sums + 1 GiB), {'met' if peak <= reach else 'MISSED'}")
    print(f"estimate        {estimate.total / GIB:6.2f} GiB, peak / estimate {peak / estimate.total:.2f}")


def measure_speed(model: LanguageModel, positions: Positions, options: CollectOptions, rounds: int) -> None:
    """Time the collector and the bare forward pass in turn on the same batches."""
    rows = in_batches(positions.windows, np.arange(len(positions.windows)), options.batch_tokens)
    batches = [positions.batch(each, model.pad_id) for each, _ in zip(rows, range(rounds), strict=False)]
    medians = median_norms(model, batches[:1])
    accumulator = Accumulator.zeros(
        n_tokens=len(positions.token_ids),
        width=model.width,
        n_samples=len(positions.sampled),
        n_sink_slots=positions.n_first,
        medians=medians,
    )
    for total in accumulator.ordinary.states:
        total[:] = 0.0  # the system hands out memory when it is first written, once a run: about a second for 1 GiB
    bare(model, batches[0])
    times: dict[str, list[float]] = {"bare": [], "collect": []}
    for index, batch in enumerate(batches):
        for name in ("bare", "collect") if index % 2 else ("collect", "bare"):
            start = time.perf_counter()
            if name == "bare":
                bare(model, batch)
            else:
                laid_out = positions.batch(batch.rows, model.pad_id)
                accumulator.add(reduce_batch(model, laid_out, medians))
            times[name].append(time.perf_counter() - start)
    n_tokens = sum(int(batch.lengths.sum()) for batch in batches)
    ratio = statistics.median(b / c for b, c in zip(times["bare"], times["collect"], strict=True))
    for name, seconds in times.items():
        print(f"{name:15s} {n_tokens / sum(seconds):6.0f} tokens/s over {n_tokens:,} tokens")
    print(f"collect / bare  {ratio:6.3f} (median of {len(batches)} pairs; reach 0.95)")


@torch.inference_mode()
def bare(model: LanguageModel, batch: Batch) -> None:
    """Run the backbone over a batch and keep nothing."""
    mask = None if batch.mask.all() else torch.from_numpy(batch.mask).to(model.device, torch.int64)
    model.backbone(input_ids=torch.from_numpy(batch.input_ids).to(model.device), attention_mask=mask, use_cache=False)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--corpus", default="wikipedia-sample")
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batch-tokens", type=int, default=CollectOptions.batch_tokens)
    arguments = parser.parse_args()
    options = CollectOptions(
        max_documents=arguments.documents,
        batch_tokens=arguments.batch_tokens,
        min_count=2,
        # Three positions in a hundred, as the default of the whole wikipedia-sample.
        n_samples=3 * arguments.documents,
    )
    model, corpus = load_model(arguments.model, device="cpu"), open_corpus(arguments.corpus)
    positions = find_positions(
        tokenize(corpus, model.tokenizer, options),
        model.special_ids,
        model.vocabulary_size,
        min_count=options.min_count,
        skip_positions=0,
        n_samples=options.n_samples,
        seed=0,
    )
    measure_memory(model, corpus, positions, options)
    measure_speed(model, positions, options, arguments.rounds)


if __name__ == "__main__":
    main()
