"""GGUF: the formats are llama.cpp's, and a real file's types are read."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from autoq.errors import UserError
from autoq.exporters.consumers import CONSUMERS
from autoq.exporters.importers import read
from autoq.formats import reference
from autoq.formats.catalog import weight_format
from tests.conftest import gguf_file
from tests.exporters.conftest import WIDE, subject_for, with_every_format


@pytest.mark.parametrize(("name", "kind"), [("q8_0", "Q8_0"), ("q5_0", "Q5_0"), ("q4_0", "Q4_0"), ("mxfp4", "MXFP4")])
def test_blocks_hold_the_bytes_and_the_values_of_llama_cpp(name: str, kind: str) -> None:
    """llama.cpp divides by the scale before it is stored in float16: few codes are one off."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(3))
    fmt = weight_format(name)
    theirs = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType[kind])
    assert theirs.nbytes * 8 == fmt.storage_bits((64, 512))
    decoded = torch.from_numpy(np.array(gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType[kind])))
    mine = reference.fake_quantize(fmt, x)
    step = (mine - decoded).abs() > 0.02 * x.abs().amax()
    assert step.float().mean() < 0.005
    assert ((mine - x).square().sum() / (decoded - x).square().sum()).item() == pytest.approx(1, abs=0.01)


def test_names_are_those_of_the_file() -> None:
    subject = with_every_format(
        subject_for(Qwen3Config(**WIDE, vocab_size=64, num_key_value_heads=2, head_dim=64)), CONSUMERS["llama.cpp"]
    )
    files = CONSUMERS["llama.cpp"].write(subject)
    lines = files["tensor-types.txt"].splitlines()
    assert r"^blk\.0\.attn_q\.weight$=q8_0" in lines
    assert r"^blk\.0\.ffn_gate\.weight$=q4_0" in lines
    assert any(line.endswith("=bf16") for line in lines)
    assert len({line.partition("=")[0] for line in lines}) == len(lines) >= 42
    assert "-ctk q8_0 -ctv q4_0 -fa on" in files["quantize-and-serve.sh"]
    assert "Q5_1" in files["quantize-and-serve.sh"]  # a base that no tensor has: an override that equals it may be dropped


def test_a_file_of_known_types_is_read(tmp_path: Path) -> None:
    subject = subject_for()
    path = tmp_path / "mixed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kinds = {
        "blk.0.attn_q.weight": "Q8_0",
        "blk.0.ffn_down.weight": "Q4_0",
        "token_embd.weight": "F16",
        "blk.1.ffn_down.weight": "BF16",
    }
    for name, kind in kinds.items():
        data = gguf.quants.quantize(np.zeros((32, 64), np.float32), gguf.GGMLQuantizationType[kind])
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    kind, found = read(path, None, subject)
    assert (kind, found.problems) == ("gguf", ())
    assert {n: f.name for n, f in found.weights.items()} == {
        "model.layers.0.self_attn.q_proj": "q8_0", "model.layers.0.mlp.down_proj": "q4_0",
    }  # fmt: skip


def test_types_that_autoq_has_no_word_for_are_told() -> None:
    _, found = read(gguf_file(), None, subject_for())
    assert any("q4_1" in problem and "no format of autoq" in problem for problem in found.problems)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"no gguf")
    with pytest.raises(UserError, match="cannot be read as GGUF"):
        read(path, None, subject_for())
    with pytest.raises(UserError, match="there is no GGUF file"):
        read(tmp_path / "missing.gguf", None, subject_for())
