"""Stands in for sentencepiece: a word is a token."""


class SentencePieceProcessor:
    def __init__(self, model_file):
        pass

    def vocab_size(self):
        return 128

    get_piece_size = vocab_size

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return -1

    def encode(self, text):
        return [3 + sum(word.encode()) % 125 for word in text.split()]
