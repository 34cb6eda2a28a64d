"""Checkpoints with one damaged field in a header, and what becomes of them in a process of their own.

As a program it loads and checks every case of a format, and writes a line of JSON for each before and after it.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeAlias

from unit.engine.gguf_writer import Number, llama_metadata, tiny_gguf
from unit.engine.tiny_llama import CONFIG, TinyLlama

from machd.engine.loading.source import ModelSource, SourceKind
from support.checkpoints.gguf_samples import SAMPLES

_INTEGERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    33,
    255,
    -1,
    1 << 15,
    (1 << 31) - 1,
    1 << 31,
    1 << 62,
    (1 << 63) - 1,
)
_FLOATS = (0.0, -1.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan"))
_SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LISTED = 3
"""Elements of a list in a GGUF header that are damaged."""

_JSON_VALUES: tuple[object, ...] = (
    *(0, 1, -1, 3, 2**31, 2**63, 2**64, 10**400, 0.0, 0.5, -1.5, 1e-320, 1e308),
    *(float("nan"), float("inf"), float("-inf"), None, True, False, "", "64", "x" * 300),
    *([], [0], [-1, 64], [2**63], [[]], [None], ["x"], {}, {"a": 1}, {"type": "yarn"}),
)


@dataclass(frozen=True)
class Case:
    """A damaged file.

    Attributes:
        name: Field and value.
        content: Of the file, or what writes it: most cases are not drawn.
        is_seen: The headers show the damage. They do not where other bytes are taken for weights, or where the value
            has another JSON type, which transformers checks for some keys and the check of a model does not.
    """

    name: str
    content: bytes | Callable[[], bytes]
    is_seen: bool = True

    def written(self) -> bytes:
        """Return the file's content."""
        return self.content if isinstance(self.content, bytes) else self.content()


def gguf_cases(path: Path) -> Iterator[Case]:
    """Overwrite every field of a GGUF header with boundary values of its width."""
    metadata = llama_metadata(
        **{
            "general.alignment": 32,
            "llama.attention.key_length": 16,
            "llama.rope.dimension_count": 16,
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 2.0,
            "llama.rope.scaling.original_context_length": 256,
            "llama.vocab_size": 264,
            "tokenizer.ggml.add_bos_token": True,
            **{
                f"a.{code}": Number(kind, code, 1) for kind, code in _SCALARS.items() if code != "?"
            },
            "a.list of lists": [[[1, 2], [3]], [[4]]],
            "a.list of texts": [["a", "b"], ["c"]],
        }
    )
    data = tiny_gguf(path, "Q8_0", metadata).read_bytes()
    for name, offset, code in _fields(data):
        for value in _FLOATS if code in "fd" else _INTEGERS:
            width = struct.calcsize("<" + code)
            if code in "fd":
                raw = struct.pack("<" + code, value)
            else:
                raw = (int(value) & ((1 << 8 * width) - 1)).to_bytes(width, "little")
            if raw != data[offset : offset + width]:
                moves_weights = name.startswith("general.alignment")
                content = data[:offset] + raw + data[offset + width :]
                yield Case(f"{name} = {value}", content, not moves_weights)


Field: TypeAlias = tuple[str, int, str]
"""Name, offset and struct format."""


def _fields(data: bytes) -> list[Field]:
    """List the fields of a GGUF header."""
    walk = _HeaderWalk(data)
    walk.number("magic", "I")
    walk.number("version", "I")
    tensors = walk.number("tensor count", "Q")
    for _ in range(walk.number("metadata count", "Q")):
        key = walk.text("key")
        walk.value(key, walk.number(f"type of {key}", "I"), is_listed=True)
    for _ in range(tensors):
        name = walk.text("tensor")
        for index in range(walk.number(f"dimensions of {name}", "I")):
            walk.number(f"dimension {index} of {name}", "Q")
        walk.number(f"type of {name}", "I")
        walk.number(f"offset of {name}", "Q")
    return walk.fields


