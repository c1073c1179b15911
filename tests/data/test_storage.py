import json

import numpy as np
import pytest
import safetensors.numpy

from layerflow.data import storage
from layerflow.data.storage import Tensor
from layerflow.errors import InputError


@pytest.fixture
def states():
    return np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)


@pytest.fixture
def written(tmp_path, states):
    path = tmp_path / "x.safetensors"
    tensors = {f"state.{i:03d}": Tensor.of(state) for i, state in enumerate(states)}
    storage.write_safetensors(path, {**tensors, "row": Tensor.of(np.arange(5)), "sink": Tensor.of(np.arange(5) > 2)})
    return path


def test_the_safetensors_library_reads_what_we_write(written, states):
    read = safetensors.numpy.load_file(written)
    assert list(read) == ["state.000", "state.001", "state.002", "row", "sink"]
    np.testing.assert_array_equal(read["state.001"], states[1])
    assert read["sink"].dtype == bool
    assert read["row"].dtype == np.int64


def test_we_read_what_the_safetensors_library_writes(tmp_path, states):
    safetensors.numpy.save_file({f"state.{i:03d}": s for i, s in enumerate(states)}, tmp_path / "y.safetensors")
    read = storage.read_safetensors(tmp_path / "y.safetensors")
    np.testing.assert_array_equal(storage.stacked(read, "state"), states)


def test_consecutive_states_are_one_memory_map(written, states):
    stacked = storage.stacked(storage.read_safetensors(written), "state")
    assert isinstance(stacked, np.memmap)
    np.testing.assert_array_equal(stacked, states)


def test_a_tensor_is_written_chunk_by_chunk(tmp_path, states):
    path = tmp_path / "z.safetensors"
    storage.write_safetensors(path, {"a": Tensor((5, 4), np.float32, lambda: (row[None] for row in states[0]))})
    np.testing.assert_array_equal(safetensors.numpy.load_file(path)["a"], states[0])


def test_a_failed_write_leaves_the_old_file_and_no_other(written):
    before = written.read_bytes()

    def failing():
        yield np.zeros((1, 4), np.float32)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        storage.write_safetensors(written, {"a": Tensor((5, 4), np.float32, failing)})
    assert written.read_bytes() == before
    assert list(written.parent.iterdir()) == [written]


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_a_truncated_file_is_refused_by_name(written, keep):
    written.write_bytes(written.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"x\.safetensors is not a whole safetensors file"):
        storage.read_safetensors(written)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
        {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        ["not an entry"],
    ],
)
def test_a_lying_header_is_refused(tmp_path, entry):
    text = json.dumps({"a": entry}).encode()
    path = tmp_path / "lie.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(InputError, match="not a whole safetensors file"):
        storage.read_safetensors(path)


def test_a_gap_in_the_states_is_refused():
    with pytest.raises(InputError, match=r"expected tensors state\.000, state\.001"):
        storage.stacked({"state.000": np.zeros(2), "state.002": np.zeros(2)}, "state")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not a layerflow manifest"),
        ("[]", "is not a layerflow manifest"),
        ('{"format": "other"}', "names no format"),
        ('{"format": "layerflow", "format_version": 99}', "newer than 1"),
    ],
)
def test_a_foreign_manifest_is_refused(tmp_path, text, words):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=words):
        storage.read_manifest(tmp_path)


def test_a_folder_without_manifest_is_no_run(tmp_path):
    with pytest.raises(InputError, match="is not a run"):
        storage.read_manifest(tmp_path)
