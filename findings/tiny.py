"""A character tokenizer and a small random Llama, so that the scripts of this folder need no download of a model."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


torch.set_num_threads(1)


def tokenizer(characters='abcdefghijklmnopqrstuvwxyz {}[]":,.0123456789\n'):
    """One token per character; "<pad>" is 0 and "</s>" is 1."""
    words = {"<pad>": 0, "</s>": 1} | {character: i + 2 for i, character in enumerate(characters)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>")


def llama(vocabulary, seed=0, spread=0.15, **settings):
    """A Llama of two layers with weights N(0, spread), in float32 and in eval mode."""
    torch.manual_seed(seed)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **size | {"vocab_size": vocabulary, "num_key_value_heads": 2, "initializer_range": spread} | settings,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        max_position_embeddings=1024,
    )
    return LlamaForCausalLM(config).eval()
