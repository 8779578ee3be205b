"""Load a causal language model: the bundled demo, a Hub name, a local folder, or a GGUF file."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autoq.errors import AutoqError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DEMO = "demo"
LOADED = "loaded:"  # before the class of a model that does not say where it is from
DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: `name` as given, and what transformers' from_pretrained is called with."""

    name: str
    path: str
    gguf: str | None = None

    @property
    def short_name(self) -> str:
        """A name for folders."""
        if self.name.startswith(LOADED):
            return self.name.removeprefix(LOADED)
        return Path(self.gguf or self.name).stem if self.gguf else Path(self.name).name or self.name

    def arguments(self) -> dict[str, Any]:
        return {"gguf_file": self.gguf} if self.gguf else {}


def model_source(name: str) -> ModelSource:
    """Resolve `--model`; raises UserError for a path that does not exist or is no model."""
    if name == DEMO:
        return ModelSource(DEMO, str(DEMO_FOLDER))
    if name.startswith(LOADED):
        raise UserError(
            f"the model was in memory ({name.removeprefix(LOADED)}), and did not say where it is from: give it, or say where it is, with --model"
        )
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"there is no GGUF file {name!r}")
        return ModelSource(name, str(path.parent), path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"the folder {name!r} has no config.json: it is not a transformers model")
        return ModelSource(name, name)
    if path.exists():
        raise UserError(f"{name!r} is a file, but not a .gguf: give a model folder, a GGUF file or a Hub name")
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise UserError(f"there is no model folder {name!r}")
    return ModelSource(name, name)


def load_config(source: ModelSource) -> PreTrainedConfig:
    """Return the config; raises UserError if there is none, or if the model is not a causal language model."""
    from transformers import AutoConfig

    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(source.path, **source.arguments())
        except Exception as error:
            raise UserError(f"cannot load the model {source.name!r}: {_reason(error)}") from error
    check_config(config, source)
    return config


def check_config(config: PreTrainedConfig, source: ModelSource) -> None:
    """Raise UserError for a model that is no causal language model, or quantized already."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"{source.name!r} is an encoder-decoder model ({config.model_type}): autoq searches decoder-only language models"
        )
    encoder_only = any(name.endswith("ForMaskedLM") for name in config.architectures or ())
    if encoder_only or (
        config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ):
        raise UserError(
            f"{source.name!r} is not a causal language model ({config.model_type}): autoq searches decoder-only language models"
        )
    if not source.gguf and (quantization := getattr(config, "quantization_config", None)):
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization.quant_method
        raise UserError(f"{source.name!r} is quantized already ({method}): give autoq the 16-bit checkpoint it was made from")


def empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model on the meta device: names and shapes, no weights."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers(), torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config)
        except Exception as error:
            raise UserError(f"cannot build a model from this config ({config.model_type}): {_reason(error)}") from error


def load_model(source: ModelSource, device: str, dtype: str) -> PreTrainedModel:
    """Load the weights and put the model in evaluation mode; `dtype` is a torch dtype's name or "auto"."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                source.path, dtype=_dtype(dtype, device), output_loading_info=True, **source.arguments()
            )
        except Exception as error:
            raise UserError(f"cannot load the weights of {source.name!r}: {_reason(error)}") from error
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"the weights of {source.name!r} lack {missing[0]!r} ({len(missing)} tensors): the checkpoint does not fit its config"
        )
    if source.gguf:  # decoded: these are plain weights now
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
    model.config.use_cache = False
    return model.to(device).eval()


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Load the tokenizer; raises UserError if the model has none."""
    from transformers import AutoTokenizer

    with quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(source.path, **source.arguments())
        except Exception as error:
            raise UserError(f"cannot load the tokenizer of {source.name!r}: {_reason(error)}") from error


def pick_device(device: str) -> str:
    """Resolve "auto"; raises UserError for a device this machine lacks."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device!r} cannot be used here ({_reason(error)}): try cpu or auto") from error
    if torch.device(device).type == "meta":
        raise UserError("--device meta holds no values: try cpu or auto")
    return device


def dtype_name(dtype: str, device: str) -> str:
    """Return the name of the dtype that "auto" stands for: bfloat16 where the device computes in it fast, else float32."""
    return str(_dtype(dtype, device)).removeprefix("torch.")


def gguf_type(source: ModelSource) -> str | None:
    """Return the commonest quantized tensor type of a GGUF file, or None if it holds 16-bit or 32-bit weights."""
    if not source.gguf:
        return None
    from collections import Counter

    from gguf import GGUFReader

    types = Counter(t.tensor_type.name for t in GGUFReader(Path(source.path) / source.gguf).tensors if len(t.shape) > 1)
    commonest = types.most_common(1)[0][0]
    return None if commonest in ("F32", "F16", "BF16") else commonest


def _dtype(dtype: str, device: str) -> torch.dtype:
    if dtype == "auto":
        if device != "cpu":
            return torch.bfloat16
        return torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32
    if dtype not in _DTYPES:
        raise UserError(f"--dtype {dtype!r} is unknown: choose auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _reason(error: BaseException) -> str:
    if isinstance(error, AutoqError):
        return str(error)
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 300 else words[:297] + "..."


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' own bars and notices out of ours; its errors still come through."""
    from transformers.utils import logging as transformers_logging

    level, root = transformers_logging.get_verbosity(), logging.getLogger("transformers")
    bars = transformers_logging.is_progress_bar_enabled()
    try:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(level)
        root.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
