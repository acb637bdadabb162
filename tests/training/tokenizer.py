"""The tokenizer of the demo model: one token per byte of UTF-8, and a few special tokens.

Token 97 is byte 97 is ``a``. Nothing is merged: a text has as many tokens as bytes in Unicode's normal form
C, which nearly all text is in already.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
"""End of an answer and of a turn of a chat; also pads short rows."""
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
TOOL = "<|tool|>"
SPECIAL_TOKENS = (END, SYSTEM, USER, ASSISTANT, TOOL)

TOKEN_ID = {token: 256 + position for position, token in enumerate(SPECIAL_TOKENS)}
"""Ids of the special tokens, which follow the 256 bytes."""
VOCABULARY_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def byte_names() -> list[str]:
    """Return the printable character that stands for each byte, 0 to 255, in tokenizer files like GPT-2's."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_in = {byte: byte for byte in printable} | {byte: 256 + place for place, byte in enumerate(others)}
    return [chr(stand_in[byte]) for byte in range(256)]


def build_tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a model with a context of `max_tokens` tokens."""
    names = byte_names()
    tokenizer = Tokenizer(models.BPE(vocab={name: byte for byte, name in enumerate(names)}, merges=[]))
    # AutoTokenizer loads a Qwen2's tokenizer as Qwen2's own class, which normalizes; so all loaders agree.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        clean_up_tokenization_spaces=False,
        model_max_length=max_tokens,
        chat_template=CHAT_TEMPLATE,
    )
