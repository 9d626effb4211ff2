"""A CPU tensor as bytes: every dtype and every way to lie in memory arrives as it was."""

import json

import pytest
import torch
from dtorch_file_store.tensors import Layout, compact, read, read_back, write

from dtorch_core import UnsupportedTensorError
from dtorch_core._copies import plain
from dtorch_core.testing._group_base import all_dtypes, of_dtype


def memory_of(layout):
    """Bytes of which none is right before it was written."""
    return torch.full((layout.nbytes,), 0xAB, dtype=torch.uint8)


def carried(tensor):
    """What a reader gets, in memory that spans just its bytes."""
    layout = compact(tensor)
    memory = memory_of(layout)
    write(tensor, layout, memory)
    return read(Layout.from_json(json.loads(json.dumps(layout.to_json()))), memory)


def bits_of(tensor):
    """In the order of the elements."""
    return plain(tensor).view(-1).view(torch.uint8).tolist()


def complex_values(*shape):
    count = torch.Size(shape).numel()
    return torch.complex(torch.arange(1.0, count + 1), torch.arange(100.0, count + 100)).reshape(shape)


BASE = torch.arange(120.0).reshape(4, 5, 6)

VIEWS = {
    "contiguous": BASE,
    "0-dim": torch.arange(9)[7],
    "empty": torch.empty(0),
    "empty in the middle": torch.empty(3, 0, 2).transpose(0, 2),
    "transposed": BASE.transpose(0, 2),
    "permuted": BASE.permute(2, 0, 1),
    "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "rows left out": BASE[1:3],
    "sliced with steps": BASE[::2, 1::3, ::4],
    "transposed and sliced": BASE.transpose(0, 1)[:, 1:, 2::2],
    "one column": BASE[:, 2, 3],
    "expanded": BASE[:, :1].expand(4, 7, 6),
    "expanded in front": BASE[0].expand(3, 5, 6),
    "expanded with gaps": BASE[:, ::2, None, ::3].expand(4, 3, 9, 2),
    "expanded 0-dim": torch.arange(9)[7].expand(4, 4),
    "overlapping windows": torch.arange(40.0).unfold(0, 8, 2),
    "overlapping and expanded": torch.arange(40.0).unfold(0, 8, 2).expand(3, 17, 8),
    "view of a large storage": torch.arange(1_000_000)[700_000:700_010],
    "sizes of one with odd strides": BASE.as_strided((1, 5, 1, 6), (999, 6, 77, 1)),
    "conjugate": complex_values(3, 4).conj(),
    "conjugate, sliced": complex_values(3, 4).conj()[1:, ::2],
    "conjugate, transposed": complex_values(3, 4).t().conj(),
    "conjugate, expanded": complex_values(1, 4).conj().expand(3, 4),
    "conjugate, overlapping": complex_values(9).conj().unfold(0, 6, 1),
    "conjugate, 0-dim": complex_values(9).conj()[4],
    "negative": complex_values(3, 4).conj().imag,
    "negative, expanded": complex_values(1, 4).conj().imag.expand(3, 4),
    "real part": complex_values(3, 4).real,
    "requires grad": torch.arange(6.0, requires_grad=True),
    "requires grad, transposed": torch.arange(6.0, requires_grad=True).view(2, 3).t(),
}

every_view = pytest.mark.parametrize("tensor", VIEWS.values(), ids=VIEWS.keys())


class TestValues:
    @every_view
    def test_values_arrive(self, tensor):
        got = carried(tensor)
        assert got.dtype == tensor.dtype
        assert got.shape == tensor.shape
        assert torch.equal(got, tensor)
        assert not got.is_conj() and not got.is_neg() and not got.requires_grad

    @every_view
    def test_only_addressed_bytes_are_stored(self, tensor):
        places = set(torch.arange(10**6).as_strided(tensor.shape, tensor.stride()).flatten().tolist())
        assert compact(tensor).nbytes == len(places) * tensor.element_size()

    @every_view
    def test_reader_sees_the_memory_itself(self, tensor):
        layout = compact(tensor)
        memory = memory_of(layout)
        got = read(layout, memory)
        assert got.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        assert got.untyped_storage().nbytes() == layout.nbytes

    @pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
    @pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
    def test_every_dtype_arrives(self, dtype):
        flat = of_dtype(0, dtype, "cpu")
        for tensor in (flat, flat.view(2, 3).t(), flat[1::2], flat[0], flat[:3].expand(4, 3)):
            got = carried(tensor)
            assert got.dtype == dtype and got.shape == tensor.shape
            assert bits_of(got) == bits_of(tensor)

    def test_dtype_without_kernels_arrives(self):
        tensor = torch.arange(6, dtype=torch.uint8).view(torch.uint3).view(2, 3).t()
        got = carried(tensor)
        assert got.dtype == torch.uint3
        assert got.view(torch.uint8).tolist() == [[0, 3], [1, 4], [2, 5]]

    def test_complex_half_conjugate_arrives(self):
        tensor = torch.view_as_complex(torch.arange(8).to(torch.float16).view(4, 2)).conj()
        assert torch.view_as_real(carried(tensor)).tolist() == [[0, -1], [2, -3], [4, -5], [6, -7]]

    def test_nan_keeps_its_bits(self):
        bits = torch.tensor([0x7FC01234, -0x3FEDCC], dtype=torch.int32)
        assert carried(bits.view(torch.float32)).view(torch.int32).tolist() == bits.tolist()


