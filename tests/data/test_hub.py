"""The Hub for real, on the loopback interface: models, streams, outages, gates; each library process has its own cache.

`HF_ENDPOINT` is read when huggingface_hub is imported, so what talks to the endpoint runs in a process of its own: one
for models and one for data sets, each doing everything that is asked of it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from tests import loopback, tiny

from layerflow.data import hub
from layerflow.errors import InputError

SCRIPT = """
import json, sys
from layerflow.data import hub
from layerflow.data.corpus import open_corpus
from layerflow.errors import InputError

hub.OPEN_WAITS = hub.STREAM_WAITS = (0.01,) * 4


def read(name, **options):
    import datasets

    # What datasets itself would wait out must reach us.
    datasets.config.STREAMING_READ_MAX_RETRIES = 1
    datasets.config.STREAMING_READ_RETRY_INTERVAL = 0.01
    corpus = open_corpus(name, **options)
    return {**corpus.source, "documents": list(corpus.documents())}


def load(name, **options):
    from layerflow.data.models import load_model, probe

    model = load_model(name, **options)
    weights = sum(float(parameter.detach().sum()) for parameter in model.causal.parameters())
    return {**model.source, "n_states": probe(model).n_states, "weights": weights}


for line in json.loads(sys.argv[1]):
    action, name, options = line
    try:
        result = {"read": read, "load": load}[action](name, **options)
    except InputError as error:
        result = {"error": str(error)}
    print(json.dumps(result), flush=True)
"""


def in_process(endpoint: loopback.Hub, home: Path, *tasks: tuple[str, str, dict[str, Any]]) -> list[dict[str, Any]]:
    environment = {**os.environ, **endpoint.environment(home), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(tasks)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return [*results, {"stderr": done.stderr}]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[loopback.Hub]:
    with loopback.serving(loopback.Hub()) as served:
        yield served


def test_models(endpoint: loopback.Hub, tmp_path: Path) -> None:
    model = tiny.save_model(tmp_path / "model", "gpt_neox")
    # The same weights in another form, and a folder of a third: neither is downloaded.
    (model / "pytorch_model.bin").write_bytes(b"not read")
    (model / "onnx").mkdir()
    (model / "onnx" / "config.json").write_text("{}")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    names = {"tiny/neox": model, "tiny/flaky": model, "tiny/down": model, "tiny/gated": model}
    endpoint.repositories = {f"models/{name}": folder for name, folder in names.items()}
    endpoint.repositories["models/tiny/bare"] = tmp_path / "bare"
    endpoint.gated = {"tiny/gated"}
    endpoint.failures = {"models/tiny/flaky$": [503, "drop", 503], "models/tiny/down": [503] * 50}
    first, named, unknown, missing, gated, bare, flaky, down, output = in_process(
        endpoint,
        tmp_path / "home",
        ("load", "tiny/neox", {}),
        ("load", "tiny/neox", {"revision": "step1000"}),
        ("load", "tiny/neox", {"revision": "step7"}),
        ("load", "tiny/none", {}),
        ("load", "tiny/gated", {}),
        ("load", "tiny/bare", {}),
        ("load", "tiny/flaky", {}),
        ("load", "tiny/down", {}),
    )
    assert "error" not in first
    assert "error" not in flaky
    weights = sum(float(parameter.detach().sum()) for parameter in tiny.make_model("gpt_neox").parameters())
    assert first["weights"] == pytest.approx(weights)
    assert first["n_states"] == tiny.N_BLOCKS + 1
    assert (first["kind"], first["hub_name"]) == ("hub", "tiny/neox")
    assert first["commit"] == named["commit"] == flaky["commit"] == loopback.COMMIT
    assert (first["revision"], named["revision"]) == (None, "step1000")
    assert not [request for request in endpoint.requests if "onnx" in request or request.endswith(".bin")]
    assert unknown["error"].startswith("model tiny/neox has no revision 'step7'")
    assert missing["error"].startswith("there is no model tiny/none on the Hub")
    assert "gated" in gated["error"]
    assert "`hf auth login`" in gated["error"]
    assert "no weights" in bare["error"]
    assert "the Hub answered 503 for model tiny/down" in down["error"]
    assert output["stderr"] == ""

    # Without a network: what has been downloaded loads, all else says so at once.
    n_requests = len(endpoint.requests)
    elsewhere = loopback.Hub(port=1)
    again, never, output = in_process(
        elsewhere, tmp_path / "home", ("load", "tiny/neox", {}), ("load", "tiny/none", {})
    )
    assert "error" not in again
    assert again["weights"] == first["weights"]
    assert again["commit"] == loopback.COMMIT
    assert never["error"].startswith("the Hub cannot be reached for model tiny/none")
    assert len(endpoint.requests) == n_requests


def write_parquet(folder: Path, name: str, **columns: list[Any]) -> None:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    pa.parquet.write_table(pa.table(columns), folder / "data" / name, row_group_size=50)


def test_data_sets(endpoint: loopback.Hub, tmp_path: Path) -> None:
    documents = tiny.make_documents(300)
    write_parquet(tmp_path / "parquet", "train-00000-of-00002.parquet", id=list(range(200)), text=documents[:200])
    write_parquet(tmp_path / "parquet", "train-00001-of-00002.parquet", id=list(range(100)), text=documents[200:])
    write_parquet(tmp_path / "parquet", "test-00000-of-00001.parquet", id=[0], text=[documents[0]])
    (tmp_path / "lines").mkdir()
    lines = [json.dumps({"title": "T", "body": document}) + "\n" for document in documents]
    (tmp_path / "lines" / "train.jsonl").write_text("".join(lines))
    (tmp_path / "configs" / "a").mkdir(parents=True)
    (tmp_path / "configs" / "a" / "train.jsonl").write_text('{"text": "of a"}\n')
    (tmp_path / "configs" / "b").mkdir()
    (tmp_path / "configs" / "b" / "train.jsonl").write_text('{"text": "of b"}\n')
    (tmp_path / "configs" / "README.md").write_text(
        "---\nconfigs:\n- config_name: a\n  data_files: a/*.jsonl\n- config_name: b\n  data_files: b/*.jsonl\n---\n"
    )
    folders = {"parquet": "parquet", "lines": "lines", "configs": "configs", "flaky": "parquet", "gated": "parquet"}
    endpoint.repositories = {f"datasets/tiny/{name}": tmp_path / folder for name, folder in folders.items()}
    endpoint.gated = {"tiny/gated"}
    # The stream has begun when it breaks off. The Hub's client gets over the first failure, the second is left to us.
    endpoint.failures = {"datasets/tiny/flaky/resolve/.*train-00001": ["drop", 520]}
    whole, test, body, two, config, which, split, missing, unknown, gated, flaky, output = in_process(
        endpoint,
        tmp_path / "home",
        ("read", "tiny/parquet", {}),
        ("read", "tiny/parquet", {"split": "test", "revision": "main"}),
        ("read", "tiny/lines", {"text_field": "body"}),
        ("read", "tiny/lines", {}),
        ("read", "tiny/configs", {"config": "b"}),
        ("read", "tiny/configs", {}),
        ("read", "tiny/parquet", {"split": "zorp"}),
        ("read", "tiny/none", {}),
        ("read", "tiny/parquet", {"revision": "zorp"}),
        ("read", "tiny/gated", {}),
        ("read", "tiny/flaky", {}),
    )
    assert whole["documents"] == documents
    assert whole["commit"] == loopback.COMMIT
    assert (whole["kind"], whole["split"], whole["field"]) == ("hub", "train", "text")
    assert (test["documents"], test["revision"]) == (documents[:1], "main")
    assert body["documents"] == documents
    assert "--text-field: 'title', 'body'" in two["error"]
    assert config["documents"] == ["of b"]
    assert "--corpus-config" in which["error"]
    assert "['a', 'b']" in which["error"]
    assert "no split 'zorp'" in split["error"]
    assert "'train', 'test'" in split["error"]
    assert missing["error"].startswith("there is no data set tiny/none on the Hub")
    assert unknown["error"].startswith("data set tiny/parquet has no revision 'zorp'")
    assert "`hf auth login`" in gated["error"]
    # Nothing twice, nothing left out, and the person watching was told.
    assert flaky["documents"] == documents
    assert "data set tiny/flaky: the connection failed after 200 records" in output["stderr"]
    # Besides, only the Hub client's own remarks on its first attempts.
    assert all("tiny/flaky" in line or line.startswith("Retrying") for line in output["stderr"].splitlines())


# --- without an endpoint


class ConnectError(Exception):
    """Named as the one of the Hub's HTTP library."""


