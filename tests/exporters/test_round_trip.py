"""What every consumer that can be read back is given, it gives back: by its own matching rules, on every format that it has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import GPT2Config, MixtralConfig

from autoq.exporters import hf_quant_config
from autoq.exporters.consumers import CONSUMERS
from autoq.exporters.documents import parse, to_json, to_yaml
from autoq.exporters.fitting import fit
from autoq.exporters.importers import READERS
from autoq.formats.catalog import WEIGHT_FORMATS
from autoq.formats.format import IntElement
from tests.conftest import llama_config
from tests.exporters.conftest import WIDE, subject_for, with_every_format

READABLE = [name for name, consumer in CONSUMERS.items() if consumer.read is not None]


@pytest.mark.parametrize("name", READABLE)
def test_every_format_comes_back(name: str) -> None:
    consumer = CONSUMERS[name]
    subject = with_every_format(subject_for(), consumer)
    fitted, losses = fit(subject, consumer)
    assert not losses
    assert consumer.read is not None
    found = consumer.read(consumer.write(fitted), subject)
    assert found.problems == ()
    assert found.weights == {layer.name: layer.format for layer in subject.quantized}
    if consumer.caches and name != "llama.cpp":  # its cache is a matter of flags
        assert {n: pair for n, pair in found.caches.items() if not all(f.is_original for f in pair)} == {
            a.name: (a.key, a.value) for a in subject.attentions if not a.is_original
        }


def test_hf_quant_config_comes_back_with_layers_of_the_cache_left_out() -> None:
    subject = with_every_format(subject_for(), CONSUMERS["tensorrt-llm"])
    caches = {a.name: (a.key, a.value) for a in subject.attentions}
    first = subject.attentions[0]
    caches[first.name] = (subject.attentions[-1].key.__class__("bf16", WEIGHT_FORMATS["bf16"]),) * 2
    subject = subject.with_formats({}, caches)
    document = hf_quant_config.document(subject)
    assert document is not None
    assert document["quantization"]["kv_cache_schema_version"] == 1
    found = hf_quant_config.read({"hf_quant_config.json": to_json(document)}, subject)
    assert found.problems == ()
    assert found.weights == {layer.name: layer.format for layer in subject.quantized}
    assert {n for n, (k, _) in found.caches.items() if not k.is_original} == {a.name for a in subject.attentions[1:]}


def test_formats_of_others_are_built_from_their_numbers() -> None:
    """A published checkpoint with 6-bit groups of 16 is priced too, though no format of autoq has that name."""
    subject = subject_for()
    config = {
        "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 6, "group_size": 16, "symmetric": True}}},
        "ignore": ["lm_head"],
    }
    found = READERS["compressed-tensors"]({"config.json": json.dumps(config)}, subject)
    assert found.problems == ()
    (fmt,) = set(found.weights.values())
    assert (fmt.element, fmt.block, fmt.rule) == (IntElement(6), 16, "half_step")
    assert fmt.storage_bits((4, 256)) == 4 * 256 * 7
    assert "lm_head" not in found.weights


DAMAGE: dict[str, tuple[Any, str]] = {
    "modelopt": (lambda d: d["quantize"]["quant_cfg"].append({"quantizer_name": "model.layers.9.mlp.up_proj.weight_quantizer", "cfg": {"num_bits": 8}}), "matches nothing"),
    "llm-compressor": (lambda d: d["autoq_stage"]["autoq_modifiers"]["QuantizationModifier"]["config_groups"]["fp8"]["targets"].append("model.layers.9.mlp.up_proj"), "matches nothing"),
    "compressed-tensors": (lambda d: d["quantization_config"]["config_groups"]["group_1"]["targets"].append(d["quantization_config"]["config_groups"]["group_0"]["targets"][0]), "is a target of"),
    "auto-round": (lambda d: d.update({"model.layers.9.mlp": {"bits": 4}}), "matches nothing"),
    "gptqmodel": (lambda d: d["dynamic"].update({r"+:model\.layers\.0\..*": {"bits": 8}}), "is matched by"),
    "torchao": (lambda d: d["_data"]["fqn_to_config"].update({"re:.*experts.*": None}), "matches nothing"),
    "mlx": (lambda d: d["quantization"].update({"model.layers.9.mlp.up_proj": {"bits": 4}}), "matches nothing"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_unused_and_doubly_matched_keys_are_told(name: str) -> None:
    consumer = CONSUMERS[name]
    subject = with_every_format(subject_for(), consumer)
    files = consumer.write(subject)
    file = next(iter(files))
    data = parse(file, files[file])
    change, words = DAMAGE[name]
    change(data)
    assert consumer.read is not None
    found = consumer.read({file: to_json(data) if file.endswith(".json") else to_yaml(data)}, subject)
    assert any(words in told for told in (*found.problems, *found.notes)), found


@pytest.mark.parametrize("name", CONSUMERS)
def test_experts_and_conv1d_are_never_lost_in_silence(name: str) -> None:
    """A layout that a consumer does not reach stays in 16 bit, is told, and is not in what is written."""
    consumer = CONSUMERS[name]
    if consumer.weights is None:
        return
    small = {"vocab_size": 64, "max_position_embeddings": 64}
    mixtral = MixtralConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        **small,
    )
    gpt2 = GPT2Config(n_embd=128, n_layer=1, n_head=2, vocab_size=64, n_positions=64)
    for config in (mixtral, gpt2):
        subject = subject_for(config)
        fmt = consumer.formats()[0]
        subject = subject.with_formats({layer.name: fmt for layer in subject.layers if layer.unit}, {})
        fitted, losses = fit(subject, consumer)
        odd = [layer for layer in subject.layers if layer.layout not in consumer.layouts and layer.unit]
        assert {loss.what for loss in losses} == {layer.unit for layer in odd}
        assert all(layer.format.is_original for layer in fitted.layers if layer.name in {o.name for o in odd})
        consumer.write(fitted)


def test_a_recipe_as_modelopt_ships_it_is_read() -> None:
    """Globs, entries for a class of parents, effective_bits, and the last match wins."""
    subject = subject_for()
    recipe = {
        "metadata": {"recipe_type": "ptq"},
        "quantize": {
            "algorithm": {"method": "awq_lite"},
            "quant_cfg": [
                {"quantizer_name": "*", "enable": False},
                {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": 8, "axis": 0, "effective_bits": 8.0}},
                {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": [4, 3], "use_constant_amax": True}},
                {"quantizer_name": "*experts*weight_quantizer", "cfg": {"num_bits": 4, "block_sizes": {-1: 64, "type": "static"}}},
                {"quantizer_name": "*lm_head*", "enable": False},
                {"parent_class": "nn.Embedding", "quantizer_name": "*", "enable": False},
            ],
        },
    }
    found = READERS["modelopt"]({"recipe.yaml": to_yaml(recipe)}, subject)
    assert found.problems == ()
    assert {f.name for f in found.weights.values()} == {"int8"}
    assert "lm_head" not in found.weights
    assert len(found.weights) == len(subject.layers) - 1
    assert {(k.name, v.name) for k, v in found.caches.values()} == {("fp8_cast", "fp8_cast")}
    assert any("awq_lite" in note for note in found.notes)
    assert any("*experts*weight_quantizer matches nothing" in note for note in found.notes)


def test_what_modelopt_quantizes_beside_weights_and_cache_is_told() -> None:
    entries = [{"quantizer_name": "*", "enable": False}, {"quantizer_name": "*self_attn.q_bmm_quantizer", "cfg": {"num_bits": 8}}]
    recipe = {"metadata": {"recipe_type": "ptq"}, "quantize": {"quant_cfg": entries}}
    found = READERS["modelopt"]({"recipe.yaml": to_yaml(recipe)}, subject_for())
    assert len(found.problems) == 6


def test_recipes_of_llm_compressor_by_the_name_of_a_scheme() -> None:
    subject = subject_for()
    for modifier in ({"targets": ["Linear"], "scheme": "W4A16"}, {"config_groups": {"W4A16": ["Linear"]}}):
        recipe = {"stage": {"modifiers": {"SmoothQuantModifier": {}, "QuantizationModifier": {**modifier, "ignore": ["lm_head"]}}}}
        found = READERS["llm-compressor"]({"recipe.yaml": to_yaml(recipe)}, subject)
        assert found.problems == ()
        assert {f.name for f in found.weights.values()} == {"int4_g128_half"}
        assert found.notes == (
            "SmoothQuantModifier changes weights before or while they are rounded: autoq rounds them as they are",
        )


def test_cache_groups_of_compressed_tensors_are_read_by_layer() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    config = {
        "config_groups": {"kv": {"targets": [r"re:.*layers\.[02]\.self_attn$"], "input_activations": scheme}},
        "ignore": ["lm_haed"],
    }
    found = READERS["compressed-tensors"]({"config.json": json.dumps({**config, "transform_config": {"R1": {}}})}, subject_for())
    assert {n: k.name for n, (k, _) in found.caches.items()} == {f"model.layers.{i}.self_attn": "fp8" for i in (0, 2)}
    assert any("queries" in note for note in found.notes)
    assert found.problems == (
        "lm_haed is ignored, and the model has no such module",
        "transform_config is set, and autoq has no format for it",
    )


def test_a_config_of_a_modelopt_checkpoint_is_read() -> None:
    config = {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": ["lm_head", "model.layers.0.self_attn"],
            "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        }
    }
    found = READERS["hf_quant_config"]({"config.json": json.dumps(config)}, subject_for())
    assert found.problems == ()
    assert {f.name for f in found.weights.values()} == {"nvfp4_w4a4"}
    assert not [n for n in found.weights if "layers.0.self_attn" in n]
    assert {k.name for k, _ in found.caches.values()} == {"fp8"}


def test_a_quantized_head_reaches_llama_cpp() -> None:
    consumer = CONSUMERS["llama.cpp"]
    subject = subject_for(llama_config(**WIDE | {"tie_word_embeddings": False}), ("lm_head",))
    subject = subject.with_formats({layer.name: WEIGHT_FORMATS["q8_0"] for layer in subject.layers}, {})
    files = consumer.write(subject)
    assert r"^output\.weight$=q8_0" in files["tensor-types.txt"]
    assert "--output-tensor-type q8_0" in files["quantize-and-serve.sh"]
