"""Loading: the demo, a folder, a GGUF file; and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autoq.errors import UserError
from autoq.model.load import DEMO_FOLDER, dtype_name, gguf_type, load_config, load_model, load_tokenizer, model_source
from autoq.model.units import find_units
from tests.conftest import build, gguf_file, llama_config


def test_the_demo_model_is_small_trained_and_knows_its_text() -> None:
    source = model_source("demo")
    model, tokenizer = load_model(source, "cpu", "float32"), load_tokenizer(source)
    parameters = sum(p.numel() for p in model.parameters())
    assert 3e6 < parameters < 6e6
    assert sum(f.stat().st_size for f in DEMO_FOLDER.iterdir()) < 12e6
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    ids = torch.tensor([tokenizer("Return a new dictionary with the keys and values of the given object.")["input_ids"]])
    with torch.no_grad():
        assert model(ids, labels=ids).loss < 5.5  # chance is log(4096) = 8.3


def test_case_21_a_gguf_is_decoded_to_plain_weights() -> None:
    path = gguf_file()
    source = model_source(str(path))
    assert gguf_type(source) == "Q4_1"
    config = load_config(source)
    model = load_model(source, "cpu", "float32")
    assert not hasattr(model.config, "quantization_config")
    assert len(find_units(model).weights) == 4 * config.num_hidden_layers
    assert load_tokenizer(source)("hello")["input_ids"]
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(5).unsqueeze(0)).logits).all()


def test_a_saved_folder_loads_with_the_dtype_asked_for(tmp_path: Path) -> None:
    build(llama_config()).save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16"):
        model = load_model(model_source(str(tmp_path)), "cpu", dtype)
        assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
        assert not model.training
    assert dtype_name("auto", "cpu") in ("float32", "bfloat16")


def test_weights_that_are_missing_or_cut_are_one_sentence(tmp_path: Path) -> None:
    model = build(llama_config())
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    stored = weights.read_bytes()
    weights.write_bytes(stored[: len(stored) // 2])
    with pytest.raises(UserError, match="cannot load the weights"):
        load_model(model_source(str(tmp_path)), "cpu", "float32")
    weights.unlink()
    with pytest.raises(UserError, match="cannot load the weights"):
        load_model(model_source(str(tmp_path)), "cpu", "float32")
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_tokenizer(model_source(str(tmp_path)))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model_type": "no-such-model"}', "{}"])
def test_a_config_that_cannot_be_read_is_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError) as caught:
        load_config(model_source(str(tmp_path)))
    assert "\n" not in str(caught.value)
