"""A tokenizer that is made in an instant."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers


def small_tokenizer() -> Tokenizer:
    """Bytes and a few words: every character beyond ASCII is several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(["read the file and write the answer"], trainer)
    marks = ("<|im_start|>", "<|im_end|>", "<tool_call>")
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in (*marks, "a word of its own")])
    return tokenizer
