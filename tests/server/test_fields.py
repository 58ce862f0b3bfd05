"""Every request field with invalid values: the server keeps running, and its next answer is unchanged.

`test_fuzz.py` combines invalid values of chosen fields. These tests cover all fields, listed from SGLang's own classes.
"""

import dataclasses
import json
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import httpx
import pytest

from sglang_dflash.pairs.servers.server import Server
from tests.server.lib.bad_requests import GREEDY, PROMPT, Bad, chat, completion, fields, sampling
from tests.server.lib.fuzz import ODD

pytestmark = pytest.mark.full

# Types of values that `lib/fuzz.py` does not draw.
SHAPES = (
    1, 2, float("nan"), [0.5], [5, 6], ["a"], [None], [True], [[1, 2]], {"a": 1}, {"a": "b"}, {"id": "a"}, {"1": 1.0},
)  # fmt: skip


class Door(NamedTuple):
    """Endpoint: the names of its request fields, and a function that makes a request with given fields."""

    names: Callable[[], list[str]]
    request: Callable[..., Bad]


def generate_names() -> list[str]:
    request = import_module("sglang.srt.managers.io_struct").GenerateReqInput
    return [field.name for field in dataclasses.fields(request) if field.name != "sampling_params"]


SAMPLING, OPENAI = "sglang.srt.sampling.sampling_params", "sglang.srt.entrypoints.openai.protocol"
DOORS = {
    "generate": Door(generate_names, lambda **given: fields(**({"input_ids": PROMPT} | given))),
    "sampling": Door(lambda: list(import_module(SAMPLING).SamplingParams.__struct_fields__), sampling),
    "chat": Door(lambda: list(import_module(OPENAI).ChatCompletionRequest.model_fields), chat),
    "completion": Door(lambda: list(import_module(OPENAI).CompletionRequest.model_fields), completion),
}


@pytest.mark.parametrize("door", DOORS)
def test_no_field_ends_a_server(ours: Server, door: str) -> None:
    before = ours.generate(PROMPT, **GREEDY).token_ids
    for name in DOORS[door].names():
        for value in (*ODD, *SHAPES):
            bad = DOORS[door].request(**{name: value})
            sent = bad._replace(body=json.dumps(bad.body).encode())  # httpx's own `json` refuses NaN
            try:  # no shared connection: after status 500 the server closes it
                httpx.post(f"{ours.url}{sent.path}", timeout=60, **sent.content)
            except httpx.TransportError as error:
                pytest.fail(f"{name} of {door}: {value!r}, or a value before it: {error}")
        assert ours.generate(PROMPT, **GREEDY).token_ids == before, name


def test_values_are_odd_and_fields_many() -> None:
    assert [len(door.names()) > 25 for door in DOORS.values()] == [True] * len(DOORS)
    assert len({repr(value) for value in (*ODD, *SHAPES)}) == len(ODD) + len(SHAPES)