class TestLayouts:
    def test_dense_permuted_tensor_keeps_its_strides(self):
        for tensor in (VIEWS["transposed"], VIEWS["permuted"], VIEWS["channels last"]):
            assert compact(tensor).stride == tensor.stride()

    def test_expanded_dimensions_stay_expanded(self):
        assert compact(VIEWS["expanded with gaps"]).stride == (6, 2, 0, 1)

    def test_gaps_are_closed_in_order(self):
        assert compact(VIEWS["sliced with steps"]).stride == (4, 2, 1)

    def test_view_is_described_where_it_lies(self):
        memory = torch.arange(960, dtype=torch.int64).to(torch.uint8)
        tensor = memory.view(torch.int64).view(12, 10)[2:7, 1::3].t()
        layout = Layout.of_view(tensor)
        assert layout == Layout("int64", (3, 5), (3, 10), (2 * 3 + 4 * 10 + 1) * 8)
        first = tensor.storage_offset() * 8
        assert torch.equal(read(layout, memory[first : first + layout.nbytes]), tensor)

    def test_memory_may_be_longer_than_the_tensor(self):
        tensor = torch.arange(10)
        memory = torch.zeros(128, dtype=torch.uint8)
        write(tensor, compact(tensor), memory)
        assert torch.equal(read(compact(tensor), memory), tensor)
        assert not memory[80:].any()

    def test_unknown_dtype_is_refused_by_name(self):
        for name in ("float3_e9", "quint8", "load", "__dict__"):
            with pytest.raises(UnsupportedTensorError, match=f"dtype {name} came from another process"):
                read(Layout(name, (4,), (1,), 4), torch.zeros(4, dtype=torch.uint8))


class TestReadBack:
    @every_view
    def test_values_written_by_a_consumer_come_back(self, tensor):
        if tensor.requires_grad:
            tensor = tensor.detach()

        owned = tensor.clone(memory_format=torch.preserve_format) if 0 not in tensor.stride() else tensor.contiguous()
        target = torch.zeros_like(owned).conj() if tensor.is_conj() else torch.zeros_like(owned)
        layout = compact(target)
        memory = memory_of(layout)
        write(target, layout, memory)
        read(layout, memory).copy_(tensor)
        read_back(layout, memory, target)
        assert torch.equal(target, tensor)

    def test_windows_and_expanded_dimensions_are_written(self):
        for base, view in ((torch.zeros(40), lambda b: b.unfold(0, 8, 2)), (torch.zeros(6), lambda b: b.expand(4, 6))):
            target = view(base)
            layout = compact(target)
            memory = memory_of(layout)
            write(target, layout, memory)
            memory.view(torch.float32).copy_(torch.arange(base.numel()))
            read_back(layout, memory, target)
            assert base.tolist() == list(range(base.numel()))

    def test_leaf_that_requires_grad_is_written(self):
        target = torch.zeros(4, requires_grad=True)
        layout = compact(target)
        memory = torch.arange(4.0).view(torch.uint8)
        read_back(layout, memory, target)
        assert target.tolist() == [0, 1, 2, 3]

    def test_gaps_of_the_target_are_left_alone(self):
        base = torch.arange(10.0)
        layout = compact(base[::2])
        read_back(layout, torch.arange(50.0, 55.0).view(torch.uint8), base[::2])
        assert base.tolist() == [50, 1, 51, 3, 52, 5, 53, 7, 54, 9]

    def test_gaps_of_windows_that_overlap_are_left_alone(self):
        base = torch.arange(17.0)
        target = base.as_strided((5, 5), (2, 2))
        layout = compact(target)
        assert layout.nbytes == 17 * 4
        memory = memory_of(layout)
        write(target, layout, memory)
        base[1::2] = -1
        read_back(layout, memory, target)
        assert base.tolist() == [-1 if index % 2 else index for index in range(17)]
