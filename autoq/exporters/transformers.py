"""transformers with autoq: a Python file that loads the model, its weights as the recipe has them, and the packed cache."""

from __future__ import annotations

from pathlib import Path

from autoq.errors import UserError
from autoq.exporters.consumer import Consumer
from autoq.exporters.subject import Subject
from autoq.model.load import LOADED, model_source

_TEXT = '''"""Generate with {model} under an autoq recipe: weights as they decode, K and V in a packed cache."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from autoq import api
from autoq.model.head import cache_argument
from autoq.model.packed_cache import QuantizedKVCache
from autoq.recipe import read_recipe

MODEL = {path!r}{remark}
RECIPE = {recipe!r}


def generate(prompt: str, new_tokens: int = 64) -> str:
    """Return the prompt with greedily generated text."""
    from pathlib import Path

    tokenizer = AutoTokenizer.from_pretrained(MODEL{gguf})
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.{dtype}{gguf}).eval()
    recipe = read_recipe(Path(RECIPE))
    inputs = tokenizer(prompt, return_tensors="pt")
    cache = QuantizedKVCache.from_recipe(recipe, model.config, max_tokens=inputs["input_ids"].shape[1] + new_tokens)
    with api.quantized(model, recipe, caches=False), torch.no_grad():
        found = model.generate(**inputs, **{{cache_argument(model): cache}}, max_new_tokens=new_tokens, do_sample=False)
    return tokenizer.decode(found[0], skip_special_tokens=True)


if __name__ == "__main__":
    print(generate("The quick brown fox"))
'''


def write(subject: Subject) -> dict[str, str]:
    """Return generate.py."""
    if subject.recipe is None:
        raise UserError("the file for transformers loads the recipe: write it first")
    if subject.model.startswith(LOADED):
        path, gguf = f"path/to/{subject.model.removeprefix(LOADED)}", ""
        remark = "  # the model was in memory: say where it is"
    else:
        source, remark = model_source(subject.model), ""
        path = str(Path(source.path).resolve()) if Path(source.path).exists() else source.path
        gguf = f", gguf_file={source.gguf!r}" if source.gguf else ""
    text = _TEXT.format(
        model=subject.model, path=path, remark=remark, recipe=str(subject.recipe.resolve()), dtype=subject.dtype, gguf=gguf
    )
    return {"generate.py": text}


CONSUMER = Consumer(
    "transformers",
    "a Python file that runs the model with autoq's weights and packed cache",
    None,
    None,
    "free",
    write,
    layouts=("linear", "conv1d", "experts", "experts_transposed"),
    notes=("weights are decoded to 16 bit when the file runs: only the cache is smaller in memory",),
)
