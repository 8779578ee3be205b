"""vLLM on a CPU: serve checkpoints and cache dtypes one after another, and the KL of their prompt log-probabilities to the original's.

What was refused is served again with plain torch in place of the kernels that the processor lacks (see stand_ins.py).
"""

from __future__ import annotations

import gc
import os

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
os.environ.update(ENVIRONMENT)  # before vllm is imported

from typing import Any

import stand_ins
import torch
from divergence import kl, read_job, write_result
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def log_probabilities(model: str, ids: list[list[int]], dtype: str, skipped: list[str]) -> torch.Tensor:
    """Return float32 [sequences, tokens - 1, vocabulary]; attention reads K and V from the cache, in a prompt too."""
    length = len(ids[0])
    llm = LLM(
        model=model, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=length + 1, max_num_seqs=8,
        max_num_batched_tokens=1024, max_logprobs=-1, enable_prefix_caching=False, kv_cache_dtype=dtype,
        kv_cache_dtype_skip_layers=skipped, disable_log_stats=True, seed=0,
    )  # fmt: skip
    try:
        vocabulary = llm.llm_engine.model_config.get_vocab_size()
        asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1, flat_logprobs=True, detokenize=False)
        done = llm.generate([{"prompt_token_ids": row} for row in ids], asked, use_tqdm=False)
        return torch.stack([_table(one.prompt_logprobs, vocabulary) for one in done])
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def _table(flat: Any, vocabulary: int) -> torch.Tensor:
    spans = list(zip(flat.start_indices, flat.end_indices, strict=True))[1:]  # the first token has no probability
    tokens, values = torch.tensor(flat.token_ids), torch.tensor(flat.logprobs, dtype=torch.float32)
    out = torch.full((len(spans), vocabulary), float("nan"))
    for row, (start, stop) in zip(out, spans, strict=True):
        row[tokens[start:stop]] = values[start:stop]
    return out


job = read_job()
original = log_probabilities(job["model"], job["ids"], "auto", [])


def serve(one: dict[str, Any]) -> dict[str, Any]:
    try:
        changed = log_probabilities(one["model"], job["ids"], one["kv_cache_dtype"], one["skip_layers"])
        return {"kl": kl(original, changed)}
    except Exception as error:
        cleanup_dist_env_and_memory()
        gc.collect()
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"}


plain = {name: serve(one) for name, one in job["serve"].items()}
stand_ins.install()
again = {name: serve(one) for name, one in job["serve"].items() if "error" in plain[name]}
write_result({"plain": plain, "stand_ins": again})
