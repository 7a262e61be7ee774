"""Makes data/wikitext and model/ without a network: sentences, a byte-level tokenizer and a tiny Llama configuration."""

import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
THINGS = ["river", "mountain", "station", "library", "harbour", "orchard"]
DOES = ["lies near", "was named after", "is older than", "can be seen from", "belongs to"]


def sentences(count, seed):
    choose = random.Random(seed)
    return [f"The {choose.choice(THINGS)} {choose.choice(DOES)} the {choose.choice(THINGS)} ." for _ in range(count)]


data = HERE / "data/wikitext"
data.mkdir(parents=True, exist_ok=True)
(data / "train.txt").write_text("\n".join(sentences(3000, 1)) + "\n", encoding="utf-8")
(data / "validation.txt").write_text("\n".join(sentences(200, 2)) + "\n", encoding="utf-8")

bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
bpe.train_from_iterator(
    sentences(3000, 1),
    trainers.BpeTrainer(vocab_size=384, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False),
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="</s>")
tokenizer.save_pretrained(HERE / "model")
LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    architectures=["LlamaForCausalLM"],
).save_pretrained(HERE / "model")  # fmt: skip
print("data/wikitext and model/ are ready")
