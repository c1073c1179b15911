import dataclasses

import numpy as np
import pytest

from layerflow.analysis.norms import norms, sample_norms
from layerflow.data.sinks import over_threshold
from layerflow.data.trajectories import Samples, StateNorms, Trajectories


def samples_of(states):
    m = states.shape[1]
    return Samples(states, np.zeros(m, np.int64), np.zeros(m, bool))


def test_against_numpy_over_several_blocks():
    rng = np.random.default_rng(0)
    states = (rng.standard_normal((3, 9000, 5)) * rng.gamma(0.2, 1.0, (3, 9000, 1))).astype(np.float32)
    lengths = np.linalg.norm(states.astype(np.float64), axis=2)
    records = sample_norms(samples_of(states))
    assert [record.state for record in records] == [0, 1, 2]
    for record, length in zip(records, lengths, strict=True):
        assert record.median == pytest.approx(np.median(length), rel=1e-12)
        assert record.p99 == pytest.approx(np.percentile(length, 99), rel=1e-12)
        assert record.maximum == pytest.approx(length.max(), rel=1e-12)
    expected = [int((length > 10 * np.median(length)).sum()) for length in lengths]
    assert expected[0] > 0
    assert expected[1] > 0
    assert [record.n_sinks for record in records] == [*expected[:2], 0]


def test_ten_medians_exactly_is_no_sink():
    states = np.array([1.0, 1.0, 1.0, 10.0, 10.5])[None, :, None].repeat(2, axis=0)
    assert [record.n_sinks for record in sample_norms(samples_of(states))] == [1, 0]


def test_sinks_are_told_as_the_collector_tells_them():
    states = np.append(np.ones(40), np.linspace(5.0, 15.0, 21))[None, :, None].repeat(2, axis=0)
    records = sample_norms(samples_of(states))
    expected = over_threshold(states[:, :, 0].astype(np.float32), np.array([record.median for record in records]))
    assert [record.n_sinks for record in records] == expected.sum(axis=1).tolist() == [10, 0]


def test_what_the_collection_recorded_comes_first():
    states = np.ones((2, 3, 2), np.float32)
    recorded = (StateNorms(0, 1.0, 2.0, 3.0, 4), StateNorms(1, 5.0, 6.0, 7.0, 0))
    trajectories = Trajectories.from_arrays(states, samples=samples_of(states))
    assert norms(dataclasses.replace(trajectories, norms=recorded)) == list(recorded)
    assert [record.median for record in norms(trajectories)] == pytest.approx([np.sqrt(2)] * 2)


def test_no_norms_without_single_positions():
    states = np.ones((2, 3, 2), np.float32)
    assert norms(Trajectories.from_arrays(states)) == []
    assert norms(Trajectories.from_arrays(states, samples=samples_of(states[:, :0]))) == []
