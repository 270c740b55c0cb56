# https://github.com/ltgoslo/gpt-bert at 9fc15074d5
# rankcheck --empty --resume "--checkpoint_filename hybrid_100M_1_2_state_dict.bin" --launcher torchrun /CLONE/pretraining/train_multi_gpu.py --config_file /CLONE/configs/tiny.json --tokenizer_path /CLONE/tokenizers/tiny.json --output_dir . --hybrid_numerator 1 --hybrid_denominator 2 --seq_length 16 --local_batch_size 4 --global_batch_size 32 --max_steps 40 --save_every 10
# The project starts it with srun: SLURM_PROCID is read as RANK here, which its launch.sh sets to it. Rank 0 learns masked, rank 1 causal (1/2; 15/16 by default). Documents are random tokens. The original dies at step 0, twice: dataset of an iterator (315) and Path.replace with two arguments (77, 392, 402); both are mended here, as nothing runs without. Validation (ValidationDataset has no set_global_step) is left as it is: its first call, at the end here, raises
cd /CLONE
cat > configs/tiny.json <<'JSON'
{"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64, "position_bucket_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 64, "layer_norm_eps": 1.0e-5}
JSON
cat > tokenizers/tiny.json <<'JSON'
{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null, "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3, "<mask>": 4, "<special_0>": 5, "<special_1>": 6, "<special_2>": 7, "<special_3>": 8, "<special_4>": 9, "<special_5>": 10, "<special_6>": 11, "<special_7>": 12, "<special_8>": 13, "<special_9>": 14, "<special_10>": 15, "w0": 16, "w1": 17, "w2": 18, "w3": 19, "w4": 20, "w5": 21, "w6": 22, "w7": 23, "w8": 24, "w9": 25, "w10": 26, "w11": 27, "w12": 28, "w13": 29, "w14": 30, "w15": 31, "w16": 32, "w17": 33, "w18": 34, "w19": 35, "w20": 36, "w21": 37, "w22": 38, "w23": 39, "w24": 40, "w25": 41, "w26": 42, "w27": 43, "w28": 44, "w29": 45, "w30": 46, "w31": 47, "w32": 48, "w33": 49, "w34": 50, "w35": 51, "w36": 52, "w37": 53, "w38": 54, "w39": 55, "w40": 56, "w41": 57, "w42": 58, "w43": 59, "w44": 60, "w45": 61, "w46": 62, "w47": 63}, "unk_token": "<unk>"}}
JSON
cd pretraining
ed -s train_multi_gpu.py <<'ED'
315s,dataset,_dataset,
88s/int.*/torch.cuda.device_count()/
87s/SLURM_PROCID/RANK/
77s/= \(.*\)/= str(\1)/
28s/SLURM_PROCID/RANK/
w
ED
ed -s model_logging.py <<'ED'
6s/SLURM_PROCID/RANK/
w
ED
ed -s dataset.py <<'ED'
344s/=.*/= random_documents(6)/
226s/=.*/= random_documents(12)/
85s/=.*/= random_documents(12)/
2a


def random_documents(number):
    return [torch.randint(16, 64, (60,), generator=torch.Generator().manual_seed(i)).short() for i in range(number)]
.
w
ED
