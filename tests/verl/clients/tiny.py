"""A Llama of 40,000 random weights, a tokenizer of words, and sums to be solved, all made here."""

import json
import random
import sys
from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def main(folder, rows_folder, changes):
    folder = Path(folder)
    if not (folder / "model" / "model.safetensors").is_file():
        _make_model(folder)
    import pandas

    chosen = random.Random(0)
    rows = [_row(index, chosen.randrange(10), chosen.randrange(10)) for index in range(32)]
    rows = [{**row, **json.loads(changes)} for row in rows]
    pandas.DataFrame(rows).to_parquet(Path(rows_folder) / "sums.parquet")


def _make_model(folder):
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>"]
    more = ["what", "is", "plus", "?", "####", "<answer>", "</answer>", "=", "+", "a", "b", "c"]
    words = [*special, *map(str, range(100)), *more]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")


def _row(index, a, b):
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"what is {a} plus {b} ?"}],
        "problem": f"what is {a} plus {b} ?",
        "answer": str(a + b),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": "train", "index": index},
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