def test_stream_is_resumed_where_it_broke_off(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(hub, "STREAM_WAITS", (0.0, 0.0))
    opened = []
    breaks = {0, 4, 8}

    def open_at(n_done: int) -> Iterator[int]:
        opened.append(n_done)
        for number in range(n_done, 10):
            if number in breaks:
                breaks.remove(number)
                raise ConnectError
            yield number

    assert list(hub.resumed(open_at, what="stream")) == list(range(10))
    assert opened == [0, 0, 4, 8]
    assert capsys.readouterr().err.count("stream: the connection failed after") == 3


def test_stream_that_stays_broken_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "STREAM_WAITS", (0.0, 0.0))
    opened = []

    def open_at(n_done: int) -> Iterator[int]:
        opened.append(n_done)
        raise ConnectError
        yield 0

    with pytest.raises(ConnectError):
        list(hub.resumed(open_at, what="stream"))
    assert len(opened) == 3


def test_only_passing_errors_are_retried() -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise KeyError("a fault of ours")

    with pytest.raises(KeyError):
        hub.retried(fail)
    assert len(calls) == 1


def test_cause_of_an_error_is_found() -> None:
    error = OSError("could not load")
    error.__cause__ = ConnectError("refused")
    assert hub.is_passing(error)
    explained = hub.explained(error, kind="model", name="a/b", revision=None)
    assert isinstance(explained, InputError)
    assert str(explained).startswith("the Hub cannot be reached for model a/b")
    assert hub.explained(ValueError("other"), kind="model", name="a/b", revision=None) is None
