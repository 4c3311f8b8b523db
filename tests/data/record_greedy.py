"""Record what transformers answers greedily on the weights of a GGUF file: the reference of the tests with real models.

    python -m tests.data.record_greedy MODEL.gguf tests/data/NAME_greedy.json [--tokens 48]

The JSON file is read for its `prompts` (kind, prompt, text_in, input_ids) and written anew with their answers in
float32 and bfloat16: ids up to the end of the text, log-probabilities, and the margins by which each token was the
best. A prompt without `input_ids` is tokenized by the sentencepiece library. Nothing that decides here is this
project's: the blocks are decoded by the `gguf` package, configuration and order of rows are transformers' own. (Its
reader does the rest as well, but takes minutes.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import save_file
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, load_gguf_checkpoint

from tests.data.record_tokens import sentencepiece_of
from tgi.text.tokenizer import load_tokenizer

NOTE = (
    "margin = top1-top2 logit gap; a divergence is legitimate only where the reference margin is small "
    "(<0.3 bf16, <0.01 fp32)"
)
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def write_checkpoint(model: Path, directory: Path) -> None:
    """The GGUF file as transformers' own checkpoint: config.json and float32 weights."""
    described = load_gguf_checkpoint(model)["config"]
    config = transformers.AutoConfig.for_model(**described)
    config.save_pretrained(directory)
    reader = gguf.GGUFReader(model)
    architecture = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(described)
    spelled = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    stored = {tensor.name: tensor for tensor in reader.tensors}
    with torch.device("meta"):
        wanted = list(transformers.AutoModelForCausalLM.from_config(config).state_dict())
    weights: dict[str, torch.Tensor] = {}
    for name in wanted:
        own = f"{spelled.get_name(name.removesuffix('.weight'))}.weight"
        if own not in stored:
            continue  # a head tied to the embedding; transformers reports any other
        values = gguf.dequantize(stored[own].data, stored[own].tensor_type)
        weights[name] = torch.from_numpy(processor.process(values, own).weights.copy())
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@torch.inference_mode()
def answer(model: Any, prompt: list[int], tokens: int, eos: int) -> dict[str, list[Any]]:
    ids: list[int] = []
    logprobs: list[float] = []
    margins: list[float] = []
    step, cache = torch.tensor([prompt]), None
    while len(ids) < tokens and ids[-1:] != [eos]:
        output = model(step, past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[0, -1].float()
        best, second = logits.topk(2).values.tolist()
        ids.append(int(logits.argmax()))
        logprobs.append(round(logits.log_softmax(-1)[ids[-1]].item(), 5))
        margins.append(round(best - second, 4))
        step = torch.tensor([ids[-1:]])
    return {"ids": ids, "logprobs": logprobs, "margin": margins}


def record(path: Path, prompts: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """The prompts, each with its answers."""
    tokenizer = load_tokenizer(path)  # makes the answers readable, no more
    entries = [
        {name: prompt[name] for name in ("kind", "prompt", "text_in")}
        | {"input_ids": prompt.get("input_ids") or sentencepiece_of(path).encode(prompt["text_in"], add_bos=True)}
        for prompt in prompts
    ]
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(path, Path(directory))
        for label, dtype in FORMATS.items():
            model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
            for entry in entries:
                found = answer(model, entry["input_ids"], tokens, model.config.eos_token_id)
                entry[label] = {"ids": found["ids"], "text": tokenizer.decode(found["ids"]), **found}
                print(label, entry["prompt"], "->", entry[label]["text"])
    for entry in entries:
        pairs = zip(*(entry[label]["ids"] for label in FORMATS))
        entry["first_diff"] = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=64, help="at most so many tokens an answer")
    arguments = parser.parse_args()
    given = json.loads(arguments.file.read_text())
    recorded = {
        "model": given["model"],
        "gguf_sha256": hashlib.sha256(arguments.model.read_bytes()).hexdigest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "note": NOTE,
        "prompts": record(arguments.model, given["prompts"], arguments.tokens),
    }
    arguments.file.write_text(json.dumps(recorded))


if __name__ == "__main__":
    main()
