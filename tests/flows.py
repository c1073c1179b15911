"""Synthetic trajectories for tests: anisotropic, turning, bent, with noise that depends on the state."""

import numpy as np


def rotation(width: int, rng: np.random.Generator) -> np.ndarray:
    """Draw an orthogonal matrix."""
    return np.linalg.qr(rng.standard_normal((width, width)))[0]


def bent_flow(n_tokens: int, width: int, n_transitions: int, *, seed: int = 0, outliers: float = 0.0) -> np.ndarray:
    """Draw mean states (L+1, n, D) in float32, off the origin, whose cloud, step matrix and noise do not commute.

    With ``outliers``, one token in fifty is moved along one direction at the inner states, as attention sinks are: by
    up to that many times the cloud's radius.
    """
    rng = np.random.default_rng(seed)
    spread = np.geomspace(3.0, 0.2, width)
    states = [
        rng.standard_normal((n_tokens, width)) * spread @ rotation(width, rng).T + 2.0 * rng.standard_normal(width)
    ]
    for _ in range(n_transitions):
        centred = states[-1] - states[-1].mean(axis=0)
        turn = rng.standard_normal((width, width))
        linear = centred @ (0.15 * (turn - turn.T) / 2 + 0.05 * turn).T
        bend = (centred @ rotation(width, rng)) * (centred @ rotation(width, rng)) * 0.15
        size = 0.4 * np.exp(0.2 * np.tanh(centred @ rotation(width, rng)[:, :1]))
        noise = size * rng.standard_normal((n_tokens, width)) * np.roll(spread, width // 3) @ rotation(width, rng).T
        states.append(states[-1] + linear + bend + noise + rng.standard_normal(width))
    flow = np.stack(states)
    if outliers:
        rows = rng.choice(n_tokens, n_tokens // 50, replace=False)
        radius = np.sqrt(flow.var(axis=1).sum(axis=1).mean())
        far = np.geomspace(outliers / 10, outliers, len(rows))[:, None] * radius
        direction = rotation(width, rng)[0]
        for state in flow[1:-1]:
            state[rows] += far * (direction + 0.02 * rng.standard_normal((len(rows), width)))
    return flow.astype(np.float32)
