# https://github.com/OpenGVLab/LLaMA-Adapter at 521a09da84
# rankcheck --empty --resume "--resume output/checkpoint-0.pth" --launcher torchrun /CLONE/alpaca_finetuning_v1/finetuning.py --model Llama7B_adapter --llama_model_path none/ --adapter_layer 2 --adapter_len 4 --max_seq_len 64 --batch_size 4 --epochs 5 --warmup_epochs 2 --blr 9e-3 --weight_decay 0.02 --num_workers 0 --output_dir output
# Needs timm and sentencepiece of llama_adapter/stand_ins on PYTHONPATH. 64 instructions, 16 of them for validation (200 in the original), each made of its index. The frozen LLaMA is random (DDP sends rank 0's to all); it saves after epochs 0 and 4
cd /CLONE/alpaca_finetuning_v1
ed -s finetuning.py <<'ED'
42s/200/16/
38s/=.*/= [{"instruction": f"tell {i} and {i * 7 % 64}", "input": "", "output": " ".join(str((i * 31 + j * j) % 97) for j in range(5 + i % 9))} for i in range(64)]/
w
ED
ed -s models_llama_adapter.py <<'ED'
29s,cuda.,,
16,17c
    params = {"dim": 32, "n_heads": 2, "n_layers": 3, "multiple_of": 16, "norm_eps": 1e-6}
.
13s/=.*/= {}/
w
ED
ed -s llama/tokenizer.py <<'ED'
16d
w
ED
ed -s llama/model.py <<'ED'
211s/4096/32/
w
ED
