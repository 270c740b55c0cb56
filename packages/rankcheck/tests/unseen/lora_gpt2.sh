# https://github.com/microsoft/LoRA at c4593f060e
# rankcheck --empty --launcher torchrun /CLONE/examples/NLG/src/gpt2_ft.py --platform local --train_data /DATA/lora_gpt2.jsonl --valid_data /DATA/lora_gpt2.jsonl --train_batch_size 4 --valid_batch_size 4 --grad_acc 2 --seq_len 32 --model_card gpt2.sm --lora_dim 2 --lora_alpha 4 --lora_dropout 0.1 --label_smooth 0.1 --scheduler linear --warmup_step 2 --max_epoch 3 --log_interval 2 --eval_interval 5 --save_interval 5 --lr 0.001 --work_dir model
# DATA: lora_gpt2.jsonl: 80 lines, each {"context": [...], "completion": [...]} of 4 to 12 random numbers below 200
cd /CLONE
ed -s examples/NLG/src/gpt2_ft.py <<'END'
301s/n_embd=768, n_layer=12, n_head=12/vocab_size_or_config_json_file=256, n_embd=32, n_layer=1, n_head=2/
17s|^|sys.path.append("/CLONE"); |
w
END
