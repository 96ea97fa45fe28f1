import ml_dtypes
import numpy as np
import pytest

from rollkv.runtime.align import PromptError
from rollkv.runtime.bundle import BundleError, TableInfo
from rollkv.runtime.embedding import EmbeddingTable

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def table(folder, array, dtype, scale=1.0):
    array.tofile(folder / "t.bin")
    return EmbeddingTable(folder / "t.bin", TableInfo(file="t.bin", shape=list(array.shape), dtype=dtype, scale=scale))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scale", [1.0, 22.627416997969522, 1e-3])
def test_rows_are_those_of_the_table_in_float32_times_the_scale(tmp_path, dtype, scale):
    array = np.random.default_rng(0).standard_normal((11, 7)).astype(TYPES[dtype])
    rows = table(tmp_path, array, dtype, scale).rows([10, 0, 3, 3])
    assert rows.dtype == np.float32
    want = np.stack([array[i].astype(np.float32) * np.float32(scale) for i in (10, 0, 3, 3)])
    np.testing.assert_array_equal(rows, want)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # signalling NaNs are among them
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_number_of_sixteen_bits_widens_exactly(tmp_path, dtype):
    array = np.arange(1 << 16, dtype=np.uint16).view(TYPES[dtype]).reshape(256, 256)
    np.testing.assert_array_equal(table(tmp_path, array, dtype).rows(range(256)), array.astype(np.float32))


@pytest.mark.parametrize("token", [-1, 11, 2**40])
def test_an_id_without_a_row_is_refused(tmp_path, token):
    made = table(tmp_path, np.zeros((11, 7), np.float32), "float32")
    with pytest.raises(PromptError, match=rf"id {token} at index 1 has no row in t\.bin, allowed: 0 \.\. 10") as caught:
        made.rows([3, token])
    assert caught.value.exit_code == 2


def test_rows_belong_to_the_caller_and_no_rows_are_none(tmp_path):
    made = table(tmp_path, np.ones((11, 7), np.float32), "float32")
    made.rows([3])[:] = 5
    assert (made.rows(np.array([3], np.int32)) == 1).all()
    assert made.rows([]).shape == (0, 7)


def test_a_file_that_is_missing_or_too_short_is_named(tmp_path):
    info = TableInfo(file="t.bin", shape=[11, 7], dtype="float32", scale=1.0)
    with pytest.raises(BundleError, match=r"t\.bin: cannot be mapped as \[11, 7\] of float32: "):
        EmbeddingTable(tmp_path / "t.bin", info)
    (tmp_path / "t.bin").write_bytes(b"x" * 307)
    with pytest.raises(BundleError, match=r"t\.bin: cannot be mapped as \[11, 7\] of float32: "):
        EmbeddingTable(tmp_path / "t.bin", info)
