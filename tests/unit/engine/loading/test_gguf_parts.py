"""A GGUF model that is split into files is read whole, whichever of them is given."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from unit.engine.gguf_writer import llama_metadata, tiny_gguf

from machd.engine.loading.formats.gguf.header import GgufHeader, read_gguf_header
from machd.engine.loading.formats.gguf.parts import read_parts
from machd.engine.loading.formats.gguf.reading import check_gguf
from machd.engine.loading.inspection import inspect_model
from machd.engine.loading.loader import load_model
from machd.engine.loading.source import resolve_model
from machd.errors import ModelError, ModelFormatError, ModelNotFoundError

pytestmark = pytest.mark.usefixtures("one_template_process")

_COUNT = 3


def _split(folder: Path, *, has_tensors_in_first: bool = True) -> list[Path]:
    """The tiny llama in three files, by the package ``gguf``'s own writer."""
    folder.mkdir(exist_ok=True)
    whole = read_gguf_header(tiny_gguf(folder / "whole.gguf", "Q8_0"))
    in_each = -(-len(whole.tensors) // (_COUNT if has_tensors_in_first else _COUNT - 1))
    writer = GGUFWriter(
        folder / "tiny.gguf",
        "llama",
        split_max_tensors=in_each,
        small_first_shard=not has_tensors_in_first,
    )
    for key, value in llama_metadata().items():
        adds: dict[type, Any] = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        if key != "general.architecture":
            adds[type(value)](key, value)
    data = whole.path.read_bytes()
    for tensor in whole.tensors:
        raw = np.frombuffer(data[tensor.offset : tensor.offset + tensor.size_bytes], np.uint8)
        rows = raw.reshape(*tensor.shape[:-1], -1) if len(tensor.shape) > 1 else raw.view("<f4")
        kind = GGMLQuantizationType[tensor.type_name]
        writer.add_tensor(tensor.name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole.path.rename(folder / "other.gguf")
    parts = sorted(folder.glob("tiny-*.gguf"))
    assert len(parts) == _COUNT
    return parts


def _source(path: Path) -> Any:
    return resolve_model(str(path), offline=True, cache_directory=path.parent)


@pytest.mark.parametrize("has_tensors_in_first", [True, False])
def test_split_model_answers_as_the_whole_one(
    tmp_path: Path,
    has_tensors_in_first: bool,  # noqa: FBT001 - a parameter
) -> None:
    """Given its first part or another it has every tensor, the name without the part's number, and the size of all."""
    parts = _split(tmp_path, has_tensors_in_first=has_tensors_in_first)
    whole = load_model(_source(tmp_path / "other.gguf"))
    ids = mx.array([[5, 80, 200, 33]])
    expected: Any = whole.model
    for part in (parts[0], parts[2]):
        source = _source(part)
        assert source.model_id == "tiny"
        model: Any = load_model(source).model
        assert mx.array_equal(model(ids), expected(ids))
        checked = inspect_model(source)
        assert checked.stored_bytes == inspect_model(_source(tmp_path / "other.gguf")).stored_bytes


def test_missing_part_is_named(tmp_path: Path) -> None:
    """Which file has to be fetched is in the message."""
    parts = _split(tmp_path)
    parts[1].unlink()
    for given in (parts[0], parts[2]):
        with pytest.raises(ModelNotFoundError, match=r"tiny-00002-of-00003\.gguf is missing"):
            read_parts(given)


def test_part_of_another_model_is_named(tmp_path: Path) -> None:
    """A part with the wrong number, one with tensors of another part, and a file that is no part at all."""
    parts = _split(tmp_path)
    kept = parts[1].read_bytes()
    shutil.copy(parts[2], parts[1])
    with pytest.raises(ModelFormatError, match=r"tiny-00002-of-00003\.gguf is not part 2 of 3"):
        read_parts(parts[0])
    shutil.copy(tmp_path / "other.gguf", parts[1])
    with pytest.raises(ModelFormatError, match=r"tiny-00002-of-00003\.gguf is not part 2 of 3"):
        read_parts(parts[0])
    parts[1].write_bytes(kept)
    (header,) = (read_gguf_header(parts[2]),)
    data = bytearray(parts[2].read_bytes())
    name, twin = header.tensors[0].name, read_gguf_header(parts[1]).tensors
    same = next(one.name for one in twin if len(one.name) == len(name))
    at = data.index(name.encode())
    data[at : at + len(name)] = same.encode()
    parts[2].write_bytes(data)
    with pytest.raises(ModelFormatError, match=r"tiny-00003-of-00003\.gguf belongs to another"):
        read_parts(parts[0])


def test_renamed_part_is_told_its_name(tmp_path: Path) -> None:
    """Its metadata say which part it is, and its name has to say so for the others to be found."""
    parts = _split(tmp_path)
    parts[0].rename(tmp_path / "mine.gguf")
    with pytest.raises(ModelFormatError, match=r"part 1 of 3.*-00001-of-00003\.gguf"):
        read_parts(tmp_path / "mine.gguf")


@pytest.mark.parametrize("count", [0, 1, 1001, 65535])
def test_number_of_parts_is_bounded(tmp_path: Path, count: int) -> None:
    """None and one are a whole file; more than a thousand are no model's."""
    metadata = llama_metadata(split__no=0, split__count=count)
    path = tiny_gguf(tmp_path / "tiny.gguf", "F16", metadata)
    if count <= 1:
        assert isinstance(read_parts(path), GgufHeader)
        return
    with pytest.raises(ModelFormatError, match=r"split\.count"):
        read_parts(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__type": "adapter"}, r"LoRA adapter.*\[adapters\.NAME\]"),
        ({"general__type": "imatrix", "general__architecture": None}, "importance matrix"),
        ({"general__type": "mmproj"}, "give the file of the language model"),
        ({"general__architecture": "clip"}, "give the file of the language model"),
    ],
)
def test_file_that_is_no_model_is_refused_by_what_it_is(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    """A person learns what the file is, and which one to give instead."""
    path = tiny_gguf(tmp_path / "x.gguf", "F16", llama_metadata(**changes))
    with pytest.raises(ModelError, match=message):
        check_gguf(read_gguf_header(path))


def test_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    """Check refuses it, too: it computes nothing that would notice."""
    metadata = llama_metadata(llama__attention__key_length=16, llama__attention__head_count_kv=1)
    source = _source(tiny_gguf(tmp_path / "x.gguf", "Q8_0", metadata))
    for read in (inspect_model, load_model):
        with pytest.raises(ModelFormatError, match=r"attn_k\.weight of the shape \(32, 64\)"):
            read(source)


def test_names_that_are_twice_are_refused(tmp_path: Path) -> None:
    """Of two values or two tensors of one name the last would win in silence."""
    path = tiny_gguf(tmp_path / "x.gguf", "F16")
    data = path.read_bytes()
    for one, other in (
        (b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"),
        (b"llama.block_count", b"llama.rope.freq_a"),
    ):
        changed = data.replace(one, other)
        if other not in data:
            changed = data.replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id")
        path.write_bytes(changed)
        with pytest.raises(ModelFormatError, match="twice"):
            read_gguf_header(path)
