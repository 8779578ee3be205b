"""Train the demo model that autoq ships: a small Llama on the Python standard library's documentation.

    python examples/train_demo.py OUT_DIR [--epochs 10]

Six layers, grouped-query attention (4 query heads, 2 KV heads of 64), tied embeddings, 5.2 million parameters, and a
byte-level BPE tokenizer of 4,096 entries. It learns from the profile part of the default text alone; the held-out loss
is that of the measuring part. The curve is printed and kept in OUT_DIR/training.json. About half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from autoq.model.text import documents, sequences, text_sources

LENGTH, BATCH, VOCAB, PEAK_RATE = 256, 16, 4096, 2.5e-3


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=1024, clean_up_tokenization_spaces=False
    )


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )


def rate(step: int, steps: int) -> float:
    warm, cool = 100, int(steps * 0.8)
    if step < warm:
        return (step + 1) / warm
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, cool + steps // 5 - warm))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=float, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    profile, measure = text_sources(None, None)
    texts = list(documents(profile))
    tokenizer = train_tokenizer(texts)
    stream = [t for text in texts for t in tokenizer(text + "\n\n", add_special_tokens=False, verbose=False)["input_ids"]]
    data = torch.tensor(stream)
    held_out = sequences(tokenizer, measure, 64, LENGTH)
    model = LlamaForCausalLM(config())
    total = sum(p.numel() for p in model.parameters())
    steps = int(args.epochs * len(data) / (BATCH * (LENGTH - 1)))
    print(f"{total / 1e6:.2f}M parameters, {len(data):,} tokens of text, {steps} steps", flush=True)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: rate(s, steps))
    curve: list[dict[str, float]] = []
    start, running = time.time(), 0.0
    for step in range(steps):
        at = torch.randint(0, len(data) - LENGTH, (BATCH,))
        batch = torch.stack([torch.cat([torch.zeros(1, dtype=torch.int64), data[i : i + LENGTH - 1]]) for i in at.tolist()])
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        running += loss.item()
        if (step + 1) % (steps // 24) == 0 or step + 1 == steps:
            with torch.no_grad():
                out = sum(model(b, labels=b).loss.item() for b in held_out.split(16)) / 4
            curve.append({"step": step + 1, "train": running / (step + 1 - (curve[-1]["step"] if curve else 0)), "held_out": out})
            running = 0.0
            print(
                f"step {step + 1:5d}  train {curve[-1]['train']:.3f}  held out {out:.3f}  {time.time() - start:5.0f} s", flush=True
            )
    args.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "training.json").write_text(json.dumps({"parameters": total, "curve": curve}, indent=1) + "\n")


if __name__ == "__main__":
    main()
