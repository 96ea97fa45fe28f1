"""The one mapping of the weight file: what it reads from an .onnx, how often the file is mapped, damaged graphs."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor

from rollkv.runtime.bundle import open_bundle
from rollkv.runtime.weights import MappedWeights, stored_tensors

MAPS = """
import sys
from rollkv.runtime.backend import OrtBackend
from rollkv.runtime.bundle import open_bundle
backend = OrtBackend(open_bundle(sys.argv[1]), threads=1, memory=sys.argv[2])
print(sum(line.rstrip().endswith("weights.bin") for line in open("/proc/self/maps")))
"""


@pytest.fixture
def made(bundle):
    return bundle("llama", chunk_size=(4, 8))


def graphs(made):
    return [made.path / graph.file for graph in made.manifest.graphs]


def test_every_tensor_is_found_with_the_numbers_that_onnx_reads(made):
    weights = MappedWeights(made.path / "weights.bin")
    for file in graphs(made):
        outside = [t for t in onnx.load(file, load_external_data=False).graph.initializer if t.data_location]
        found = weights.of(file)
        assert sorted(found) == sorted(t.name for t in outside)
        for tensor in outside:
            load_external_data_for_tensor(tensor, str(made.path))
            assert np.array_equal(found[tensor.name], numpy_helper.to_array(tensor))
            assert not found[tensor.name].flags.writeable or found[tensor.name].nbytes < 1 << 16


def test_pages_that_were_let_go_come_back(made):
    weights = MappedWeights(made.path / "weights.bin")
    before = {name: array.copy() for name, array in weights.of(graphs(made)[0]).items()}
    weights.release()
    for name, array in weights.of(graphs(made)[0]).items():
        assert np.array_equal(array, before[name])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="lists of mappings are Linux's")
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_three_graphs_map_the_weight_file_once(made, memory):
    out = subprocess.run(
        [sys.executable, "-c", MAPS, str(made.path), memory], capture_output=True, text=True, check=True
    )
    assert int(out.stdout) == 1


def test_dims_are_read_packed_or_one_by_one_and_other_tensors_are_left_to_the_engine(tmp_path):
    def tensor(name, dims, **entries):
        made = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
        for key, text in {"location": "w", "offset": "64", "length": "24", **entries}.items():
            made.external_data.add(key=key, value=text)
        return made

    tensors = [
        tensor("good", [2, 3]),
        tensor("too long for its shape", [2, 2]),
        tensor("not aligned", [2, 3], offset="66"),
        tensor("before the file", [2, 3], offset="-64"),
        numpy_helper.from_array(np.zeros(3, np.float32), "inside"),
    ]
    model = helper.make_model(helper.make_graph([], "g", [], [], tensors))
    (tmp_path / "g.onnx").write_bytes(model.SerializeToString())
    assert [(t.name, t.shape, t.offset) for t in stored_tensors(tmp_path / "g.onnx")] == [("good", (2, 3), 64)]
    one_by_one = bytes([0x08, 2, 0x08, 3])  # ONNX's own library writes them so; others pack them
    packed = bytes([0x0A, 2, 2, 3])
    data = model.SerializeToString()
    inner = tensors[0].SerializeToString()
    assert one_by_one in inner
    assert len(one_by_one) == len(packed)
    (tmp_path / "p.onnx").write_bytes(data.replace(inner, inner.replace(one_by_one, packed)))
    assert [t.shape for t in stored_tensors(tmp_path / "p.onnx")] == [(2, 3)]


def test_a_tensor_behind_the_end_of_the_file_is_left_to_the_engine(made, tmp_path):
    short = tmp_path / "weights.bin"
    short.write_bytes((made.path / "weights.bin").read_bytes()[:8192])
    ends = {t.name: t.offset + t.length for t in stored_tensors(graphs(made)[0])}
    assert set(MappedWeights(short).of(graphs(made)[0])) == {name for name, end in ends.items() if end <= 8192}
    short.write_bytes(b"")
    assert MappedWeights(short).of(graphs(made)[0]) == {}


def test_no_damage_of_a_graph_raises(made, tmp_path):
    good = graphs(made)[0].read_bytes()
    choose, file = random.Random(5), tmp_path / "g.onnx"
    for _ in range(150):
        data = bytearray(good)
        for _ in range(choose.randint(1, 6)):
            data[choose.randrange(len(data))] = choose.randrange(256)
        file.write_bytes(data[: choose.choice([len(data), choose.randrange(len(data))])])
        stored_tensors(file)
        MappedWeights(made.path / "weights.bin").of(file)


def test_a_bundle_opened_twice_has_two_mappings_of_the_same_numbers(made):
    first, second = (MappedWeights(open_bundle(made.path).path / "weights.bin").of(graphs(made)[0]) for _ in "ab")
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("first", [True, False])
def test_what_the_engine_takes_from_the_graph_is_not_taken_from_the_file(made, tmp_path, first):
    """Entries of external data count only where the tensor says so, and a name that occurs twice is the engine's."""
    file = graphs(made)[0]
    model = onnx.load(file, load_external_data=False)
    changed = model.graph.initializer[-1]
    assert changed.data_location == TensorProto.EXTERNAL
    inside = numpy_helper.from_array(np.zeros(tuple(changed.dims), np.float32), changed.name)
    tensors = list(model.graph.initializer)
    twice = [inside, *tensors] if first else [*tensors, inside]
    del model.graph.initializer[:]
    model.graph.initializer.extend(twice)
    (tmp_path / "twice.onnx").write_bytes(model.SerializeToString())
    kept = {t.name for t in stored_tensors(file)} - {changed.name}
    assert {t.name for t in stored_tensors(tmp_path / "twice.onnx")} == kept
    model = onnx.load(file, load_external_data=False)
    changed = model.graph.initializer[-1]
    changed.data_location = TensorProto.DEFAULT
    changed.raw_data = inside.raw_data
    (tmp_path / "inside.onnx").write_bytes(model.SerializeToString())
    assert {t.name for t in stored_tensors(tmp_path / "inside.onnx")} == kept