class _HeaderWalk:
    """A position in a GGUF header, and the fields before it."""

    def __init__(self, data: bytes) -> None:
        self.fields: list[Field] = []
        self._data = data
        self._at = 0

    def number(self, name: str, code: str) -> int:
        """Read a number."""
        self.fields.append((name, self._at, code))
        (found,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return int(found)

    def text(self, name: str) -> str:
        """Read a length and a text, of which the first byte is a field."""
        length = self.number(f"length of {name} at {self._at}", "Q")
        text = self._data[self._at : self._at + length].decode()
        if length:
            self.fields.append((f"{name} {text:.40}", self._at, "B"))
        self._at += length
        return text

    def value(self, name: str, kind: int, *, is_listed: bool) -> None:
        """Read a value, which is no field if it is not listed."""
        before = len(self.fields)
        if kind == _ARRAY:
            inner = self.number(f"type of the elements of {name}", "I")
            for index in range(self.number(f"length of the list {name}", "Q")):
                self.value(f"{name}[{index}]", inner, is_listed=index < _LISTED)
        elif kind == _STRING:
            self.text(name)
        else:
            self.number(name, _SCALARS[kind])
        if not is_listed:
            del self.fields[before:]


_KEY_VALUES: tuple[object, ...] = (
    *(0, 1, 3, 7, (1 << 31) - 1, 0.0, -1.0, 0.5, 1e-45, 3e38, float("inf"), float("nan")),
    *(True, False, "", "none", "x" * 300, [0], [0.5], ["x"], [3, 3], [[1], [2]]),
    *(Number(5, "i", -1), Number(11, "q", -(1 << 62)), Number(10, "Q", (1 << 63) - 1)),
    *(Number(0, "B", 255), Number(12, "d", 1e300), Number(12, "d", -1e-300)),
)
"""Values of every kind, for any key."""


def gguf_key_cases(path: Path) -> Iterator[Case]:
    """Put values of every kind into each key of each family, and leave each out."""
    for architecture, (metadata, write) in SAMPLES.items():
        for key in metadata:
            if key.startswith("tokenizer."):
                continue
            kept = {name: value for name, value in metadata.items() if name != key}
            yield Case(f"{architecture}: no {key}", partial(_content, write, path, kept))
            for value in _KEY_VALUES:
                changed = {**metadata, key: value}
                name = f"{architecture}: {key} = {value!r:.60}"
                yield Case(name, partial(_content, write, path, changed))


def _content(
    write: Callable[[Path, dict[str, object]], Path], path: Path, metadata: dict[str, object]
) -> bytes:
    return write(path, metadata).read_bytes()


def safetensors_cases(path: Path) -> Iterator[Case]:
    """Put values of every JSON type into each field of two tensors' entries, and damage the frame."""
    data = (TinyLlama.save(path).path / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    for number in _INTEGERS:
        raw = (number & ((1 << 64) - 1)).to_bytes(8, "little")
        yield Case(f"header length = {number}", raw + data[8:])
    for cut in (0, 1, 7, 8, 9, 8 + length // 2, 8 + length, len(data) - 1):
        yield Case(f"{cut} bytes", data[:cut])
    names = [name for name in header if name != "__metadata__"][:2]
    for name, value in product((*names, "__metadata__", "a new tensor"), _JSON_VALUES):
        yield _safetensors({**header, name: value}, body, f"{name} = {value!r:.60}")
    for name in names:
        for field, value in _entry_values(header[name]):
            changed = {**header, name: {**header[name], field: value}}
            yield _safetensors(changed, body, f"{field} of {name} = {value!r:.60}")
    scalar = json.dumps({"tensor %d": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}})[1:-1]
    many = ", ".join(map(scalar.__mod__, range(300_000)))
    text = f"{json.dumps(header)[:-1]}, {many}}}".encode()
    yield Case("300,000 tensors more", struct.pack("<Q", len(text)) + text + body)
    empty = {"dtype": "F32", "shape": [0, 64], "data_offsets": [0, 0]}
    yield _safetensors({**header, "model.embed_tokens.weight": empty}, body, "no embeddings")


def _entry_values(entry: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    yield from product(entry, _JSON_VALUES)
    for dtype in ("F16", "BF16", "F64", "F8_E4M3", "F4", "I64", "BOOL", "C64"):
        yield "dtype", dtype


def _safetensors(header: Mapping[str, object], body: bytes, name: str) -> Case:
    text = json.dumps(header).encode()
    return Case(name, struct.pack("<Q", len(text)) + text + body)


def config_cases(_: Path) -> Iterator[Case]:
    """Put values of every JSON type into each key of a configuration that mlx-lm reads, and leave each out."""
    optional: dict[str, object] = {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_traditional": False,
        "attention_bias": False,
        "mlp_bias": False,
        "quantization": {"group_size": 32, "bits": 4},
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": 16,
        "layer_norm_eps": 1e-5,
        "text_config": {"num_hidden_layers": 2},
        "pad_token_id": 0,
    }
    scalings: tuple[dict[str, object], ...] = (
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    )
    for key in (*CONFIG, *optional):
        for value in _JSON_VALUES:
            is_seen = type(value) is type({**optional, **CONFIG}[key])
            yield _config({**CONFIG, key: value}, f"{key} = {value!r:.60}", is_seen=is_seen)
    for key in CONFIG:
        yield _config({one: CONFIG[one] for one in CONFIG if one != key}, f"no {key}")
    for scaling in scalings:
        for key in scaling:
            for value in _JSON_VALUES:
                changed = {**CONFIG, "rope_scaling": {**scaling, key: value}}
                is_seen = type(value) is type(scaling[key])
                name = f"{scaling['rope_type']}: {key} = {value!r:.60}"
                yield _config(changed, name, is_seen=is_seen)


def _config(config: Mapping[str, object], name: str, *, is_seen: bool = True) -> Case:
    return Case(name, json.dumps(config).encode(), is_seen)


FORMATS: Mapping[str, Callable[[Path], Iterator[Case]]] = {
    "gguf": gguf_cases,
    "gguf_keys": gguf_key_cases,
    "safetensors": safetensors_cases,
    "config": config_cases,
}


def sample(cases: Iterator[Case], count: int | None, seed: int) -> list[Case]:
    """Return all cases, or so many of them."""
    found = list(cases)
    return found if count is None else random.Random(seed).sample(found, count)


def _outcome(read: Callable[[], object]) -> str:
    """Read a checkpoint; returns ``read``, ``refused``, or what is wrong with the way it was refused."""
    from machd.errors import MachdError  # noqa: PLC0415 - the program alone

    try:
        read()
    except MachdError as error:
        if error.exit_code != 2:
            return f"exit code {error.exit_code}: {error}"
        lines = str(error).splitlines()
        return "refused" if len(lines) == 1 else f"{len(lines)} lines: {error}"
    except BaseException as error:  # noqa: BLE001 - what a damaged file must not raise
        return f"{type(error).__name__}: {error}"
    return "read"


def main() -> None:
    """Read cases as the command's arguments say; two lines of JSON for each."""
    from machd.engine.loading.inspection import inspect_model  # noqa: PLC0415 - the same
    from machd.engine.loading.loader import load_model  # noqa: PLC0415 - the same
    from machd.engine.tokenizer.tokenizer import MlxTokenizer  # noqa: PLC0415 - the same

    kind, count, seed, path = sys.argv[1:]
    setattr(MlxTokenizer, "start_renderer", lambda _: None)  # noqa: B010 - a process for each case
    folder = Path(path)
    source, file = _damaged(kind, folder)
    cases = FORMATS[kind](folder / f"whole.{kind}")
    for case in sample(cases, None if count == "all" else int(count), int(seed)):
        file.write_bytes(case.written())
        sys.stdout.write(json.dumps({"case": case.name, "is_seen": case.is_seen}) + "\n")
        sys.stdout.flush()  # for a case that ends the process
        outcomes = {
            "check": _outcome(lambda: inspect_model(source, chat_template="none")),
            "load": _outcome(lambda: load_model(source, chat_template="none", dtype="float32")),
        }
        sys.stdout.write(json.dumps(outcomes) + "\n")


def _damaged(kind: str, folder: Path) -> tuple[ModelSource, Path]:
    """Return a model, and the file of it that cases replace."""
    if kind.startswith("gguf"):
        path = folder / "damaged.gguf"
        return ModelSource(SourceKind.GGUF, path, path.stem), path
    tiny = TinyLlama.save(folder / "damaged")
    names = {"safetensors": "model.safetensors", "config": "config.json"}
    return tiny.source, tiny.path / names[kind]


if __name__ == "__main__":
    main()
