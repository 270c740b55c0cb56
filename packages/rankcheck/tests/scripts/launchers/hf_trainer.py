"""transformers.Trainer, with bf16: torchrun --nproc-per-node=2 hf_trainer.py"""

import os

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Tokens(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = (index + torch.arange(8)) % 64
        return {"input_ids": tokens, "labels": tokens}


def main():
    args = TrainingArguments(
        output_dir="run",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=1e-3,
        bf16=True,
        logging_steps=4,
        save_strategy="epoch",
        report_to="none",
        ddp_find_unused_parameters=False,
    )
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Tokens())
    last = get_last_checkpoint("run") if os.path.isdir("run") else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model("final")


if __name__ == "__main__":
    main()
