"""The whole analysis of 13 × n × 768 against a straightforward NumPy + scikit-learn version of it (SPEC section 8).

Each runs in a process of its own on the same states, one after the other. The straightforward version covers SPEC
sections 3–5 and layerflow everything it computes, so the ratio is a lower bound. Memory is the peak beyond the input:
what the process held at most, less what it held with the states loaded and nothing yet computed.

Run: python benchmarks/analysis.py [--tokens 25268] [--only layerflow] [--profile]
"""

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

FULL_SIZE = 25_268
N_STATES, WIDTH, N_COMPONENTS = 13, 768, 64
REACH_SECONDS, REACH_RATIO, REACH_GIB = 150.0, 5.0, 3.0
GIB = 2.0**30


def synthetic_states(n_tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a flow (13, n, 768) in float32: a spectrum that falls as real ones do, turning, bending, with noise."""
    spectrum = np.arange(1, WIDTH + 1) ** -0.7

    def axes() -> np.ndarray:
        return np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0].astype(np.float32)

    states = np.empty((N_STATES, n_tokens, WIDTH), np.float32)
    cloud = rng.standard_normal((n_tokens, WIDTH)).astype(np.float32) * spectrum.astype(np.float32)
    first, turn = axes(), axes()
    turn = 0.1 * (turn - turn.T) + 0.03 * axes()
    for index in range(N_STATES):
        states[index] = cloud @ first.T + 0.5
        noise = rng.standard_normal((n_tokens, WIDTH)).astype(np.float32) * (0.2 * spectrum).astype(np.float32)
        cloud = cloud + cloud @ turn.T + 0.1 * np.roll(cloud, 1, axis=1) * cloud + noise
    return states


def layerflow_analysis(states: np.ndarray) -> None:
    """Analyse with layerflow at its defaults: four widths, three seeds."""
    import layerflow as lf

    lf.analyse(lf.Trajectories.from_arrays(states))


def straightforward_analysis(states: np.ndarray) -> None:
    """Analyse with the straightforward version at the same settings."""
    import straightforward

    n_train = 8 * states.shape[1] // 10
    widths = tuple(width for width in (8, 16, 32, 64) if width <= n_train - 2)
    straightforward.analyse(states, widths=widths)


ANALYSES: dict[str, Callable[[np.ndarray], None]] = {
    "layerflow": layerflow_analysis,
    "straightforward": straightforward_analysis,
}


def resident() -> int:
    """Bytes this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def in_one_thread() -> None:
    """Make layerflow a plain loop: the profiler sees the main thread only."""
    for name, module in list(sys.modules.items()):
        if name.startswith("layerflow.") and hasattr(module, "side_by_side"):
            vars(module)["side_by_side"] = map


def measure(name: str, path: Path, *, profile: bool) -> None:
    """Run one analysis in this process and print seconds and bytes as JSON."""
    import straightforward  # noqa: F401

    import layerflow.study  # noqa: F401  # imports are no part of the work

    states = np.load(path)
    held = resident()
    profiler = cProfile.Profile()
    start, started = time.perf_counter(), time.process_time()
    if profile:
        in_one_thread()
        with threadpool_limits(1):
            profiler.runcall(ANALYSES[name], states)
    else:
        ANALYSES[name](states)
    seconds, processor = time.perf_counter() - start, time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if profile:
        for order in ("tottime", "cumtime"):
            pstats.Stats(profiler, stream=sys.stderr).sort_stats(order).print_stats(40)
    print(json.dumps({"seconds": seconds, "processor": processor, "bytes": peak - held}))


def measured(name: str, path: Path, *, profile: bool) -> dict[str, float]:
    """Run `measure` in a process of its own, so that its peak is this analysis's alone."""
    command = [sys.executable, __file__, "--measure", name, "--states", str(path)]
    done = subprocess.run([*command, *(["--profile"] if profile else [])], stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    """Make the states, run both, print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2000, help=f"number of tokens; the full size is {FULL_SIZE}")
    parser.add_argument("--only", choices=list(ANALYSES), help="run one of the two")
    parser.add_argument("--profile", action="store_true", help="print where layerflow's time goes, in one thread")
    parser.add_argument("--measure", choices=list(ANALYSES), help=argparse.SUPPRESS)
    parser.add_argument("--states", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, arguments.states, profile=arguments.profile)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "states.npy"
        np.save(path, synthetic_states(arguments.tokens, np.random.default_rng(0)))
        found = {}
        for name in [arguments.only] if arguments.only else ANALYSES:
            found[name] = measured(name, path, profile=arguments.profile and name == "layerflow")
            size = f"{found[name]['bytes'] / GIB:.2f} GiB beyond the input of {path.stat().st_size / GIB:.2f} GiB"
            spent = f"{found[name]['seconds']:.1f} s, of processors {found[name]['processor']:.1f} s"
            print(f"{name}: {spent}, {size}", flush=True)
    reach = f"at {FULL_SIZE:,} tokens: {REACH_SECONDS:.0f} s, {REACH_GIB:.0f} GiB, ratio {REACH_RATIO:.0f}"
    if len(found) == 2:
        ratio, processor = (found["straightforward"][key] / found["layerflow"][key] for key in ("seconds", "processor"))
        shape = f"{N_STATES} × {arguments.tokens:,} × {WIDTH}"
        print(f"{shape}: ratio {ratio:.1f}, of processor time {processor:.1f} (reach {reach})")


if __name__ == "__main__":
    main()
