"""Marlin's layout against a straight statement of it; its kernel runs on a GPU only, see test_on_gpu.py."""

import pytest
import torch

from spec_trl.quantization.kernels import LayerSpec, QuantizedRows, marlin_humming
from spec_trl.quantization.kernels.marlin_humming import MarlinInt4, marlin_int4_mm


def repacked(codes):
    """gptq_marlin_repack_kernel, thread by thread: warp w's thread t writes word 4 t + w of its tile."""
    rows, columns = codes.shape
    words = torch.zeros(columns // 16, 2 * rows, dtype=torch.int64)
    for column_tile in range(columns // 16):
        for row_tile in range(rows // 64):
            for warp in range(4):
                for thread in range(32):
                    row = row_tile * 64 + warp * 16 + thread // 4
                    column = column_tile * 16 + thread % 4 * 2
                    values = [int(codes[r, column + o]) for r in (row, row + 8) for o in (0, 1, 8, 9)]
                    word = sum(values[v] << 4 * i for i, v in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
                    words[column_tile, row_tile * 128 + thread * 4 + warp] = word
    return words


@pytest.mark.parametrize("shape", [(64, 128, 64), (100, 64, 32), (70, 128, 32)])
def test_what_is_stored(shape):
    torch.manual_seed(0)
    layer, out = LayerSpec(*shape[:2], 4, shape[2], torch.bfloat16, None, torch.device("cpu")), shape[0]
    packed = MarlinInt4(layer)
    codes = torch.randint(0, 16, shape[:2], dtype=torch.int32)
    scales = torch.rand(out, layer.groups).bfloat16()
    zeros = torch.randint(0, 16, (out, layer.groups)).bfloat16()
    for first in range(0, out, 64):
        block = slice(first, first + 64)
        packed.pack_(first, QuantizedRows(codes[block].clone(), scales[block], zeros[block]))
    stored = packed.scales.shape[1]
    assert (stored % 64, shape[1] % 128) == (0, 0) or (stored % 128, shape[1] % 64) == (0, 0)
    padding = stored - out
    assert torch.equal(packed.codes.long() & 0xFFFFFFFF, repacked(torch.nn.functional.pad(codes, (0, 0, 0, padding))))
    # Of 64 rows, row 8 j + i is at place 8 i + j; zero points too, and then eight make a word: 0 2 4 6 1 3 5 7.
    for row in range(out):
        place = row // 64 * 64 + row % 8 * 8 + row % 64 // 8
        nibble = (0, 4, 1, 5, 2, 6, 3, 7)[place % 8]
        assert torch.equal(packed.scales[:, place], scales[row])
        assert torch.equal(packed.zeros[:, place // 8] >> 4 * nibble & 15, zeros[row].int())
    padded = [place for place in range(stored) if place // 64 * 64 + place % 8 * 8 + place % 64 // 8 >= out]
    assert len(padded) == padding and not packed.scales[:, padded].any()


def test_the_operator_has_a_shape_without_a_gpu():
    with torch._subclasses.FakeTensorMode():
        x, scales = torch.empty(3, 256, dtype=torch.bfloat16), torch.empty(2, 128, dtype=torch.bfloat16)
        codes, zeros = torch.empty(16, 256, dtype=torch.int32), torch.empty(2, 16, dtype=torch.int32)
        y = marlin_int4_mm(x, codes, scales, zeros, torch.empty(128, dtype=torch.int32))
    assert y.shape == (3, 128) and y.dtype == torch.bfloat16


def test_sources_are_copied_and_completed_once(tmp_path, monkeypatch):
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "kernel.h").write_text("// a header")
    generator = installed / "generate_kernels.py"
    generator.write_text("open('kernel_bf16_a.cu', 'w').write('made')")
    copied = marlin_humming.copy_sources(installed, tmp_path / "cache" / "source")
    assert (copied / "kernel.h").exists() and (copied / "kernel_bf16_a.cu").read_text() == "made"
    assert sorted(file.name for file in installed.iterdir()) == ["generate_kernels.py", "kernel.h"]
    generator.write_text("raise SystemExit('broken')")
    assert marlin_humming.copy_sources(installed, copied) == copied  # not made again
    with pytest.raises(RuntimeError, match="the generator of .* failed: broken"):
        marlin_humming.copy_sources(installed, tmp_path / "other" / "source")
    assert not list((tmp_path / "other").iterdir())
    monkeypatch.setattr(marlin_humming, "is_foreign", lambda folder: folder == tmp_path)
    with pytest.raises(RuntimeError, match="another user owns .*cache"):
        marlin_humming.copy_sources(installed, copied)
