"""Run by the rehearsal environment's Python: conversations as tokens, beside LLaMA-Factory's. Prints JSON objects.

Its templates build a prompt from pieces, ours are rendered by Jinja: with the Jinja that LLaMA-Factory itself derives
from a template, and for the built-in ones with ours.
"""

import json
import sys
from pathlib import Path

import llamafactory
from llamafactory.data.template import get_template_and_fix_tokenizer
from llamafactory.hparams import DataArguments
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.lm import chat, conversations, prepare, records, tokens

DATA = Path(llamafactory.__file__).parents[2] / "data"
# A template, its end, its start, and ours. LLaMA-Factory has a loss on the line ends after an answer of the last two.
CASES = (
    ("qwen", "<|im_end|>", "", ""),
    ("llama3", "<|eot_id|>", "<|begin_of_text|>", ""),
    ("qwen3_nothink", "<|im_end|>", "", ""),
    ("chatml", "<|im_end|>", "", "chatml"),
    ("alpaca", "<|endoftext|>", "", "alpaca"),
)

read = [
    conversations.read(records.parse(item, place), place)
    for name in ("alpaca_en_demo.json", "alpaca_zh_demo.json", "identity.json")
    for group in records.groups(DATA / name)
    for place, item in list(group.places())[:120]
]
for first in range(0, 120, 4):
    system = [{"role": "system", "content": "Be brief."}] if first % 8 else []
    messages = [message for talk in read[first : first + 3] for message in talk.messages]
    read.append(conversations.Conversation([*system, *messages]))
vocabulary = tokens.train_bpe([message["content"] for talk in read for message in talk.messages], 3000).tokenizer
split = pre_tokenizers.Split(Regex(prepare.SPLITTINGS[0]), "isolated")
vocabulary.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
words = "im_start im_end begin_of_text eot_id eom_id start_header_id end_header_id"
vocabulary.add_special_tokens([f"<|{word}|>" for word in words.split()])


def without_line_ends(ids, flags):
    """The flags, without those of tokens that are only line ends."""
    ends = {token for text, token in vocabulary.get_vocab().items() if not text.strip("Ċ")}
    return [0 if token in ends else flag for token, flag in zip(ids, flags, strict=True)]


for name, end, start, own in CASES:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, eos_token=end, bos_token=start or None, pad_token="<|endoftext|>"
    )
    template = get_template_and_fix_tokenizer(theirs, DataArguments(template=name))
    source = chat.BUILT_IN[own] if own else theirs.chat_template
    ours = chat.ChatTemplate(source, {"eos_token": end, "bos_token": start}, name)
    same_tokens = same_answers = 0
    for talk in read:
        messages = list(talk.messages)
        first = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
        pairs = template.encode_multiturn(theirs, messages, first, None, False)
        wanted = [token for pair in pairs for token in (*pair[0], *pair[1])]
        of_answers = [flag for prompt, answer in pairs for flag in (*[0] * len(prompt), *[1] * len(answer))]
        ((ids, answers),) = chat.encode(vocabulary, [ours.render(talk, "here")])
        flags = [int(any(low <= place < high for low, high in answers)) for place in range(len(ids))]
        if own:
            of_answers, flags = without_line_ends(wanted, of_answers), without_line_ends(ids, flags)
        same_tokens += ids == wanted
        same_answers += flags == of_answers
    found = {"name": name, "talks": len(read), "tokens": same_tokens, "answers": same_answers}
    sys.stdout.write(json.dumps(found) + "\n")
