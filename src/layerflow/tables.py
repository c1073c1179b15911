"""Result tables: tidy, one fact a row, with columns fixed by a record class.

A table is a :class:`pyarrow.Table` made of frozen dataclasses, so that the columns promised to users' scripts stand in
code once, in order, with their types. Each is written twice: Parquet for programs, CSV for eyes and spreadsheets.
"""

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from layerflow.errors import InputError

Results = Mapping[str, pa.Table]

# The two views of a run, and the folders their tables are in.
WITH_SINKS = "results"
WITHOUT_SINKS = "results-without-sinks"

_ARROW_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}


def from_records(record: type[Any], rows: Iterable[Any]) -> pa.Table:
    """Turn records into a table whose columns are the record's fields.

    A field typed ``X | None`` becomes a nullable column; ``None`` is an empty cell in CSV.
    """
    hints = typing.get_type_hints(record)
    rows = list(rows)
    names = [field.name for field in dataclasses.fields(record)]
    schema = pa.schema([pa.field(name, _arrow_type(hints[name])) for name in names])
    return pa.table({name: [getattr(row, name) for row in rows] for name in names}, schema=schema)


def write(directory: Path, results: Results) -> None:
    """Write every table as ``NAME.parquet`` and ``NAME.csv``, and remove tables that were there under other names.

    Each file appears whole or not at all, and nothing is removed before everything is written. No results leave no
    directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, table in results.items():
        for suffix, write_file in (("parquet", pa.parquet.write_table), ("csv", pa.csv.write_csv)):
            partial = directory / f".{name}.{suffix}.partial"
            try:
                write_file(table, partial)
                partial.replace(directory / f"{name}.{suffix}")
            finally:
                partial.unlink(missing_ok=True)
    for path in (*directory.glob("*.parquet"), *directory.glob("*.csv")):
        if path.stem not in results:
            path.unlink()
    if not any(directory.iterdir()):
        directory.rmdir()


def read(directory: Path) -> dict[str, pa.Table]:
    """Read the tables of a results directory by name.

    Raises:
        InputError: A file there is not a readable Parquet table.
    """
    results = {}
    for path in sorted(directory.glob("*.parquet")):
        try:
            results[path.stem] = pa.parquet.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"{path} is not a readable Parquet table; run `layerflow analyse {directory.parent}` again"
            ) from error
    return results


def _arrow_type(hint: Any) -> pa.DataType:
    if isinstance(hint, types.UnionType):
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
    return _ARROW_TYPES[hint]
