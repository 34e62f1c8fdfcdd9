"""Trajectories as Arrow columns and back, exactly: arrays as nested lists of their own type. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from diagnostics.records import Message, Segment, Trajectory, Turn

SEGMENT_ARRAYS = {
    "ids": pa.int32(),
    "response_mask": pa.bool_(),
    "turn": pa.int16(),
    "token_class": pa.int8(),
    "rollout_logprobs": pa.float32(),
}
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_TURN_FIELDS = [("observation", pa.string()), ("admissible", pa.list_(pa.string())), ("response", pa.string())]
_TURNS = pa.list_(pa.struct([*_TURN_FIELDS, ("action", pa.string()), ("valid", pa.bool_())]))
_TYPES = {"str": pa.string(), "str | None": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
_TYPES["float | None"] = pa.float64()


def trajectory_table(trajectories: Sequence[Trajectory]) -> pa.Table:
    """One row a trajectory; turns and segments are lists of structs."""
    flat = [segment for trajectory in trajectories for segment in trajectory.segments]
    messages = [[dataclasses.asdict(m) for m in segment.messages] for segment in flat]
    fields = {"messages": pa.array(messages, _MESSAGES)}
    for name, kind in SEGMENT_ARRAYS.items():
        fields[name] = _pack([getattr(segment, name) for segment in flat], kind)
    nested = pa.StructArray.from_arrays(list(fields.values()), names=list(fields))
    columns: dict[str, pa.Array] = {}
    for entry in dataclasses.fields(Trajectory):
        values = [getattr(trajectory, entry.name) for trajectory in trajectories]
        if entry.name == "segments":
            columns["segments"] = pa.ListArray.from_arrays(_offsets(values), nested)
        elif entry.name == "turns":
            columns["turns"] = pa.array([[dataclasses.asdict(turn) for turn in turns] for turns in values], _TURNS)
        else:
            columns[entry.name] = pa.array(values, _TYPES[str(entry.type)])
    return pa.table(columns)


def table_trajectories(table: pa.Table) -> list[Trajectory]:
    """The trajectories of such a table, in order."""
    column = table.column("segments").combine_chunks()
    nested = column.flatten()
    prompts = [tuple(Message(**m) for m in messages) for messages in nested.field("messages").to_pylist()]
    arrays = [_unpack(nested.field(name)) for name in SEGMENT_ARRAYS]
    segments = [Segment(*parts) for parts in zip(prompts, *arrays, strict=True)]
    ends = np.cumsum([0, *column.value_lengths().to_pylist()])
    trajectories = []
    for row, values in enumerate(table.drop_columns(["segments"]).to_pylist()):
        turns = tuple(Turn(**{**turn, "admissible": tuple(turn["admissible"])}) for turn in values.pop("turns"))
        trajectories.append(Trajectory(**values, turns=turns, segments=tuple(segments[ends[row] : ends[row + 1]])))
    return trajectories


def _offsets(lists: Sequence[Any]) -> pa.Array:
    return pa.array(np.cumsum([0, *(len(item) for item in lists)]), pa.int32())


def _pack(arrays: Sequence[np.ndarray], kind: pa.DataType) -> pa.ListArray:
    values = np.concatenate([np.empty(0, kind.to_pandas_dtype()), *arrays])
    return pa.ListArray.from_arrays(_offsets(arrays), pa.array(values).cast(kind))


def _unpack(column: pa.ListArray) -> list[np.ndarray]:
    values = column.flatten().to_numpy(zero_copy_only=False)
    ends = np.cumsum([0, *column.value_lengths().to_pylist()])
    return [values[start:end].copy() for start, end in pairwise(ends)]
