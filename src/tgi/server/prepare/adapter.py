"""A LoRA adapter of the PEFT library and its base model -> one model in the adapter's folder: W + scale · B A.

Knows the adapter's files and the names in them; reads one file of the base at a time.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from tgi.errors import StartupError
from tgi.model_files import ADAPTER, SAFETENSORS, read_index
from tgi.server.prepare.pickles import read_pickle
from tgi.server.prepare.staging import staged

# What the base brings where the adapter's folder has none of its own.
_OF_BASE = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_PREFIX = "base_model.model."
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?:\.default)?(?:\.weight)?")
# Settings under which W + scale · B A is not what the adapter means, and the values that ask for nothing.
_UNSUPPORTED = {"use_dora": (False, None), "layer_replication": (None, [])}
# Ways to begin that take the adapter's start out of the base's weights, which are then others than the base's own.
_CHANGING_BASE = ("pissa", "olora", "corda", "loftq")
# Families whose linear layers (but for the head) keep their weight [in, out]; PEFT goes by the layer as well, whatever
# fan_in_fan_out says.
_TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    base: str
    base_revision: str | None
    rank: int
    alpha: float
    alpha_pattern: Mapping[str, float]  # by the end of a module's name
    rank_pattern: Mapping[str, int]
    by_root: bool  # scale alpha / √rank

    def scale(self, module: str) -> float:
        rank = _of_module(self.rank_pattern, module, self.rank)
        return _of_module(self.alpha_pattern, module, self.alpha) / (rank**0.5 if self.by_root else rank)


@dataclass(frozen=True, slots=True)
class Adapter:
    config: AdapterConfig
    low_rank: Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # weight name -> A, B as they multiply: delta = B A
    whole: Mapping[str, torch.Tensor]  # weight name -> what replaces it


def read_adapter(folder: Path) -> AdapterConfig:
    """adapter_config.json. Raises StartupError naming what is no LoRA, or a kind of LoRA that is not supported."""
    file = folder / ADAPTER
    try:
        values = json.loads(file.read_bytes())
        kind = values.get("peft_type")
        if kind != "LORA":
            raise StartupError(f"{file}: adapters of type {kind} cannot be merged, only LORA. Choose another model")
        for name, neutral in _UNSUPPORTED.items():
            if values.get(name) not in neutral:
                raise StartupError(
                    f"{file}: {name} = {values[name]!r} cannot be merged. Merge it with PEFT and serve that"
                )
        start = values.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(_CHANGING_BASE):
            raise StartupError(
                f"{file}: init_lora_weights = {start!r} changes the base's weights, so it cannot be merged. Save it "
                "with PEFT's path_initial_model_for_weight_conversion"
            )
        base = values["base_model_name_or_path"]
        if not isinstance(base, str) or not base:
            raise StartupError(f"{file} names no base model. Write its id into base_model_name_or_path")
        return AdapterConfig(
            base=base,
            base_revision=values.get("revision"),
            rank=int(values["r"]),
            alpha=float(values["lora_alpha"]),
            alpha_pattern={str(key): float(value) for key, value in (values.get("alpha_pattern") or {}).items()},
            rank_pattern={str(key): int(value) for key, value in (values.get("rank_pattern") or {}).items()},
            by_root=bool(values.get("use_rslora")),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StartupError(f"{file} is no adapter's configuration ({error}); fetch it again") from error


def merge_adapter(folder: Path, base: Path) -> None:
    """Write the merged model beside the adapter: the base's files, their weights in the base's dtype.

    Raises StartupError when the two do not belong together.
    """
    if base.is_file():
        raise StartupError(f"The base model {base} is a GGUF file, into which no adapter can be merged")
    adapter = _load_adapter(folder)
    settings = _base_config(base)
    files = sorted(SAFETENSORS.files({file.name for file in base.iterdir()}, base / SAFETENSORS.index))
    renamed, head = _names_in_base(adapter, base, files)
    transposed = settings.get("model_type") in _TRANSPOSED
    with staged(folder, first=(SAFETENSORS.index,)) as work:
        for name in files:
            tensors = _load_tensors(base / name)
            for weight in tensors.keys() & renamed.keys():
                tensors[weight] = _merged(adapter, renamed[weight], tensors[weight], transposed)
                if _is_embedding(weight):
                    settings["vocab_size"] = tensors[weight].shape[0]
            if head is not None and name == files[-1]:
                # Trained apart from the table that it was tied to.
                dtype = next(iter(tensors.values())).dtype
                tensors[head] = adapter.whole[head].to(dtype).contiguous()
                settings["tie_word_embeddings"] = False
            save_file(tensors, work / name, metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(settings, indent=1))
        _copy_beside(base, folder, work)
        if head is not None and (base / SAFETENSORS.index).is_file():
            weight_map = read_index(base / SAFETENSORS.index) | {head: files[-1]}
            (work / SAFETENSORS.index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))


def _load_adapter(folder: Path) -> Adapter:
    config = read_adapter(folder)
    safetensors, pickled = folder / "adapter_model.safetensors", folder / "adapter_model.bin"
    if not safetensors.is_file() and not pickled.is_file():
        raise StartupError(f"{folder} has no adapter_model.safetensors; fetch the adapter again")
    tensors = _load_tensors(safetensors) if safetensors.is_file() else read_pickle(pickled)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        plain = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
        found = _LORA.fullmatch(plain)
        if found is None:
            if "lora_" in plain or not plain.endswith((".weight", ".bias")):
                raise StartupError(f"{folder}: tensor {name} of the adapter cannot be merged. Merge it with PEFT")
            whole[plain.replace(".modules_to_save.default", "")] = tensor
            continue
        # An embedding's are stored the other way round: its table is [vocabulary, hidden].
        side = {"A": "B", "B": "A"}[found["side"]] if found["embedding"] else found["side"]
        value = tensor.T if found["embedding"] else tensor
        sides.setdefault(f"{found['module']}.weight", {})[side] = value
    if half := [name for name, pair in sides.items() if len(pair) != 2]:
        raise StartupError(f"{folder}: the adapter has only one of lora_A and lora_B for {half[0]}; fetch it again")
    return Adapter(config, {name: (pair["A"], pair["B"]) for name, pair in sides.items()}, whole)


def _names_in_base(adapter: Adapter, base: Path, files: list[str]) -> tuple[dict[str, str], str | None]:
    """The base's name of each weight that the adapter changes -> the adapter's name, and a head that the base has not.
    Bodies are saved with and without their outer prefix."""
    names = {name for file in files for name in _tensor_names(base / file)}
    renamed: dict[str, str] = {}
    head: str | None = None
    for wanted in (*adapter.low_rank, *adapter.whole):
        spellings = (wanted, wanted.partition(".")[2], f"model.{wanted}", f"transformer.{wanted}")
        found = next((spelling for spelling in spellings if spelling in names), None)
        if found is not None:
            renamed[found] = wanted
        elif _is_head(wanted) and wanted in adapter.whole:
            head = wanted
        else:
            raise StartupError(
                f"The base model {base} has no {wanted}, which the adapter changes. Check its base model"
            )
    return renamed, head


def _merged(adapter: Adapter, name: str, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    if name in adapter.whole:
        return adapter.whole[name].to(weight.dtype).contiguous()
    low, high = adapter.low_rank[name]
    module = name.removesuffix(".weight")
    if low.dim() != 2 or high.dim() != 2 or high.shape[1] != low.shape[0]:
        raise StartupError(f"lora_A {list(low.shape)} and lora_B {list(high.shape)} of {module} do not fit together")
    delta = (high.float() @ low.float()) * adapter.config.scale(module)
    delta = delta.T if transposed and not _is_embedding(name) and not _is_head(name) else delta
    if delta.shape != weight.shape:
        raise StartupError(
            f"The adapter's change of {module} has shape {list(delta.shape)}, the base model's weight "
            f"{list(weight.shape)}: it was made for another base model"
        )
    return (weight.float() + delta).to(weight.dtype).contiguous()


def _base_config(base: Path) -> dict[str, Any]:
    file = base / "config.json"
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{file} cannot be read ({error}); fetch it again") from error
    if not isinstance(settings, dict):
        raise StartupError(f"{file} does not hold a JSON object; fetch it again")
    quantised = settings.get("quantization_config") or settings.get("compression_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise StartupError(
            f"The base model {base} is quantised ({method}); an adapter is merged into unquantised weights only. Name "
            "the unquantised model as base_model_name_or_path in adapter_config.json"
        )
    return settings


def _copy_beside(base: Path, folder: Path, work: Path) -> None:
    """Tokenizer and templates are the adapter's where it has any, else the base's."""
    names = [*_OF_BASE, *(() if any((folder / name).is_file() for name in _TEMPLATES) else _TEMPLATES)]
    for name in names:
        if (base / name).is_file() and not (folder / name).is_file():
            shutil.copyfile(base / name, work / name)
    if (base / SAFETENSORS.index).is_file():
        shutil.copyfile(base / SAFETENSORS.index, work / SAFETENSORS.index)


def _load_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file} cannot be read ({error}); fetch it again") from error


def _tensor_names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise StartupError(f"{file} cannot be read ({error}); fetch it again") from error


def _of_module(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that fits the end of a module's name, as PEFT matches them."""
    fitting = (value for key, value in patterns.items() if re.fullmatch(rf"(?:.*\.)?(?:{key})", module))
    return next(fitting, default)


def _is_embedding(weight: str) -> bool:
    return weight.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight"))


def _is_head(weight: str) -> bool:
    return weight in ("lm_head.weight", "embed_out.weight")
